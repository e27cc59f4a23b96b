"""The packets between supervisor and server, as the supervisor sees them: built here, checked here.

The server talks to the network, so it is the less trusted side: whatever it sends that is not
exactly one of a few requests is a ProtocolError, and the server is started anew.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

from agentenv.errors import ConfigError, ProtocolError
from agentenv.sandbox.culprits import Loss
from agentenv.sandbox.limit_watch import LimitFiles
from agentenv.sandbox.limits import CgroupPlan
from agentenv.sandbox.loop_watch import Stalls
from agentenv.wire.spec import SandboxSpec

MAX_PACKET_BYTES = 64 * 1024
MAX_LEASE_BYTES = 16 * 1024
_MAX_STACK = 8 * 1024
Op = Literal["serving", "ping", "reset", "seal", "remember"]
_FIELDS: dict[Op, frozenset[str]] = {
    "serving": frozenset({"op"}),
    "ping": frozenset({"op"}),
    "reset": frozenset({"op", "slot"}),
    "seal": frozenset({"op", "slot"}),
    "remember": frozenset({"op", "slot", "lease"}),
}
_OPS: dict[str, Op] = {op: op for op in _FIELDS}
_OPTIONAL = frozenset({"epoch"})
"""Only on requests about a slot: a request about an epoch that has ended is dropped."""


@dataclass(frozen=True)
class Request:
    """One checked packet of the server's. ``slot`` is -1 for ``serving`` and ``ping``."""

    op: Op
    slot: int = -1
    epoch: int | None = None
    lease: dict[str, Any] | None = None


def parse(packet: bytes, slots: int) -> Request:
    """Raises ProtocolError for anything but a well-formed request about an existing slot."""
    try:
        raw = json.loads(packet)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the server sent no JSON: {error}") from error
    op = _OPS.get(str(raw.get("op"))) if isinstance(raw, dict) else None
    wanted = _FIELDS[op] if op is not None else frozenset()
    if op is None or not wanted <= set(raw) <= wanted | (_OPTIONAL if "slot" in wanted else frozenset()):
        raise ProtocolError(f"the server sent an unknown request: {str(raw)[:200]}")
    if "slot" not in wanted:
        return Request(op)
    slot, epoch, lease = raw["slot"], raw.get("epoch"), raw.get("lease")
    if type(slot) is not int or not 0 <= slot < slots:
        raise ProtocolError(f"the server named slot {slot!r} of {slots}")
    if epoch is not None and (type(epoch) is not int or epoch < 0):
        raise ProtocolError(f"the server named epoch {epoch!r}")
    if lease is not None and (not isinstance(lease, dict) or len(json.dumps(lease)) > MAX_LEASE_BYTES):
        raise ProtocolError(f"a lease must be an object of at most {MAX_LEASE_BYTES} bytes")
    return Request(op, slot, epoch, lease)


def _packet(op: str, **fields: object) -> bytes:
    return json.dumps({"op": op, **fields}).encode()


def hello(
    spec: SandboxSpec,
    token: str,
    isolation: str,
    weaker: list[str],
    proofs: list[dict[str, object]],
    shell: str = "",
) -> bytes:
    """The first packet of every server. Raises ConfigError when the spec does not fit in one."""
    made = _packet(
        "hello",
        spec=dataclasses.asdict(spec),
        token=token,
        isolation=isolation,
        weaker=weaker,
        proofs=proofs,
        shell=shell,
    )
    if len(made) > MAX_PACKET_BYTES:
        raise ConfigError(
            "env", f"the specification takes {len(made)} bytes; at most {MAX_PACKET_BYTES} can be handed on"
        )
    return made


def pong(stalls: Stalls) -> bytes:
    """The answer to ``ping``: how the supervisor's own loop did."""
    told = dataclasses.replace(stalls, stack=stalls.stack[-_MAX_STACK:])  # the end is where it stood
    return _packet("pong", stalls=dataclasses.asdict(told))


def slot_ready(slot: int, epoch: int, lease: dict[str, Any] | None, *, kept: bool, plan: CgroupPlan | None) -> bytes:
    """Goes with the agent's socket. ``kept``: the workspace is the one of before."""
    limits = dataclasses.asdict(limit_files(plan))
    return _packet("slot_ready", slot=slot, epoch=epoch, lease=lease, kept=kept, limits=limits)


def limit_files(plan: CgroupPlan | None) -> LimitFiles:
    """Where the counters of a slot with this plan are."""
    if plan is None:
        return LimitFiles()
    memory, pids = plan.memory_limit, plan.pids_limit
    return LimitFiles(plan.version, str(memory.parent) if memory else None, str(pids.parent) if pids else None)


def slot_failed(slot: int, epoch: int, reason: str) -> bytes:
    """The slot is quarantined."""
    return _packet("slot_failed", slot=slot, epoch=epoch, reason=reason[:4096])


def slot_lost(slot: int, loss: Loss, reason: str) -> bytes:
    """The slot ended by itself; a reset is under way."""
    return _packet("slot_lost", slot=slot, loss=loss, reason=reason[:4096])
