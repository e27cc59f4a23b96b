"""The paused slots of one container: the files of leases that were paused, each under its trajectory. Pure.

They are kept here, beside the checkpoints that they are, and nowhere else: a farm that starts finds them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from agentenv.errors import CheckpointError
from agentenv.sandbox.server.leases import Lease
from agentenv.wire.leases import LeaseKey, LeaseRequest, PausedSlot
from agentenv.wire.roots import RootSpec

PAUSED_KEPT_S: Final = 86_400.0
"""How long they are kept: they take memory that others' checkpoints may need."""


@dataclass(frozen=True)
class _Paused:
    lease: Lease
    checkpoint: str
    request_id: str
    """Of the request to pause; empty: the lease was not renewed in time."""
    at_s: float
    resumed_by: str = ""
    """The request whose lease goes on with it, or is being made to."""
    is_resumed: bool = False
    """That lease is made: what is kept here says so until it ends."""

    @property
    def name(self) -> tuple[str, str]:
        return self.lease.tags.run, self.lease.trajectory


class PausedSlots:
    """By checkpoint. See the module."""

    def __init__(self) -> None:
        self._paused: dict[str, _Paused] = {}

    def add(self, lease: Lease, checkpoint: str, request_id: str, now_s: float) -> None:
        """A lease has ended as this checkpoint."""
        self._paused[checkpoint] = _Paused(lease, checkpoint, request_id, now_s)

    def made_by(self, request_id: str, key: LeaseKey) -> str:
        """The checkpoint as which this request has paused the lease with this key; empty if it has not."""
        ours = (one for one in self._paused.values() if request_id and one.request_id == request_id)
        return next((one.checkpoint for one in ours if one.lease.admits(key)), "")

    def dropped(self, checkpoint: str) -> bool:
        """It is no longer kept. False when it was not."""
        return self._paused.pop(checkpoint, None) is not None

    def begin_resume(self, request: LeaseRequest) -> str:
        """A lease is about to be made. Where it goes on with a paused one (of its run and trajectory, with its
        checkpoint), returns the checkpoint; otherwise an empty string. Raises CheckpointError when another request
        does that already."""
        checkpoint = "" if request.root is None else request.root.checkpoint
        paused = self._paused.get(checkpoint)
        if paused is None or paused.name != (request.tags.run, request.trajectory):
            return ""
        if paused.resumed_by not in ("", request.request_id):
            raise CheckpointError(f"{request.trajectory!r} is being resumed by somebody else")
        self._paused[checkpoint] = replace(paused, resumed_by=request.request_id)
        return checkpoint

    def end_resume(self, checkpoint: str, *, resumed: bool) -> None:
        """The lease was made, or not: then it is as it was. No effect if there is none."""
        if (paused := self._paused.get(checkpoint)) is not None:
            by = paused.resumed_by if resumed else ""
            self._paused[checkpoint] = replace(paused, resumed_by=by, is_resumed=resumed)

    def lease_ended(self, request_id: str) -> None:
        """The lease made by this request has ended."""
        for name in [name for name, one in self._paused.items() if one.is_resumed and one.resumed_by == request_id]:
            del self._paused[name]

    def stale(self, now_s: float) -> list[str]:
        """Remove and return the checkpoints of those that were kept for too long."""
        kept = [(name, one) for name, one in self._paused.items() if not one.resumed_by]
        old = [name for name, one in kept if now_s - one.at_s > PAUSED_KEPT_S]
        for name in old:
            del self._paused[name]
        return old

    def report(self, now_s: float) -> tuple[PausedSlot, ...]:
        """All of them, the oldest first."""
        return tuple(
            PausedSlot(
                trajectory=one.lease.trajectory,
                tags=one.lease.tags.without_tokens(),
                checkpoint=name,
                root=replace(one.lease.root or RootSpec("", name), checkpoint=name),
                paused_s=max(0.0, now_s - one.at_s),
                resumed=bool(one.resumed_by),
            )
            for name, one in self._paused.items()
        )
