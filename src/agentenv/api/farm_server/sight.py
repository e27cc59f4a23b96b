"""What viewers see of a farm: the whole at first, then what changes. Nothing is done without viewers.

A viewer remembers the number of the look it has seen last; for each slot is kept at which look it changed last.
So a slow viewer gets one larger line instead of many, and costs no more than a fast one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from agentenv.api.farm_server.farm import Farm
from agentenv.api.farm_server.open_ask import OpenAsk
from agentenv.api.farm_server.tokens import Right
from agentenv.errors import TooManyRequestsError
from agentenv.slots.records import ContainerRecord, SlotRecord
from agentenv.wire import sight as wire
from agentenv.wire.base import WireModel
from agentenv.wire.farm import RunStatus
from agentenv.wire.leases import RunKind
from agentenv.wire.states import ContainerState, SlotState

MAX_VIEWERS: Final = 100
"""At once; a line of changes is made for each."""

_AT_ONCE: Final = 50
"""Containers of which lines are made before others get their turn."""
_Cell = tuple[SlotState, int | None, int | None]
"""What is compared of a slot: its state, and number and epoch of its lease."""


@dataclass
class _Seen:
    """A container as it was at the last look. ``at``, ``cells_at``: the looks at which it and its slots changed."""

    state: ContainerState
    at: int
    cells: list[_Cell] = field(default_factory=list)
    cells_at: list[int] = field(default_factory=list)


class Sights:
    """See the module. One event loop."""

    def __init__(self, farm: Farm) -> None:
        self._farm = farm
        self._look = 0
        self._looked_at_s = -1.0
        self._seen: dict[str, _Seen] = {}
        self._viewers = 0
        self._queue: tuple[wire.QueueSight, ...] = ()
        self._queue_at_s = -1.0

    async def whole(self, right: Right) -> bytes:
        """A Sight of the farm at this moment, as far as the token covers it."""
        containers = [container async for some in self._all_containers(right) for container in some]
        return _encoded(self._sight(right).model_copy(update={"containers": tuple(containers)}))

    def _sight(self, right: Right) -> wire.Sight:
        """Without its containers."""
        farm = self._farm
        runs = farm.runs()
        return wire.Sight(
            type="sight",
            clock_s=farm.clock(),
            farm=farm.info(),
            containers=(),
            runs=tuple(run for run in runs if right.covers(run.run)),
            others=_others(runs, right),
            queue=self._waiting(right),
            rates=tuple(farm.activity.samples),
        )

    async def changes(self, right: Right) -> AsyncGenerator[bytes, None]:
        """The lines of one viewer. Raises TooManyRequestsError before the first, if there are too many."""
        if self._viewers >= MAX_VIEWERS:
            raise TooManyRequestsError(f"{MAX_VIEWERS} viewers look at the farm already", retry_after_s=10.0)
        self._viewers += 1
        try:
            self._look_again()
            seen, known = self._look, set(self._seen)
            first = self._sight(right)
            beat_at_s = told_s = first.clock_s
            yield _encoded(first)
            async for some in self._all_containers(right):
                yield _encoded(wire.SightChanges(type="changes", clock_s=self._farm.clock(), containers=some))
            while self._farm.leads:
                await asyncio.sleep(wire.SIGHT_EVERY_S)
                self._look_again()
                line = self._since(seen, known, right)
                seen, known = self._look, set(self._seen)
                if (beats := line.clock_s - beat_at_s >= wire.SIGHT_BEAT_S) or line.containers or line.gone:
                    if beats:
                        line, beat_at_s = self._with_numbers(line, right, told_s), line.clock_s
                        told_s = line.rates[-1].at_s if line.rates else told_s
                    yield _encoded(line)
        finally:
            self._viewers -= 1

    async def _all_containers(self, right: Right) -> AsyncGenerator[tuple[wire.ContainerSight, ...], None]:
        """Some at a time: ten thousand slots take a tenth of a second, in which none would be granted."""
        containers = tuple(self._farm.manager.ledger.containers())
        for at in range(0, len(containers), _AT_ONCE):
            yield tuple(self._container(container, right, 0) for container in containers[at : at + _AT_ONCE])
            await asyncio.sleep(0)

    # -- looking ---------------------------------------------------------------------------------

    def _look_again(self) -> None:
        """Compare every slot with what it was; several viewers share a look."""
        now = self._farm.clock()
        if now - self._looked_at_s < wire.SIGHT_EVERY_S / 2:
            return
        self._looked_at_s = now
        self._look += 1
        ledger, before, self._seen = self._farm.manager.ledger, self._seen, {}
        lease_of = ledger.lease
        for container in ledger.containers():
            cells: list[_Cell] = []
            for slot in container.slots:
                lease = None if slot.lease is None else lease_of(slot.lease)
                cells.append((slot.state, slot.lease, None if lease is None else lease.epoch))
            self._seen[container.id] = self._compared(before.get(container.id), container.state, cells)

    def _compared(self, seen: _Seen | None, state: ContainerState, cells: list[_Cell]) -> _Seen:
        if seen is None or len(seen.cells) != len(cells):
            return _Seen(state, self._look, cells, [self._look] * len(cells))
        if seen.cells != cells:
            pairs = zip(cells, seen.cells, seen.cells_at, strict=True)
            seen.cells_at = [at if cell == former else self._look for cell, former, at in pairs]
            seen.cells, seen.at = cells, self._look
        if seen.state is not state:
            seen.state, seen.at = state, self._look
        return seen

    # -- lines -----------------------------------------------------------------------------------

    def _since(self, look: int, known: set[str], right: Right) -> wire.SightChanges:
        changed = (one for one in self._farm.manager.ledger.containers() if self._changed(one.id, look))
        return wire.SightChanges(
            type="changes",
            clock_s=self._farm.clock(),
            containers=tuple(self._container(container, right, look) for container in changed),
            gone=tuple(sorted(known - self._seen.keys())),
        )

    def _changed(self, container: str, look: int) -> bool:
        seen = self._seen.get(container)
        return seen is not None and seen.at > look

    def _with_numbers(self, line: wire.SightChanges, right: Right, told_s: float) -> wire.SightChanges:
        runs = self._farm.runs()
        numbers = {
            "farm": self._farm.info(),
            "runs": tuple(run for run in runs if right.covers(run.run)),
            "others": _others(runs, right),
            "queue": self._waiting(right),
            "rates": tuple(one for one in self._farm.activity.samples if one.at_s > told_s),
        }
        return line.model_copy(update=numbers)

    def _container(self, container: ContainerRecord, right: Right, look: int) -> wire.ContainerSight:
        """With the slots that changed after that look; 0: all."""
        link = self._farm.manager.links.get(container.id)
        seen = self._seen.get(container.id)
        at = seen.cells_at if seen is not None and look else ()
        slots = (slot for slot in container.slots if not look or (slot.index < len(at) and at[slot.index] > look))
        return wire.ContainerSight.model_construct(
            id=container.id,
            index=container.index,
            node=(urlsplit(link.handle.base_url).hostname or "") if link is not None else "",
            state=container.state,
            slots=tuple(self._slot(slot, right) for slot in slots),
        )

    def _slot(self, slot: SlotRecord, right: Right) -> wire.SlotSight:
        # Ten thousand of them are made for each viewer: nothing here needs to be validated again.
        fields: dict[str, Any] = {"slot": slot.index, "state": slot.state, "since_s": round(slot.since, 1)}
        lease = None if slot.lease is None else self._farm.manager.ledger.lease(slot.lease)
        if lease is not None and right.covers(lease.tags.run):
            tags = lease.tags
            fields |= {"epoch": lease.epoch, "run": tags.run, "kind": tags.kind, "environment": tags.environment}
            fields["trajectory"] = lease.trajectory
        return wire.SlotSight.model_construct(**fields)

    def _waiting(self, right: Right) -> tuple[wire.QueueSight, ...]:
        """The queue, as far as the token covers it: made once for all who look within two seconds."""
        now = self._farm.clock()
        if self._queue_at_s < 0 or now - self._queue_at_s >= wire.SIGHT_BEAT_S / 2:
            self._queue, self._queue_at_s = tuple(self._queue_now(now)), now
        return tuple(one for one in self._queue if right.covers(one.run))

    def _queue_now(self, now: float) -> Iterator[wire.QueueSight]:
        waiting: dict[tuple[str, RunKind], list[OpenAsk]] = {}
        for opened in self._farm.queue.waiting():
            waiting.setdefault((opened.run, opened.ask.tags.kind), []).append(opened)
        forecast = self._farm.queue.forecast() if waiting else None
        for (run, kind), asks in sorted(waiting.items()):
            assert forecast is not None
            oldest = min(asks, key=lambda one: one.since)
            place = self._farm.queue.place(oldest, forecast)
            yield wire.QueueSight(
                run=run,
                kind=kind,
                asks=len(asks),
                slots=sum(len(one.ask.trajectories) for one in asks),
                oldest_wait_s=now - oldest.since,
                why=place.why,
                detail=place.detail,
                eta_s=place.eta_s,
            )


def _others(runs: tuple[RunStatus, ...], right: Right) -> wire.OthersSight:
    others = [run for run in runs if not right.covers(run.run)]
    held = sum(sum(run.held.values()) for run in others)
    return wire.OthersSight(runs=len(others), held=held, waiting=sum(run.waiting for run in others))


def _encoded(line: WireModel) -> bytes:
    return line.model_dump_json(exclude_unset=True).encode() + b"\n"
