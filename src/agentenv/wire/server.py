"""What a sandbox server reports about itself: health, handshake, errors."""

from __future__ import annotations

from typing import Literal, Self

from agentenv.errors import AgentEnvError, Fault, TooManyRequestsError
from agentenv.wire.base import PROTOCOL_VERSION, WireModel
from agentenv.wire.leases import LostLease, PausedSlot, SlotReport


class Health(WireModel):
    """``GET /health``, the only path without a token."""

    status: Literal["ok", "draining"]
    version: str
    protocol: int = PROTOCOL_VERSION
    supervisor_silent_s: float = 0.0
    """Seconds for which the container's supervisor has not responded; a few seconds mean a busy machine."""
    leader_url: str = ""
    """Of a standby farm service: the address of the leader, if it is known."""


class Proof(WireModel):
    """One promise of the container, tested by itself at start."""

    name: str
    holds: bool
    required: bool
    detail: str = ""
    cure: str = ""


class ServerInfo(WireModel):
    """``GET /v1/info``: the handshake. ``boot`` is new each time the server process starts."""

    container: str
    boot: str
    version: str
    protocol: int = PROTOCOL_VERSION
    slots: int
    isolation: str
    """``full`` (own uid and cgroup per slot) or ``user`` (one uid, user namespaces)."""
    weaker: tuple[str, ...] = ()
    """Where isolation is weaker than promised, one sentence each; empty if nowhere."""
    proofs: tuple[Proof, ...] = ()
    allow_network: bool = False
    image_format: str = ""
    """How images are mounted for slots (``erofs``, ``tree``, ``shifted``); empty: there are plain slots only."""
    image_weaker: tuple[str, ...] = ()
    """Restrictions of image slots, one sentence each; or why there are none."""
    workspaces_copied: str = ""
    """Why a checkpoint of a plain slot is a copy of its workspace, which takes time with its size; empty: it is a layer
    under the workspaces that begin with it."""


class SlotsReply(WireModel):
    """``GET /v1/slots``."""

    boot: str
    slots: tuple[SlotReport, ...]
    lost: tuple[LostLease, ...] = ()
    """The oldest first, at most since this server process started."""
    heard_s: float | None = None
    """Seconds since the last heartbeat of a pool (pools send heartbeats even without leases) or beat of a watch, or
    since this server process started. A farm without heartbeats is orphaned."""


class PausedReply(WireModel):
    """``GET /v1/paused``: the paused slots of this container. They end with it, after a day, or when they are dropped
    (``DELETE /v1/paused/{checkpoint}``)."""

    paused: tuple[PausedSlot, ...]


class ErrorReply(WireModel):
    """Body of every non-2xx response. ``error`` is a ``code`` of :mod:`agentenv.errors`."""

    error: str
    message: str
    next_step: str = ""
    fault: Fault = "infra"
    retry_after_s: float | None = None
    """When to retry, after too many requests."""

    @classmethod
    def of(cls, error: AgentEnvError) -> Self:
        """The reply for an exception."""
        again_s = error.retry_after_s if isinstance(error, TooManyRequestsError) else None
        return cls(
            error=error.code,
            message=error.message,
            next_step=error.next_step,
            fault=error.fault,
            retry_after_s=again_s,
        )
