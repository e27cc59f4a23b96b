"""The fleet: containers that start, fail, die and are stopped, made of nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from agentenv.background import finish
from agentenv.containers.handle import ContainerHandle
from agentenv.slots.backends import fleet
from agentenv.slots.backends.base import ContainerDraining, ContainerEvent, ContainerGone, ContainerStarted, StartFailed
from agentenv.slots.backends.fleet import Fleet, Running, StartFailedError
from tests.waiting import DEADLINE_S


class Thing:
    """A container that is nothing but its states."""

    def __init__(self, name: str, index: int) -> None:
        self.handle = ContainerHandle(name, index, "", "", 1)
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.may_stop = asyncio.Event()
        self.may_stop.set()
        self.stopped = False

    async def ended(self) -> str:
        return await asyncio.shield(self.death)

    async def stop(self) -> None:
        await self.may_stop.wait()
        self.stopped = True


class ContainerManager:
    """Starts things; counts how many starts are under way."""

    def __init__(self) -> None:
        self.things: list[Thing] = []
        self.failures: list[StartFailed | Exception] = []
        self.starting = 0
        self.most_starting = 0

    async def start(self, index: int) -> Running:
        self.starting += 1
        self.most_starting = max(self.most_starting, self.starting)
        try:
            for _ in range(3):
                await asyncio.sleep(0)
            if self.failures:
                failure = self.failures.pop(0)
                raise failure if isinstance(failure, Exception) else StartFailedError(failure)
            self.things.append(Thing(f"thing-{len(self.things)}", index))
            return self.things[-1]
        finally:
            self.starting -= 1


@pytest.fixture
async def manager() -> ContainerManager:
    return ContainerManager()


@pytest.fixture
async def ships(manager: ContainerManager, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(fleet, "RETRY_MIN_S", 0.01)
    ships = Fleet(manager.start, starts_at_once=2)
    yield ships
    for thing in manager.things:
        thing.may_stop.set()
    await ships.aclose()


async def _events(ships: Fleet, count: int) -> list[ContainerEvent]:
    stream = ships.events()
    return [await asyncio.wait_for(anext(stream), DEADLINE_S) for _ in range(count)]


async def test_no_more_than_so_many_starts_at_once(ships: Fleet, manager: ContainerManager) -> None:
    ships.scale(9)
    events = await _events(ships, 9)
    started = [event.handle.index for event in events if isinstance(event, ContainerStarted)]
    assert sorted(started) == list(range(9))
    assert manager.most_starting == 2


async def test_scaling_down_takes_the_highest_and_stops_it_before_it_is_gone(
    ships: Fleet, manager: ContainerManager
) -> None:
    ships.scale(2)
    await _events(ships, 2)
    top = next(thing for thing in manager.things if thing.handle.index == 1)
    ships.scale(1)
    draining, gone = await _events(ships, 2)
    assert draining == ContainerDraining(top.handle.id, "scaled down")
    assert gone == ContainerGone(top.handle.id, "scaled down")
    assert [thing.stopped for thing in manager.things] == [thing is top for thing in manager.things]


async def test_the_dead_are_replaced_at_their_index(ships: Fleet, manager: ContainerManager) -> None:
    ships.scale(1)
    await _events(ships, 1)
    manager.things[0].death.set_result("out of memory")
    gone, started = await _events(ships, 2)
    assert gone == ContainerGone("thing-0", "out of memory")
    assert isinstance(started, ContainerStarted)
    assert (started.handle.id, started.handle.index) == ("thing-1", 0)


async def test_replace_stops_the_old_one_first_and_only_once(ships: Fleet, manager: ContainerManager) -> None:
    ships.scale(1)
    await _events(ships, 1)
    ships.replace("thing-0", "broken")
    ships.replace("thing-0", "broken again")
    draining, gone, started = await _events(ships, 3)
    assert (draining, gone) == (ContainerDraining("thing-0", "broken"), ContainerGone("thing-0", "broken"))
    assert isinstance(started, ContainerStarted)
    assert manager.things[0].stopped
    ships.replace("thing-0", "long gone")
    assert not manager.things[1].stopped


@pytest.mark.parametrize("failure", [StartFailed("busy"), OSError("no space left on device")])
async def test_a_failed_start_is_told_and_tried_again(
    ships: Fleet, manager: ContainerManager, failure: StartFailed
) -> None:
    manager.failures.append(failure)
    ships.scale(1)
    failed, started = await _events(ships, 2)
    assert isinstance(failed, StartFailed)
    assert not failed.permanent
    assert isinstance(started, ContainerStarted)


async def test_after_a_permanent_failure_it_does_not_hammer(ships: Fleet, manager: ContainerManager) -> None:
    manager.failures += [StartFailed("no bwrap", permanent=True)] * 50
    ships.scale(1)
    await _events(ships, 1)
    await asyncio.sleep(0.1)
    assert len(manager.failures) == 49


async def test_a_container_being_stopped_is_stopped_to_the_end(ships: Fleet, manager: ContainerManager) -> None:
    ships.scale(1)
    await _events(ships, 1)
    manager.things[0].may_stop.clear()
    ships.scale(0)
    closing = asyncio.create_task(ships.aclose())
    for _ in range(5):
        await asyncio.sleep(0)
        closing.cancel()
    assert not closing.done()
    manager.things[0].may_stop.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert manager.things[0].stopped


async def test_closing_ends_the_events(ships: Fleet) -> None:
    ships.scale(1)
    await ships.aclose()
    await ships.aclose()
    assert all(not isinstance(event, StartFailed) for event in [event async for event in ships.events()])
    ships.scale(5)
    assert not ships._keepers


async def test_finish_waits_through_cancellation_and_then_tells() -> None:
    gate = asyncio.Event()

    async def work() -> int:
        await gate.wait()
        return 7

    task = asyncio.create_task(work())
    waiter = asyncio.create_task(finish(task))
    for _ in range(3):
        await asyncio.sleep(0)
        waiter.cancel()
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert task.result() == 7
    assert await finish(task) == 7


async def test_a_start_that_fails_in_no_known_way_is_a_permanent_failure(
    manager: ContainerManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet, "PERMANENT_RETRY_S", 0.01)
    manager.failures = [ValueError("nobody expects this")]
    made = Fleet(manager.start, starts_at_once=1)
    events = made.events()
    made.scale(1)
    async with asyncio.timeout(DEADLINE_S):
        failed = await anext(events)
        assert isinstance(failed, StartFailed)
        assert "ValueError: nobody expects this" in failed.reason
        assert failed.permanent
        assert "Traceback" in caplog.text
        assert isinstance(await anext(events), ContainerStarted)
    await made.aclose()


async def test_a_container_whose_end_cannot_be_told_is_replaced(manager: ContainerManager) -> None:
    made = Fleet(manager.start, starts_at_once=1)
    events = made.events()
    made.scale(1)
    async with asyncio.timeout(DEADLINE_S):
        assert isinstance(await anext(events), ContainerStarted)
        manager.things[0].death.set_exception(ValueError("40 is not a valid Signals"))
        gone = await anext(events)
        assert isinstance(gone, ContainerGone)
        assert "40 is not a valid Signals" in gone.reason
        assert isinstance(await anext(events), ContainerStarted)
    await made.aclose()


async def test_a_keeper_that_fails_says_so_and_another_takes_its_place(
    manager: ContainerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "RETRY_MAX_S", 0.01)
    made = Fleet(manager.start, starts_at_once=1)
    events = made.events()
    watched = made._watch
    broken = [True]

    async def watch(running: Running) -> None:
        if broken:
            broken.clear()
            raise ValueError("a mistake")
        await watched(running)

    monkeypatch.setattr(made, "_watch", watch)
    made.scale(1)
    async with asyncio.timeout(DEADLINE_S):
        failed = await anext(events)
        assert isinstance(failed, StartFailed)
        assert "a mistake" in failed.reason
        assert isinstance(await anext(events), ContainerStarted)
    await made.aclose()


async def test_leaving_stops_nothing_and_ends_the_events(manager: ContainerManager) -> None:
    made = Fleet(manager.start, starts_at_once=1)
    events = made.events()
    made.scale(2)
    async with asyncio.timeout(DEADLINE_S):
        assert [type(await anext(events)) for _ in range(2)] == [ContainerStarted] * 2
        await made.leave()
        await made.leave()
        assert [event async for event in events] == []
    assert not any(thing.stopped for thing in manager.things)
    made.scale(3)
    assert len(manager.things) == 2


async def test_a_stop_that_has_begun_is_completed_by_leaving(manager: ContainerManager) -> None:
    made = Fleet(manager.start, starts_at_once=1)
    events = made.events()
    made.scale(2)
    async with asyncio.timeout(DEADLINE_S):
        top = [event.handle.id for event in [await anext(events), await anext(events)]][1]  # type: ignore[union-attr]
        manager.things[1].may_stop.clear()
        made.scale(1)
        assert await anext(events) == ContainerDraining(top, "scaled down")
        leaving = asyncio.create_task(made.leave())
        await asyncio.sleep(0)
        assert not leaving.done()
        manager.things[1].may_stop.set()
        await leaving
        assert [event async for event in events] == [ContainerGone(top, "scaled down")]
    assert [thing.stopped for thing in manager.things] == [False, True]


async def test_what_was_replaced_is_stopped_although_the_fleet_is_left(manager: ContainerManager) -> None:
    made = Fleet(manager.start, starts_at_once=1)
    events = made.events()
    made.scale(1)
    async with asyncio.timeout(DEADLINE_S):
        assert isinstance(await anext(events), ContainerStarted)
        made.replace("thing-0", "broken")
        await made.leave()
    assert manager.things[0].stopped


async def test_adopted_indices_are_kept_until_the_first_goal(manager: ContainerManager) -> None:
    made = Fleet(manager.start, starts_at_once=1)
    events = made.events()
    made.adopt([0, 3])
    async with asyncio.timeout(DEADLINE_S):
        started = [await anext(events), await anext(events)]
        assert [event.handle.index for event in started] == [0, 3]  # type: ignore[union-attr]
        made.scale(2)
        later = [await anext(events) for _ in range(3)]
    assert ContainerGone("thing-1", "scaled down") in later
    assert [event.handle.index for event in later if isinstance(event, ContainerStarted)] == [1]
    await made.aclose()
