"""Names of trajectories whose slots were lost: a call must not get another, empty slot without an error."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from agentenv.errors import AgentEnvError, LeaseLostError, SlotDestroyedError, StaleLeaseError, from_wire
from agentenv.slots.container_link import ContainerLink
from agentenv.slots.records import LeaseRecord
from agentenv.slots.watched_link import WatchedLink
from agentenv.wire.leases import BY_NAME, LOST_KEPT, LOST_KEPT_S, EndRequest, LostLease

_RELEASE: Final = "release it to start over"


@dataclass(frozen=True)
class LostSlot:
    """What a trajectory had, why it has it no more, and since when."""

    container: str
    slot: int
    epoch: int
    error: AgentEnvError
    at_s: float

    @property
    def lease(self) -> str:
        """Its name (:data:`agentenv.wire.farm.LeaseId`)."""
        return f"{self.container}/{self.slot}/{self.epoch}"

    @property
    def ended(self) -> EndRequest:
        """Has its container forget it."""
        return EndRequest(slot=self.slot, epoch=self.epoch)


class LostNames:
    """Lost leases that farms held themselves: those that end while this process runs, and those that the containers
    tell of when it finds them. Of each run the latest are kept, for LOST_KEPT_S."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._runs: dict[str, OrderedDict[str, LostSlot]] = {}

    def ended(self, lease: LeaseRecord, error: AgentEnvError) -> None:
        """A lease has ended, and its holder may not know."""
        if lease.tags.environment == BY_NAME and lease.epoch is not None:
            lost = LostSlot(lease.container, lease.slot, lease.epoch, error, self._clock())
            self._add(lease.tags.run, lease.trajectory, lost)

    def learn(self, links: Iterable[ContainerLink]) -> None:
        """Take over what containers remember from before they were followed."""
        for link in links:
            if isinstance(link, WatchedLink) and link.lost_before:
                arrived, link.lost_before = link.lost_before, ()
                for lost in arrived:
                    at_s = self._clock() - lost.lost_s
                    slot = LostSlot(link.handle.id, lost.slot, lost.epoch, _error(lost), at_s)
                    self._add(lost.run, lost.trajectory, slot)

    def find(self, run: str, trajectory: str) -> LostSlot | None:
        """What the trajectory has lost."""
        lost = self._runs.get(run, OrderedDict()).get(trajectory)
        return lost if lost is not None and self._clock() - lost.at_s < LOST_KEPT_S else None

    def released(self, lease: LeaseRecord) -> None:
        """Its holder asked for the end of this very lease."""
        lost = self.find(lease.tags.run, lease.trajectory)
        if lost is not None and lost.lease == lease.name:
            self.forget(lease.tags.run, lease.trajectory)

    def forget(self, run: str, trajectory: str) -> LostSlot | None:
        """It was released; what it had lost."""
        names = self._runs.get(run, OrderedDict())
        lost = names.pop(trajectory, None)
        if not names:
            self._runs.pop(run, None)
        return lost

    def forget_old(self) -> None:
        """Drop those of long ago. To be called now and then."""
        for run, names in list(self._runs.items()):
            while names and self._clock() - next(iter(names.values())).at_s >= LOST_KEPT_S:
                names.popitem(last=False)
            if not names:
                del self._runs[run]

    def _add(self, run: str, trajectory: str, lost: LostSlot) -> None:
        names = self._runs.setdefault(run, OrderedDict())
        before = names.get(trajectory)
        if before is not None and before.at_s > lost.at_s:
            return
        names[trajectory] = lost
        names.move_to_end(trajectory)
        if len(names) > LOST_KEPT:
            names.popitem(last=False)


def _error(lost: LostLease) -> AgentEnvError:
    """As the process that followed the container when it was lost would have reported it."""
    error = from_wire(lost.error, lost.message, _RELEASE, LeaseLostError, SlotDestroyedError)
    return StaleLeaseError(lost.message, next_step=_RELEASE) if type(error) is LeaseLostError else error
