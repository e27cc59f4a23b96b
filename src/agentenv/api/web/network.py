"""Network access of web tools: an allow list of hosts, and only public addresses unless others are named.

Names are checked before they are resolved, addresses after. A public name that points to an internal address (or
changes to one between two lookups) is useless, because only checked addresses are connected to.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from agentenv.api.tool_server.secrets import Secrets
from agentenv.api.tool_server.settings import AllowRule
from agentenv.errors import ConfigError, InvalidArgumentsError, PolicyRefusalError
from agentenv.tools.schema import as_json
from agentenv.wire.addresses import Address, Network, as_address, ends_in_a_number, is_public, unwrapped

_WEB_PORTS: Final = (80, 443)
HTTPS_PORT: Final = 443
"""The only port of a rule with credentials unless it names others: the model chooses between http:// and https://."""
_HOST: Final = re.compile(r"[A-Za-z0-9._:%-]+")
_MOST_URL_CHARS: Final = 8_192


@dataclass(frozen=True)
class _Rule:
    host: str
    network: Network | None
    ports: tuple[int, ...]
    headers: dict[str, str]
    ports_named: bool

    def names(self, host: str) -> bool:
        """Whether this rule applies to that name."""
        if self.network is not None:
            return False
        return self.host in ("*", host) or (self.host.startswith("*.") and host.endswith(self.host[1:]))

    def may_send_to(self, url: URL) -> bool:
        """Whether its headers may be sent there. Over http only to a port the operator named for it."""
        return url.scheme == "https" or (self.ports_named and url.port != HTTPS_PORT)


class AllowList:
    """Checks hosts and addresses against the rules. Pure.

    Raises:
        ConfigError: a rule's host is neither a name, a pattern nor an address, or its headers name a secret
            that is not declared.
    """

    def __init__(self, rules: Iterable[AllowRule] = (), secrets: Secrets | None = None) -> None:
        self._rules = tuple(_read(rule, secrets or Secrets({})) for rule in rules)

    def __bool__(self) -> bool:
        return bool(self._rules)

    def judged(self, url: str) -> URL:
        """The URL, if its host is allowed; its addresses are checked when they are known.

        Raises: InvalidArgumentsError: it is not an http or https URL. PolicyRefusalError: its host or port is not
        on the list.
        """
        parsed = parsed_url(url)
        self.judge_host(parsed.raw_host or "", parsed.port or 0)  # parsed_url accepted only complete ones
        return parsed

    def judge_host(self, host: str, port: int) -> None:
        """Raise PolicyRefusalError when this host and port are not on the list."""
        address = as_address(host)
        if address is not None:
            self.judge_address(address, port, any_name=False)
            return
        folded = host.lower().rstrip(".")
        if ends_in_a_number(folded):
            raise PolicyRefusalError(
                f"{folded} is neither a host name nor an IP address",
                next_step="write an address as 192.0.2.1 or [2001:db8::1]",
            )
        named = [rule for rule in self._rules if rule.names(folded)]
        if not named:
            raise PolicyRefusalError(f"the host {folded} is not on the tool server's allow list")
        if not any(port in rule.ports for rule in named):
            ports = ", ".join(str(each) for each in sorted({port for rule in named for port in rule.ports}))
            raise PolicyRefusalError(
                f"port {port} of {folded} is not on the tool server's allow list", next_step=f"allowed: {ports}"
            )

    def judge_address(self, address: Address, port: int, *, any_name: bool = True) -> None:
        """Raise PolicyRefusalError when the address is not allowed. ``any_name``: a name that is on the list led
        here."""
        real = unwrapped(address)
        if any(rule.network is not None and real in rule.network and port in rule.ports for rule in self._rules):
            return
        if not is_public(real):
            raise PolicyRefusalError(
                f"{real} is not a public address, and the tool server's allow list does not name it"
            )
        if any_name or any(rule.host == "*" and port in rule.ports for rule in self._rules):
            return
        raise PolicyRefusalError(f"the address {real} is not on the tool server's allow list")

    def headers_for(self, url: URL) -> dict[str, str]:
        """Headers the operator sends to this host: credentials the policy never sees. Over http they go only to
        ports the operator named."""
        host, port = (url.raw_host or "").lower().rstrip("."), url.port
        address = as_address(host)
        found: dict[str, str] = {}
        for rule in self._rules:
            exact = rule.network is not None and address is not None and unwrapped(address) in rule.network
            if (exact or rule.names(host)) and port in rule.ports and rule.may_send_to(url):
                found.update(rule.headers)
        return found

    async def addresses(self, host: str, port: int) -> list[str]:
        """The addresses of a judged host that may be connected to.

        Raises: PolicyRefusalError when it has no such address; OSError when it cannot be resolved.
        """
        self.judge_host(host, port)
        found = await GuardedResolver(self).resolve(host, port, socket.AF_UNSPEC)
        return [each["host"] for each in found]


class GuardedResolver(AbstractResolver):
    """Resolves names to those of their addresses that may be connected to."""

    def __init__(self, allowed: AllowList) -> None:
        self._allowed = allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """aiohttp's interface. Raises: PolicyRefusalError when no address of the name may be connected to."""
        found = await ThreadedResolver().resolve(host, port, family)
        kept: list[ResolveResult] = []
        refusal: PolicyRefusalError | None = None
        for each in found:
            try:
                self._allowed.judge_address(ipaddress.ip_address(each["host"].partition("%")[0]), port)
                kept.append(each)
            except PolicyRefusalError as error:
                refusal = error
        if not kept and refusal is not None:
            raise PolicyRefusalError(f"{host}: {refusal}")
        return kept

    async def close(self) -> None:
        """Does nothing."""


def parsed_url(url: str) -> URL:
    """An http(s) URL with a host. Raises: InvalidArgumentsError, written for the model."""
    try:
        if len(url) > _MOST_URL_CHARS:
            raise ValueError(f"longer than {_MOST_URL_CHARS} characters")
        parsed = URL(url.strip())
        if parsed.scheme not in ("http", "https") or not parsed.raw_host or not parsed.port:
            raise ValueError("give an absolute http:// or https:// URL")
        if not _HOST.fullmatch(parsed.raw_host):
            raise ValueError("its host is invalid")
        if parsed.user is not None or parsed.password is not None:
            raise ValueError("it must not contain a user name or password")
    except (ValueError, UnicodeError) as error:
        raise InvalidArgumentsError(f"{as_json(url)} cannot be fetched: {error}") from error
    return parsed


def _read(rule: AllowRule, secrets: Secrets) -> _Rule:
    host = rule.host.lower().rstrip(".").strip("[]")
    network: Network | None = None
    try:
        network = ipaddress.ip_network(host)
    except ValueError as error:
        wild = host.removeprefix("*.") if host != "*" else ""
        if "*" in wild or "/" in host or ":" in host or " " in host or ends_in_a_number(host):
            cure = "give a name, *.name, *, an address or a network; ports go into `ports`"
            raise ConfigError("network.allow.host", f"got {rule.host!r}", next_step=cure) from error
    if rule.headers and host == "*":
        raise ConfigError("network.allow.headers", "would go to every host", next_step="give them to a host by name")
    ports = rule.ports or ((HTTPS_PORT,) if rule.headers else _WEB_PORTS)
    return _Rule(host, network, ports, _filled(rule.headers, secrets), ports_named=bool(rule.ports))


def _filled(headers: dict[str, str], secrets: Secrets) -> dict[str, str]:
    class Values(dict[str, str]):
        def __missing__(self, name: str) -> str:
            return secrets.value(name)

    return {name: text.format_map(Values()) for name, text in headers.items()}
