"""A container as tests ask it, over the plain endpoints and by other means than what is tested. Blocking."""

from __future__ import annotations

import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agentenv.errors import SandboxUnavailableError
from agentenv.slots.backends.nomad import facts
from agentenv.wire.base import WireModel
from agentenv.wire.calls import Batch, Call, CallResult, Result
from agentenv.wire.leases import LeaseGrant, LeaseRequest
from agentenv.wire.roots import RootSpec
from agentenv.wire.server import ServerInfo

_LEASE_S = 900.0
"""A lease that ends cancels its call, and a call in an emulated machine takes minutes on a loaded one."""
_QUICK_S = 60.0


def url_of(allocation: dict[str, Any]) -> str | None:
    """Where an allocation (as ``/v1/allocation/ID`` describes it) serves; None before it was placed."""
    address = facts.allocation(allocation).address
    return None if address is None else f"http://{address}"


def healthy(base_url: str) -> bool:
    """Whether a sandbox server answers there."""
    try:
        _ask(base_url, "", "/health")
    except SandboxUnavailableError:
        return False
    return True


def run_in_slot(base_url: str, token: str, command: str, *, slot: int = 0, timeout_s: float = _QUICK_S) -> CallResult:
    """Lease a slot, run one command in it, give it back."""
    boot = server_info(base_url, token, timeout_s).boot
    with leased(base_url, token, slot=slot, timeout_s=timeout_s) as grant:
        call = Call(
            id=secrets.token_hex(8),
            lease=grant.key,
            tool="bash",
            arguments={"command": command},
            timeout_s=timeout_s,
            boot=boot,
        )
        return Result.model_validate(_ask(base_url, token, "/v1/batch", Batch(calls=(call,)), timeout_s)).result


@contextmanager
def leased(
    base_url: str, token: str, root: RootSpec | None = None, *, slot: int = 0, timeout_s: float = _QUICK_S
) -> Iterator[LeaseGrant]:
    """A lease of a slot, given back at the end."""
    wanted = LeaseRequest(slot=slot, trajectory="test", ttl_s=_LEASE_S, request_id=secrets.token_hex(8), root=root)
    grant = LeaseGrant.model_validate(_ask(base_url, token, "/v1/leases", wanted, timeout_s))
    try:
        yield grant
    finally:
        _ask(base_url, token, "/v1/leases/release", grant.key, timeout_s)


def server_info(base_url: str, token: str, timeout_s: float = _QUICK_S) -> ServerInfo:
    """The server's account of itself. Raises SandboxUnavailableError: no answer, or the token is wrong."""
    return ServerInfo.model_validate(_ask(base_url, token, "/v1/info", timeout_s=timeout_s))


def _ask(base_url: str, token: str, path: str, body: WireModel | None = None, timeout_s: float = _QUICK_S) -> Any:
    """The last line of the answer, parsed."""
    content = None if body is None else body.model_dump_json().encode()
    request = urllib.request.Request(f"{base_url}{path}", data=content)
    request.add_header("Authorization", f"Bearer {token}")
    request.add_header("Content-Type", "application/json")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            lines = answer.read().splitlines()
    except urllib.error.HTTPError as error:
        with error:
            words = error.read().decode(errors="replace")
        raise SandboxUnavailableError(f"{base_url}{path}: {error.code} {words}") from error
    except OSError as error:
        raise SandboxUnavailableError(f"{base_url}{path}: {error}") from error
    return json.loads(lines[-1])
