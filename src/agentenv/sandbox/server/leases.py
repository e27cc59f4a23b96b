"""A lease in its slot, and as the supervisor stores it for a restarted server. Pure."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from typing import Any

from agentenv.errors import AgentEnvError, ConfigError, ProtocolError
from agentenv.wire.leases import (
    BY_NAME,
    LOST_KEPT,
    LOST_KEPT_S,
    LeaseGrant,
    LeaseKey,
    LeaseRequest,
    LostLease,
    Tags,
)
from agentenv.wire.roots import RootSpec


@dataclass
class Lease:
    """One trajectory's right to a slot, until ``expires_at_s`` (the loop's clock)."""

    key: LeaseKey
    trajectory: str
    ttl_s: float
    request_id: str
    expires_at_s: float
    era: int = 0
    """How many times a restarted server has taken over this lease."""
    sealed: bool = False
    """Whether its slot has been sealed, and has the files that it had then: a verifier runs over a policy's."""
    tags: Tags = field(default_factory=Tags)
    root: RootSpec | None = None
    """Root of its slot; None: a plain slot."""
    pauses_when_idle: bool = False
    """Whether it is paused, not ended, when it is not renewed in time."""
    not_renewed: str = ""
    """Why it ends at its next renewal; empty: it is renewed."""
    sealed_by: str = ""
    """The request that sealed its slot last; not kept over a restart of the server."""
    checkpoints: dict[str, str] = field(default_factory=dict)
    """Checkpoints made of its slot, by request; not kept over a restart of the server."""

    @classmethod
    def grant(cls, request: LeaseRequest, epoch: int, now_s: float) -> Lease:
        """A new lease with a fresh secret."""
        key = LeaseKey(slot=request.slot, epoch=epoch, secret=secrets.token_urlsafe(24))
        expires_at_s = now_s + request.ttl_s
        return cls(
            key,
            request.trajectory,
            request.ttl_s,
            request.request_id,
            expires_at_s,
            tags=request.tags,
            root=request.root,
        )

    def admits(self, key: LeaseKey) -> bool:
        """Whether ``key`` is this lease's, compared in constant time."""
        same = hmac.compare_digest(self.key.secret.encode(), key.secret.encode())
        return same and key.epoch == self.key.epoch and key.slot == self.key.slot

    def as_grant(self) -> LeaseGrant:
        """The grant sent to the client."""
        return LeaseGrant(key=self.key, trajectory=self.trajectory, ttl_s=self.ttl_s)

    def to_memory(self) -> dict[str, Any]:
        """As the supervisor stores it."""
        return {
            "epoch": self.key.epoch,
            "secret": self.key.secret,
            "trajectory": self.trajectory,
            "ttl_s": self.ttl_s,
            "request_id": self.request_id,
            "era": self.era,
            "sealed": self.sealed,
            "tags": self.tags.model_dump(mode="json"),
            "root": None if self.root is None else self.root.to_dict(),
            "not_renewed": self.not_renewed,
            "pauses_when_idle": self.pauses_when_idle,
        }

    @classmethod
    def from_memory(cls, slot: int, kept: dict[str, Any], now_s: float) -> Lease:
        """The lease as taken over by a restarted server, in its next era, for one more ttl. Raises ProtocolError
        for anything that :meth:`to_memory` did not write."""
        try:
            key = LeaseKey(slot=slot, epoch=kept["epoch"], secret=kept["secret"])
            ttl_s, era = float(kept["ttl_s"]), int(kept["era"])
            trajectory, request_id = str(kept["trajectory"]), str(kept["request_id"])
            sealed = kept.get("sealed") is True
            tags = Tags.model_validate(kept.get("tags", {}))
            root = None if kept.get("root") is None else RootSpec.parse(kept["root"])
            pauses = kept.get("pauses_when_idle") is True
            not_renewed = str(kept.get("not_renewed", ""))
            return cls(
                key, trajectory, ttl_s, request_id, now_s + ttl_s, era + 1, sealed, tags, root, pauses, not_renewed
            )
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            raise ProtocolError(f"the stored lease of slot {slot} is malformed: {error!r}") from error


class LostLeases:
    """The lost leases of one container that a farm reports to clients that lease by name
    (:class:`agentenv.wire.leases.LostLease`)."""

    def __init__(self) -> None:
        self._lost: dict[tuple[int, int], tuple[float, Lease, AgentEnvError]] = {}
        """By slot and epoch, the oldest first."""

    def add(self, lease: Lease, error: AgentEnvError, now_s: float) -> None:
        """A lease was lost. The latest of each run are kept."""
        if lease.tags.environment != BY_NAME:
            return
        self._forget_old(now_s)
        of_run = [key for key, (_, one, _) in self._lost.items() if one.tags.run == lease.tags.run]
        if len(of_run) >= LOST_KEPT:
            del self._lost[of_run[0]]
        self._lost[lease.key.slot, lease.key.epoch] = now_s, lease, error

    def released(self, slot: int, epoch: int) -> None:
        """The lease of this epoch was released: its holder has the reason."""
        self._lost.pop((slot, epoch), None)

    def report(self, now_s: float) -> tuple[LostLease, ...]:
        """All of them."""
        self._forget_old(now_s)
        return tuple(
            LostLease(
                slot=slot,
                epoch=epoch,
                run=lease.tags.run,
                trajectory=lease.trajectory,
                error=error.code,
                message=error.message,
                lost_s=max(0.0, now_s - at_s),
            )
            for (slot, epoch), (at_s, lease, error) in self._lost.items()
        )

    def _forget_old(self, now_s: float) -> None:
        while self._lost and now_s - next(iter(self._lost.values()))[0] > LOST_KEPT_S:
            del self._lost[next(iter(self._lost))]
