"""What requests may ask for and what they are answered: shapes of E2B's API, and no I/O."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, unquote

from aiohttp import web

from agentenv.errors import (
    AgentEnvError,
    ConfigError,
    ForbiddenError,
    LeaseLostError,
    QuotaError,
    ToolCallError,
    TooManyRequestsError,
    UnauthorizedError,
)
from agentenv.sdk.roots import Network
from agentenv.wire.network import NetworkPolicy

Item = TypeVar("Item")

_EVERYTHING: Final = frozenset({"0.0.0.0/0", "::/0"})
_HOST_NAME: Final = re.compile(r"(\d{1,5})-([A-Za-z0-9]+)\.")
_REFUSED_NETWORK: Final = {
    "dnsServers": "name servers of its own",
    "egressProxy": "a proxy of its own",
    "httpsPorts": "other ports of HTTPS",
    "maskRequestHost": "another Host header",
    "rules": "changes of what its requests say",
}
VOLUMES: Final = "volumes: a slot's files are its own. Put shared files into a template, or upload them"
_REFUSED: Final = {
    "volumeMounts": VOLUMES,
    "iam": "tokens of an identity provider",
}
_STATUS: Final[Sequence[tuple[type[AgentEnvError], int]]] = (
    (UnauthorizedError, 401),
    (ForbiddenError, 403),
    (QuotaError, 429),
    (TooManyRequestsError, 429),
    (ConfigError, 400),
    (ToolCallError, 400),
    (LeaseLostError, 404),
)


class RefusalError(Exception):
    """A request that is answered with this HTTP status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def refusal(error: Exception) -> web.Response:
    """The answer to a request that failed."""
    if isinstance(error, RefusalError):
        return refused(error.status, error.message)
    if isinstance(error, AgentEnvError):
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 503)
        return refused(status, f"{error.message}; {error.next_step}" if error.next_step else error.message)
    return refused(400, f"the request is malformed: {error!r}")


def refused(status: int, message: str) -> web.Response:
    """An answer in the form that E2B's SDKs read."""
    return web.json_response({"code": status, "message": message}, status=status)


def moment(unix_s: float) -> str:
    """A time as E2B writes it."""
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).isoformat().replace("+00:00", "Z")


def unix_s(text: str) -> float:
    """The time that somebody wrote: seconds, or an ISO date. Raises ValueError."""
    if text.isdecimal():
        return float(text)
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def sandbox_and_port(host: str) -> tuple[str, int] | None:
    """The sandbox and the port that a host name is for: ``PORT-SANDBOX.DOMAIN``."""
    found = _HOST_NAME.match(host)
    return (found[2], int(found[1])) if found else None


def check_supported(asked: Mapping[str, Any]) -> None:
    """Raises RefusalError naming what of a new sandbox's options no slot has."""
    for name, what in _REFUSED.items():
        if asked.get(name):
            raise RefusalError(501, f"{name}: this farm has no {what}")


def network_of(asked: Mapping[str, Any]) -> Network:
    """What a sandbox may reach, of the options ``allow_internet_access`` and ``network``, which may be all of them.

    As E2B has it: without a denial everything is allowed, and what is allowed goes before what is denied. Raises
    RefusalError for what slots do not have, ConfigError for a host that is none.
    """
    rules = asked.get("network") or asked
    for name, what in _REFUSED_NETWORK.items():
        if rules.get(name):
            raise RefusalError(501, f"network.{name}: slots do not have {what}")
    allowed, denied = list(rules.get("allowOut") or ()), set(rules.get("denyOut") or ())
    closed = False in (asked.get("allow_internet_access"), rules.get("allow_internet_access"))
    if _EVERYTHING & set(allowed):
        return "public"
    if closed or _EVERYTHING & denied:
        return allowed or "none"
    if denied and allowed:
        raise RefusalError(
            501,
            "network.denyOut: slots have no exceptions (allowOut) of single denied networks "
            f"({', '.join(sorted(denied))}); deny 0.0.0.0/0 and allow what is needed, or deny what is not",
        )
    return NetworkPolicy("public", denied=tuple(sorted(denied))) if denied else "public"


def signed_for(query: Mapping[str, str], token: str) -> bool:
    """Whether the sandbox with this token signed the link to a file (``signature``, version 1)."""
    for operation in ("read", "write"):
        parts = [query.get("path", ""), operation, query.get("username", ""), token]
        if "signature_expiration" in query:
            parts.append(query["signature_expiration"])
        made = base64.b64encode(hashlib.sha256(":".join(parts).encode()).digest()).rstrip(b"=").decode()
        if query["signature"] == f"v1_{made}":
            return True
    return False


def wanted_metadata(text: str) -> dict[str, str]:
    """The filter ``metadata`` of a list."""
    return {unquote(name): unquote(value) for name, value in parse_qsl(text)}


def page(found: Sequence[Item], query: Mapping[str, str], told: Callable[[Item], Any]) -> web.Response:
    """One page of a list, and in a header where the next one begins. Raises RefusalError."""
    try:
        begin, count = int(query.get("nextToken") or 0), int(query.get("limit") or 100)
    except ValueError:
        raise RefusalError(400, "nextToken and limit have to be numbers") from None
    if begin < 0 or not 1 <= count <= 100:
        raise RefusalError(400, "limit: allowed are 1 to 100")
    more = {"x-next-token": str(begin + count)} if begin + count < len(found) else {}
    return web.json_response([told(each) for each in found[begin : begin + count]], headers=more)


def words(values: Iterable[str]) -> list[str]:
    """Values of a query that may be given several times, or separated by commas."""
    return [word for value in values for word in value.split(",") if word]


async def body_of(request: web.Request) -> dict[str, Any]:
    """The object in a request's body; empty without one. Raises RefusalError."""
    try:
        found = json.loads(await request.text() or "{}")
    except ValueError as error:
        raise RefusalError(400, f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise RefusalError(400, "the body has to be an object")
    return found
