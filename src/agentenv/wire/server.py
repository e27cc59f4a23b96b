"""What a sandbox server says of itself: health, handshake, errors."""

from __future__ import annotations

from typing import Literal

from agentenv.errors import Fault
from agentenv.wire.base import PROTOCOL_VERSION, WireModel
from agentenv.wire.leases import SlotReport


class Health(WireModel):
    """``GET /health``, the one path without a token."""

    status: Literal["ok", "draining"]
    version: str
    protocol: int = PROTOCOL_VERSION
    supervisor_silent_s: float = 0.0
    """For how long the container's supervisor has owed an answer; a few seconds are a busy machine."""


class Proof(WireModel):
    """One promise the container tested on itself at start."""

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
    """What is weaker here than promised, one sentence each; empty when nothing is."""
    proofs: tuple[Proof, ...] = ()
    allow_network: bool = False


class SlotsReply(WireModel):
    """``GET /v1/slots``."""

    boot: str
    slots: tuple[SlotReport, ...]
    heard_s: float | None = None
    """Since the last heartbeat of whoever leases slots here (a pool beats even when it has no lease), or since
    this server process started: a farm nobody beats belongs to nobody any more."""


class ErrorReply(WireModel):
    """Body of every non-2xx answer. ``error`` is a ``code`` of :mod:`agentenv.errors`."""

    error: str
    message: str
    next_step: str = ""
    fault: Fault = "infra"
