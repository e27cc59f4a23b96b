"""The network a lease gives its slot: nothing, the outside, or named hosts through a proxy.

Pure, standard library only, because the privileged supervisor imports it. Hosts are judged twice: a name before it is
resolved, and each of its addresses before it is connected to. Only an address that was judged may be connected to, so
a name that leads elsewhere the next time it is resolved (DNS rebinding) gains nothing.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, Self, get_args

from agentenv.errors import ConfigError, InvalidArgumentsError, PolicyRefusalError
from agentenv.wire.addresses import Address, Network, host, host_name, is_public, unwrapped

NetworkKind = Literal["none", "public", "allow"]
MOST_HOSTS: Final = 200
"""Of one policy: its JSON stays below 60 KiB, whatever their length."""
_MOST_SHOWN: Final = 20
_SPLIT: Final = re.compile(r"(?P<host>\[[^\]]*\](?:/\d+)?|[^:]*)(?::(?P<port>\d{1,5}))?")
_NEVER: Final = tuple(
    ipaddress.ip_network(network)
    for network in (
        *("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4"),
        *("::/127", "fe80::/10", "ff00::/8", "64:ff9b:1::/48"),
    )
)
"""Unassigned or this machine's (0/8, loopback), link-local with the cloud's metadata, multicast, reserved; a prefix
that translates to IPv4 addresses in a way of each network's own (RFC 8215)."""


@dataclass(frozen=True)
class HostRule:
    """One entry of an allow list. Exactly one of ``name`` and ``network`` is set; ``port`` None: every port."""

    name: str = ""
    """A host name, ``*.`` and the domain that its hosts are below, or ``*``: any host."""
    network: Network | None = None
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``example.org``, ``*.example.org``, ``*``, ``192.0.2.1``, ``10.0.0.0/8``, ``2001:db8::/32``, each also
        with a port: ``example.org:443``, ``[2001:db8::1]:443``. Raises InvalidArgumentsError."""
        network = _as_network(text)
        if network is not None:
            return cls(network=network)
        split = _SPLIT.fullmatch(text)
        if split is None:
            raise InvalidArgumentsError(f"{text[:300]!r} is neither a host, nor an address, nor a network")
        port = int(split["port"]) if split["port"] else None
        if port is not None and not 1 <= port <= 65535:
            raise InvalidArgumentsError(f"port {port} does not exist")
        network = _as_network(split["host"].replace("[", "").replace("]", ""))
        if network is not None:
            return cls(network=network, port=port)
        wild = split["host"].startswith("*.")
        name = "*" if split["host"] == "*" else "*." * wild + host_name(split["host"][2 * wild :])
        return cls(name, port=port)

    def __str__(self) -> str:
        if self.network is None:
            text = self.name
        else:
            one = self.network.prefixlen == self.network.max_prefixlen
            text = str(self.network.network_address if one else self.network)
            if self.port is not None and ":" in text:
                address, slash, bits = text.partition("/")
                text = f"[{address}]{slash}{bits}"
        return text if self.port is None else f"{text}:{self.port}"

    def names(self, wanted: str) -> bool:
        """Whether it is a rule for this host name (as of :func:`~agentenv.wire.addresses.host_name`)."""
        if self.name.startswith("*."):
            return wanted.endswith(self.name[1:])
        return self.name in ("*", wanted)

    def covers(self, address: Address) -> bool:
        """Whether it is a rule for this address by its number."""
        return self.network is not None and address in self.network

    def serves(self, port: int) -> bool:
        """Whether the rule is for this port."""
        return self.port in (None, port)


@dataclass(frozen=True)
class NetworkPolicy:
    """What a slot may reach while the policy holds.

    ``none``: nothing but itself. ``public``: everything except closed networks, and of ``denied`` nothing, which are
    addresses and networks for all ports: a name would say nothing of its addresses, which are reached by number as
    well. ``allow``: ``hosts`` only, through a proxy. Both are written as :meth:`HostRule.parse` reads them, and kept in
    their one form. A name is followed to public addresses only; an address inside a private network has to be
    covered by an address or a network of the list. Raises ConfigError naming the field.
    """

    kind: NetworkKind = "none"
    hosts: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_shape(self.kind, self.hosts, self.denied, "network")
        rules = [_rule(text, f"network.hosts[{number}]") for number, text in enumerate(self.hosts)]
        object.__setattr__(self, "hosts", tuple(map(str, rules)))
        denied = [_denied(text, f"network.denied[{number}]") for number, text in enumerate(self.denied)]
        object.__setattr__(self, "denied", tuple(map(str, denied)))

    @cached_property
    def rules(self) -> tuple[HostRule, ...]:
        """``hosts``, parsed."""
        return tuple(map(HostRule.parse, self.hosts))

    @cached_property
    def denied_networks(self) -> tuple[Network, ...]:
        """``denied``, parsed."""
        return tuple(map(ipaddress.ip_network, self.denied))

    @classmethod
    def parse(cls, raw: Any, where: str = "network") -> Self:
        """Create from parsed JSON: ``{"kind": "allow", "hosts": ["example.org"]}``. Raises ConfigError naming the field
        (below ``where``) that is missing, unknown, mistyped or malformed."""
        if not isinstance(raw, dict) or raw.keys() - {"kind", "hosts", "denied"} or "kind" not in raw:
            raise ConfigError(where, "must be an object with kind, and hosts if that is allow")
        hosts, denied = raw.get("hosts", []), raw.get("denied", [])
        for name, given in (("hosts", hosts), ("denied", denied)):
            if not isinstance(given, list):
                raise ConfigError(f"{where}.{name}", "must be a list")
        _check_shape(raw["kind"], hosts, denied, where)
        try:
            return cls(raw["kind"], tuple(hosts), tuple(denied))
        except ConfigError as error:
            field_name = error.field.replace("network", where, 1)
            reason = error.message.partition(": ")[2]
            raise ConfigError(field_name, reason, next_step=error.next_step) from error

    def to_json(self) -> dict[str, Any]:
        """What :meth:`parse` reads."""
        told: dict[str, Any] = {"kind": self.kind, "hosts": list(self.hosts)}
        return told | {"denied": list(self.denied)} if self.denied else told

    def described(self) -> str:
        """The policy in a sentence's words, for a model."""
        if self.kind == "none":
            return "This sandbox has no network access."
        if self.kind == "public":
            denied = f", except {_shown(self.denied)}" if self.denied else ""
            return (
                f"This sandbox may connect to any host outside its own machine and the networks closed to it{denied}."
            )
        return f"This sandbox may connect only to: {_shown(self.hosts)}."


def judge_host(policy: NetworkPolicy, wanted: str | Address, port: int) -> None:
    """Raise PolicyRefusalError unless the policy lets this host and port be connected to, as far as its name shows.
    ``wanted`` is as of :func:`~agentenv.wire.addresses.host`; the address is judged by :func:`judge_address`."""
    if policy.kind == "public":
        return
    if isinstance(wanted, str):
        rules = [rule for rule in policy.rules if rule.names(wanted)]
    else:
        rules = [rule for rule in policy.rules if rule.covers(unwrapped(wanted)) or rule.name == "*"]
    if not rules:
        raise PolicyRefusalError(f"{wanted} is not an allowed host. {policy.described()}")
    if not any(rule.serves(port) for rule in rules):
        ports = ", ".join(sorted({str(rule.port) for rule in rules}, key=int))
        raise PolicyRefusalError(f"Port {port} of {wanted} is not allowed, only {ports}. {policy.described()}")


def judge_address(policy: NetworkPolicy, address: Address, port: int, closed: Iterable[Network] = ()) -> None:
    """Raise PolicyRefusalError unless a host that :func:`judge_host` let pass may be connected to at this address.

    ``closed``: networks no slot may reach, this machine's own addresses among them. They, loopback, link-local
    addresses, multicast and reserved addresses are refused by every policy.
    """
    real = unwrapped(address)
    if any(real in network for network in (*_NEVER, *closed)):
        raise PolicyRefusalError(f"{real} is closed to every sandbox (this machine or a closed network).")
    if any(real in network for network in policy.denied_networks):
        raise PolicyRefusalError(f"{real} is denied. {policy.described()}")
    if policy.kind == "public" or any(rule.covers(real) and rule.serves(port) for rule in policy.rules):
        return
    if not is_public(real):
        raise PolicyRefusalError(
            f"{real} is not a public address, and no address or network of the policy covers it. {policy.described()}"
        )


def allows(
    policy: NetworkPolicy, wanted: str, port: int, address: Address | None = None, closed: Iterable[Network] = ()
) -> bool:
    """Whether a slot under the policy may connect to this host and port, at ``address`` if that is a name. Malformed
    hosts are not allowed."""
    try:
        target = host(wanted)
        judge_host(policy, target, port)
        reached = address if isinstance(target, str) else target
        if reached is not None:
            judge_address(policy, reached, port, closed)
    except (PolicyRefusalError, InvalidArgumentsError):
        return False
    return True


def _shown(entries: tuple[str, ...]) -> str:
    more = f" and {len(entries) - _MOST_SHOWN} more" if len(entries) > _MOST_SHOWN else ""
    return ", ".join(entries[:_MOST_SHOWN]) + more


def _check_shape(kind: Any, hosts: Iterable[Any], denied: Iterable[Any], where: str) -> None:
    hosts, denied = tuple(hosts), tuple(denied)
    if kind not in get_args(NetworkKind):
        allowed = ", ".join(get_args(NetworkKind))
        raise ConfigError(f"{where}.kind", f"got {str(kind)[:100]!r}", next_step=f"allowed: {allowed}")
    if kind != "allow" and hosts:
        raise ConfigError(f"{where}.hosts", f"belong to allow, not to {kind}")
    if kind == "allow" and not 1 <= len(hosts) <= MOST_HOSTS:
        raise ConfigError(
            f"{where}.hosts", f"{len(hosts)} of them; 1 to {MOST_HOSTS} are possible", next_step="for no host: none"
        )
    if kind != "public" and denied:
        raise ConfigError(f"{where}.denied", f"belong to public, not to {kind}")
    if len(denied) > MOST_HOSTS:
        raise ConfigError(f"{where}.denied", f"{len(denied)} of them; at most {MOST_HOSTS} are possible")


def _rule(text: Any, where: str) -> HostRule:
    if not isinstance(text, str):
        raise ConfigError(where, f"must be a string, got {type(text).__name__}")
    try:
        return HostRule.parse(text)
    except InvalidArgumentsError as error:
        cure = error.next_step or "write example.org, *.example.org, 192.0.2.1, 10.0.0.0/8, or one of them with :PORT"
        raise ConfigError(where, error.message, next_step=cure) from error


def _denied(text: Any, where: str) -> Network:
    rule = _rule(text, where)
    if rule.network is None:
        cure = "deny its addresses or networks, or allow only what is needed (a list of hosts)"
        raise ConfigError(
            where, f"{text[:300]!r} is a name, whose addresses could be reached by number", next_step=cure
        )
    if rule.port is not None:
        raise ConfigError(where, f"{text[:300]!r} has a port", next_step="deny the address for all ports")
    if not rule.network.prefixlen:
        raise ConfigError(where, f"{text[:300]!r} is every address", next_step="for no network: none")
    return rule.network


def _as_network(text: str) -> Network | None:
    """The address or network it is written as, not wrapped into another version's; None for a name.

    Raises InvalidArgumentsError for a network with bits beyond its prefix, which is a mistake in either.
    """
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        if "host bits set" in str(error):
            raise InvalidArgumentsError(f"{text[:300]} is not a network: {error}") from error
        return None
    if isinstance(network, ipaddress.IPv6Network) and network.network_address.scope_id is None:
        real = unwrapped(network.network_address)
        if isinstance(real, ipaddress.IPv4Address):
            if network.prefixlen < 128:
                raise InvalidArgumentsError(f"{text[:300]} holds IPv4 addresses", next_step="write their IPv4 network")
            return ipaddress.ip_network(real)
        return network
    return network if isinstance(network, ipaddress.IPv4Network) else None


NO_NETWORK: Final = NetworkPolicy()
