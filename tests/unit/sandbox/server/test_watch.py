"""What a watcher of a container is sent, and what becomes of one that does not read."""

from __future__ import annotations

import asyncio
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock
from uuid import uuid4

import pytest
from aiohttp import web

from agentenv.errors import ProtocolError
from agentenv.sandbox.control_protocol import SlotReady
from agentenv.sandbox.limit_watch import LimitFiles
from agentenv.sandbox.server import bodies, watch
from agentenv.sandbox.server.container import Container
from agentenv.sandbox.server.context import ServerContext
from agentenv.sandbox.server.metrics import Statistics
from agentenv.sandbox.server.slot_states import State
from agentenv.sandbox.server.watch import Watcher, Watchers, WatchRoute
from agentenv.sandbox.slot_loss import LossReason
from agentenv.wire.leases import LeaseRequest, Tags
from agentenv.wire.states import SlotState
from agentenv.wire.watch import WatchBeat, WatchChange, WatchList, watch_line
from tests.waiting import until


def _container(slots: int = 3) -> tuple[Container, Watchers]:
    """A container of free slots, whose supervisor is a mock."""
    watchers = Watchers()
    context = MagicMock(reply_memory=16, index={}, statistics=Statistics(), changed=watchers.changed)
    context.env, context.shell, context.spare_shells = {}, "bash", False
    context.poller.loop = asyncio.get_running_loop()
    context.poller.going.wait = AsyncMock()
    context.supervisor.silent_s.return_value = 0.0
    container = Container(slots, cast("ServerContext", context))
    for index in range(slots):
        container.slot(index).state = State.free
    return container, watchers


class Response:
    """Takes what is written, at once or when ``reads`` is set."""

    def __init__(self) -> None:
        self.lines: list[WatchList | WatchChange | WatchBeat] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def write(self, data: bytes) -> None:
        await self.reads.wait()
        assert data.endswith(b"\n")
        self.lines += [watch_line.validate_json(line) for line in data.splitlines()]

    def changes(self) -> list[tuple[int, str, int]]:
        slots = [line.slot for line in self.lines if isinstance(line, WatchChange)]
        return [(slot.slot, slot.state, slot.epoch) for slot in slots]


def _follow(
    container: Container, watchers: Watchers, response: Response, watcher: Watcher, beat_s: float = 600.0
) -> asyncio.Task[None]:
    """By itself it sends the first beat, and no other."""
    route = WatchRoute(container, watchers)
    return asyncio.create_task(route._follow(watcher, cast("web.StreamResponse", response), beat_s))


def _lease(container: Container, slot: int, run: str = "a") -> None:
    request = LeaseRequest(slot=slot, trajectory="t", ttl_s=60, request_id=uuid4().hex, tags=Tags(run=run))
    container.slot(slot).grant(request)


async def test_each_change_of_a_slot_is_a_line_in_order() -> None:
    container, watchers = _container()
    response = Response()
    with watchers.watching() as watcher:
        following = _follow(container, watchers, response, watcher)
        await until(lambda: len(response.lines) == 2)
        first, second = response.lines
        assert isinstance(first, WatchList)
        assert (first.boot, first.generation) == (container.boot, 0)
        assert [slot.state for slot in first.slots] == [SlotState.free] * 3
        assert isinstance(second, WatchBeat)
        _lease(container, 1, run="exp7")
        await until(lambda: len(response.changes()) == 1)
        change = response.lines[-1]
        assert isinstance(change, WatchChange)
        assert (change.slot.trajectory, change.slot.tags) == ("t", Tags(run="exp7"))
        container.slot(1).lost(LossReason.ended, "its agent ended")
        await until(lambda: len(response.changes()) == 2)
        _lease(container, 2)
        container.slot(0).failed(3, "its cleanup could not be verified")
        await until(lambda: len(response.changes()) == 4)
        assert response.changes() == [(1, "leased", 0), (1, "resetting", 0), (2, "leased", 0), (0, "quarantined", 3)]
        following.cancel()
    container.close()


async def test_changes_that_were_not_sent_yet_are_one_line_per_slot() -> None:
    """However often a slot changes, a watcher holds no more than its number."""
    container, watchers = _container()
    response = Response()
    with watchers.watching() as watcher:
        following = _follow(container, watchers, response, watcher)
        await until(lambda: len(response.lines) == 2)
        response.reads.clear()
        _lease(container, 0)
        await asyncio.sleep(0)
        for epoch in range(1, 4):
            _lease(container, 1)
            container.slot(1).lost(LossReason.ended, "its agent ended")
            container.slot(1).epoch, container.slot(1).state = epoch, State.free
        container.slot(0).lost(LossReason.ended, "its agent ended")
        response.reads.set()
        await until(lambda: (0, "resetting", 0) in response.changes())
        # The lease that came and went in slot 1 is seen by its epoch.
        assert [change for change in response.changes() if change[0] == 1] == [(1, "free", 3)]
        following.cancel()
    container.close()


async def test_every_beat_says_how_the_container_is_and_counts_as_heard() -> None:
    container, watchers = _container()
    container.draining = True
    container._heard_at_s -= 1_000
    response = Response()
    with watchers.watching() as watcher:
        following = _follow(container, watchers, response, watcher, 0.01)
        await until(lambda: len(response.lines) >= 5)
        following.cancel()
    beat = response.lines[-1]
    assert isinstance(beat, WatchBeat)
    assert (beat.draining, beat.statistics) == (True, container.statistics())
    assert cast("float", container.inventory().heard_s) < 500
    container.close()


@pytest.mark.parametrize(("asked", "beat_s"), [(None, 1.0), ("0.1", 0.1), ("2", 2.0), ("60", 60.0)])
def test_a_watcher_says_how_often_it_wants_to_hear(asked: str | None, beat_s: float) -> None:
    assert watch._beat_s(asked) == beat_s


@pytest.mark.parametrize("asked", ["", "x", "0", "-1", "0.01", "61", "nan", "inf"])
def test_an_interval_out_of_range_is_refused(asked: str) -> None:
    with pytest.raises(ProtocolError, match="beat_s"):
        watch._beat_s(asked)


async def test_what_is_no_change_sends_nothing() -> None:
    container, watchers = _container()
    _lease(container, 0)
    slot = container.slot(0)
    assert slot.lease is not None
    with watchers.watching() as watcher:
        assert slot.renew(slot.lease.key, 30.0)
        assert watcher.take() == []
        slot.lost(LossReason.ended, "its agent ended")
        assert watcher.take() == [0]
        assert watcher.take() == []
    slot.state = State.free
    assert watcher.take() == [], "it does not watch any more"
    container.close()


async def test_moves_within_a_lease_are_no_changes_and_a_new_epoch_of_a_free_slot_is_one() -> None:
    container, watchers = _container()
    _lease(container, 0)
    leased, free = container.slot(0), container.slot(1)
    assert leased.lease is not None
    with watchers.watching() as watcher:
        sealing = asyncio.create_task(leased.seal(leased.lease.key))
        await until(lambda: leased.state is State.sealing)
        leased.ready(SlotReady(0, 0, None, kept=True, limits=LimitFiles()), {"": MagicMock()})
        await sealing
        assert watcher.take() == []
        free.ready(SlotReady(1, 1, None, kept=False, limits=LimitFiles()), {"": MagicMock()})
        assert watcher.take() == [1]
    container.close()


async def test_a_watcher_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "UNREAD_S", 0.01)
    container, watchers = _container()
    request: Any = MagicMock(headers={})

    async def write(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(web.StreamResponse, "prepare", AsyncMock())
    monkeypatch.setattr(web.StreamResponse, "write", write)
    async with asyncio.timeout(30):
        await WatchRoute(container, watchers)._get(request)
    request.transport.abort.assert_called_once_with()
    assert not watchers._watchers
    container.close()


async def test_a_server_that_ends_says_so_and_ends_its_watches() -> None:
    container, watchers = _container()
    response = Response()
    with watchers.watching() as watcher:
        following = _follow(container, watchers, response, watcher)
        await until(lambda: len(response.lines) == 2)
        container.draining = True
        watchers.end()
        async with asyncio.timeout(30):
            await following
    last = response.lines[-1]
    assert isinstance(last, WatchBeat)
    assert last.draining
    container.close()
