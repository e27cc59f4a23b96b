"""What the ledger counts for scaling, and what the scaler makes of it when the backend is not there."""

from __future__ import annotations

import pytest

from agentenv.config import PoolSettings
from agentenv.errors import ConnectionLostError
from agentenv.slots.commands import Grant
from agentenv.slots.counts import FREEING_S
from agentenv.slots.ledger import Ledger
from agentenv.slots.scaler import Scaler
from agentenv.wire.leases import SlotRequest
from agentenv.wire.states import ContainerState, SlotState
from benchmarks.farmsim.backend import NowhereBackend


def _ledger(containers: int, slots: int = 2) -> Ledger:
    ledger = Ledger()
    for index in range(containers):
        ledger.started(f"c{index}", index)
        ledger.inventory(f"c{index}", [SlotState.free] * slots, 0.0)
    return ledger


def _take(ledger: Ledger, now: float) -> Grant:
    (grant,) = [one for one in ledger.enqueue(SlotRequest(("t",)), now, now + 1_000)[1] if isinstance(one, Grant)]
    ledger.confirm(grant.lease, now)
    return grant


def test_a_slot_in_its_reset_is_about_to_be_free_and_then_stuck() -> None:
    ledger = _ledger(1)
    grant = _take(ledger, 0.0)
    assert (ledger.load(0.0).leased, ledger.load(0.0).demand) == (1, 1)
    ledger.release(grant.lease, 10.0)
    early, late = ledger.load(10.0 + FREEING_S * 0.9), ledger.load(10.0 + FREEING_S)
    assert (early.freeing, early.stuck, early.demand) == (1, 0, 0)
    assert (late.freeing, late.stuck, late.demand) == (0, 1, 1)
    ledger.freed(grant.container, grant.slot, 20.0)
    assert (ledger.load(20.0).free, ledger.load(20.0).demand) == (2, 0)


def test_where_resets_take_longer_a_slot_is_about_to_be_free_for_longer() -> None:
    ledger, now = _ledger(1), 0.0

    def reset_in(seconds: float) -> int:
        """How many slots are about to be free at 3 s, or at the end, of a reset that takes so long."""
        nonlocal now
        grant = _take(ledger, now)
        ledger.release(grant.lease, now)
        freeing = ledger.load(now + min(seconds, 3.0)).freeing
        now += seconds
        ledger.freed(grant.container, grant.slot, now)
        return freeing

    assert [reset_in(5.0) for _ in range(3)] == [0, 1, 1]
    assert [reset_in(0.1) for _ in range(20)] == [1] * 20
    assert reset_in(5.0) == 0


def test_what_will_not_be_leased_is_not_about_to_be_free() -> None:
    ledger = _ledger(1)
    ledger.release(_take(ledger, 0.0).lease, 1.0)
    ledger.drain("c0")
    load = ledger.load(1.0)
    assert (load.free, load.freeing, load.stuck, load.serving, load.draining) == (0, 0, 1, 0, 1)


def test_a_container_that_starts_beyond_the_goal_takes_no_leases() -> None:
    ledger = _ledger(1)
    ledger.drain_from(1)
    ledger.started("late", 1)
    ledger.inventory("late", [SlotState.free] * 2, 1.0)
    assert ledger.load(1.0).free == 2
    ledger.drain_from(3)
    ledger.started("next", 2)
    ledger.inventory("next", [SlotState.free] * 2, 1.0)
    assert ledger.container_counts() == {ContainerState.ready: 2, ContainerState.draining: 1}
    assert ledger.load(1.0).free == 4


class Backend(NowhereBackend):
    """Notes what it is told, while it can be reached."""

    def __init__(self, found: int = 0) -> None:
        self.found = found
        self.told: list[int] = []
        self.down = False

    async def scale(self, count: int) -> None:
        if self.down:
            raise ConnectionLostError("no answer")
        self.told.append(count)


async def test_containers_drained_while_the_backend_was_away_are_replaced_when_it_is_back() -> None:
    """Else they would count as coming for ever, and never come."""
    backend = Backend(found=4)
    settings = PoolSettings(min_containers=1, max_containers=4, idle_containers_after_s=10)
    scaler = Scaler(backend, settings, 0.0)
    scaler.slots_per_container = 2
    await scaler.start(0.0)
    ledger = _ledger(4)
    await scaler.follow(ledger, 1.0)
    backend.down = True
    with pytest.raises(ConnectionLostError):
        await scaler.follow(ledger, 20.0)
    assert ledger.container_counts() == {ContainerState.ready: 1, ContainerState.draining: 3}
    for number in range(4):
        ledger.enqueue(SlotRequest((f"t{number}",)), 21.0, 1_000.0)
    ledger.lose("c3", "by itself", 21.0)
    with pytest.raises(ConnectionLostError):
        await scaler.follow(ledger, 22.0)
    assert scaler.goal == 2, "two are still on their way out, and four is the cap"
    backend.down = False
    await scaler.follow(ledger, 23.0)
    await scaler.follow(ledger, 24.0)
    assert backend.told == [4, 1, 2]


async def test_nothing_is_told_twice() -> None:
    backend = Backend()
    scaler = Scaler(backend, PoolSettings(min_containers=2), 0.0)
    await scaler.start(0.0)
    for second in range(5):
        await scaler.follow(_ledger(2), float(second))
    assert backend.told == [2]


@pytest.mark.parametrize(("found", "told"), [(0, 2), (3, 3), (9, 4)])
async def test_what_is_found_is_kept_within_the_bounds(found: int, told: int) -> None:
    backend = Backend(found)
    scaler = Scaler(backend, PoolSettings(min_containers=2, max_containers=4), 0.0)
    await scaler.start(0.0)
    assert (backend.told, scaler.goal) == ([told], told)


async def test_what_is_found_goes_when_it_has_been_idle_for_as_long_as_any_other() -> None:
    """The time before the backend was open does not count: a standby may have waited for hours."""
    backend = Backend(found=3)
    settings = PoolSettings(min_containers=1, max_containers=4, idle_containers_after_s=10)
    scaler, ledger = Scaler(backend, settings, -10_000.0), _ledger(0)
    scaler.slots_per_container = 2
    await scaler.start(0.0)
    await scaler.follow(ledger, 9.0)
    assert backend.told == [3], "they have not answered yet"
    for index in range(3):
        ledger.started(f"c{index}", index)
        ledger.inventory(f"c{index}", [SlotState.free] * 2, 9.5)
    await scaler.follow(ledger, 19.0)
    assert backend.told == [3]
    await scaler.follow(ledger, 20.0)
    assert backend.told == [3, 1]
