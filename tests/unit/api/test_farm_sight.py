"""What viewers see of a farm: the whole, then what changes, and of others' runs nothing but that they hold slots."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from agentenv.api.farm_server import sight as sights
from agentenv.api.farm_server.farm import Farm
from agentenv.api.farm_server.sight import Sights
from agentenv.api.farm_server.tokens import Right
from agentenv.errors import TooManyRequestsError
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.sharing import Share
from agentenv.wire import farm as farm_wire
from agentenv.wire import sight as wire
from agentenv.wire.states import ContainerState, SlotState
from tests.farm_crowd import crowd

ALL = Right("*", "read", None, "all")
MINE = Right("mine", "read", None, "mine")


def farm_of(*runs: str, containers: int = 3, slots: int = 6) -> Farm:
    farm = Farm(FakeBackend())
    farm.leads = True
    crowd(farm, containers, slots, runs)
    return farm


async def ask(farm: Farm, run: str, *slots: int, kind: Any = "train") -> None:
    asks = tuple(
        farm_wire.Ask(
            request_id=f"{kind}-{number}-of-the-tests",
            trajectories=tuple(f"t{number}-{index}" for index in range(count)),
            tags=farm_wire.AskTags(kind=kind),
        )
        for number, count in enumerate(slots)
    )
    farm.manager._scaler.slots_per_container = 6
    await farm.queue.ask(farm_wire.AsksRequest(asks=asks), run)


async def seen(farm: Farm, right: Right = ALL) -> wire.Sight:
    found = wire.sight_line.validate_json(await Sights(farm).whole(right))
    assert isinstance(found, wire.Sight)
    return found


async def line(lines: AsyncGenerator[bytes, None]) -> wire.SightChanges:
    found = wire.sight_line.validate_json(await anext(lines))
    assert isinstance(found, wire.SightChanges)
    return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many looks a second, and rare beats: a line says what a test is about."""
    monkeypatch.setattr(wire, "SIGHT_EVERY_S", 0.01)
    monkeypatch.setattr(wire, "SIGHT_BEAT_S", 3600.0)


async def test_the_whole_has_every_slot_with_its_holder() -> None:
    whole = await seen(farm_of("a", "b"))
    assert [container.index for container in whole.containers] == [100, 101, 102]
    slots = [slot for container in whole.containers for slot in container.slots]
    assert len(slots) == 18
    leased = [slot for slot in slots if slot.state is SlotState.leased]
    assert {slot.run for slot in leased} == {"a", "b"}
    assert leased[0].trajectory == "a-g100-0"
    assert leased[0].epoch == 3
    assert [run.run for run in whole.runs] == ["a", "b"]
    assert whole.farm.load.slots == {"leased": 12, "resetting": 3, "quarantined": 3}


async def test_the_age_of_an_adopted_lease_is_what_its_container_said() -> None:
    whole = await seen(farm_of("a"))
    ages = [whole.clock_s - slot.since_s for slot in whole.containers[0].slots if slot.run]
    assert [round(age / 60) for age in ages] == [0, 1, 2, 3]


async def test_of_other_runs_only_that_they_hold_and_wait() -> None:
    farm = farm_of("mine", "secret/run")
    await ask(farm, "secret/run", 1, 1)
    body = await Sights(farm).whole(MINE)
    assert b"secret" not in body
    whole = await seen(farm, MINE)
    leased = [slot for container in whole.containers for slot in container.slots if slot.state is SlotState.leased]
    assert len(leased) == 12
    assert {slot.run for slot in leased} == {"mine", ""}
    assert {slot.trajectory for slot in leased if not slot.run} == {""}
    assert {slot.epoch for slot in leased if not slot.run} == {None}
    assert [run.run for run in whole.runs] == ["mine"]
    assert whole.queue == ()
    assert whole.others == wire.OthersSight(runs=1, held=6, waiting=2)


async def test_the_queue_says_who_waits_for_how_many_and_why() -> None:
    farm = farm_of("a", "b")
    farm.queue_policy.set_shares(Share(), {"b": Share(cap=3), "c": Share(paused=True)})
    await ask(farm, "a", 1, 2)
    await ask(farm, "a", 1, kind="eval")
    await ask(farm, "b", 1)
    await ask(farm, "c", 1)
    told = [(one.run, one.kind, one.asks, one.slots, one.why) for one in (await seen(farm)).queue]
    assert told == [
        ("a", "eval", 1, 1, "queue"),
        ("a", "train", 2, 3, "queue"),
        ("b", "train", 1, 1, "cap"),
        ("c", "train", 1, 1, "paused"),
    ]


async def test_a_viewer_gets_the_whole_and_then_only_what_changes() -> None:
    farm = farm_of("a", "b")
    async with aclosing(Sights(farm).changes(ALL)) as lines:
        first = json.loads(await anext(lines))
        assert first["type"] == "sight"
        assert first["containers"] == []
        assert sum(len(container.slots) for container in (await line(lines)).containers) == 18
        lease = farm.manager.ledger.lease_on("crowd-101", 2)
        assert lease is not None
        farm.manager.ledger.stale(lease.id, farm.clock())
        changed = await line(lines)
        assert [(one.id, [slot.slot for slot in one.slots]) for one in changed.containers] == [("crowd-101", [2])]
        assert changed.containers[0].slots[0].state is SlotState.resetting
        assert changed.containers[0].slots[0].run == ""
        farm.manager.ledger.suspect("crowd-100")
        changed = await line(lines)
        assert [(one.id, one.state, one.slots) for one in changed.containers] == [
            ("crowd-100", ContainerState.suspect, ())
        ]
        farm.manager.ledger.lose("crowd-102", "of the test", farm.clock())
        assert (await line(lines)).gone == ("crowd-102",)


async def test_a_slow_viewer_gets_one_line_for_all_it_missed() -> None:
    farm = farm_of("a", containers=2)
    views = Sights(farm)
    async with aclosing(views.changes(ALL)) as slow, aclosing(views.changes(ALL)) as fast:
        for lines in (slow, slow, fast, fast):
            await anext(lines)
        for slot in range(4):
            lease = farm.manager.ledger.lease_on("crowd-100", slot)
            assert lease is not None
            farm.manager.ledger.stale(lease.id, farm.clock())
            assert [one.slot for one in (await line(fast)).containers[0].slots] == [slot]
        assert [one.slot for one in (await line(slow)).containers[0].slots] == [0, 1, 2, 3]


async def test_a_container_that_gets_its_slots_later_is_told_with_them() -> None:
    farm = farm_of("a", containers=1)
    async with aclosing(Sights(farm).changes(ALL)) as lines:
        await anext(lines)
        await line(lines)
        farm.manager.ledger.started("late", 200)
        assert [(one.id, one.slots) for one in (await line(lines)).containers] == [("late", ())]
        farm.manager.ledger.inventory("late", [SlotState.free] * 2, farm.clock())
        assert [len(one.slots) for one in (await line(lines)).containers] == [2]


async def test_a_line_without_changes_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SIGHT_BEAT_S", 0.02)
    farm = farm_of("a", containers=100, slots=10)
    async with aclosing(Sights(farm).changes(ALL)) as lines:
        whole = sum([len(await anext(lines)) for _ in range(3)])
        beat = await anext(lines)
        told = json.loads(beat)
        assert told["containers"] == []
        assert told["farm"]["load"]["slots"]["leased"] == 800
        assert len(beat) < 4096 < whole


async def test_numbers_are_told_by_beats_and_no_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    farm = farm_of("a")
    async with aclosing(Sights(farm).changes(ALL)) as lines:
        await anext(lines)
        await line(lines)
        farm.manager.ledger.suspect("crowd-100")
        assert (await line(lines)).farm is None
        monkeypatch.setattr(wire, "SIGHT_BEAT_S", 0.0)
        told = await line(lines)
        assert told.farm is not None
        assert told.runs is not None


async def test_viewers_are_counted_and_it_ends_with_the_farm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sights, "MAX_VIEWERS", 1)
    farm = farm_of("a")
    views = Sights(farm)
    lines = views.changes(ALL)
    await anext(lines)
    with pytest.raises(TooManyRequestsError):
        await anext(views.changes(ALL))
    farm.leads = False
    assert [json.loads(one)["type"] async for one in lines] == ["changes"]
    async with asyncio.timeout(60), aclosing(views.changes(ALL)) as after:
        assert json.loads(await anext(after))["type"] == "sight"
