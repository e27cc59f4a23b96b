"""The book of leases: each is released or lost, once, whatever happens in whichever order."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from agentenv.errors import AgentEnvError, ContainerLostError, LeaseLostError, StaleLeaseError
from agentenv.slots.lease import LeaseBook, SlotLease
from agentenv.slots.statistics import Tally
from agentenv.wire.leases import LeaseKey, SealSlot


class Keeper:
    """Resets slots when it is allowed to."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.book = LeaseBook(self, self.tally, reset_timeout_s=60)
        self.given_back: list[int] = []
        self.let_go: list[int] = []
        self.go_on = asyncio.Event()
        self.answer: AgentEnvError | None = None

    async def act(self, *_: object) -> str:
        if self.answer is not None:
            raise self.answer
        return "done"

    def hold(self, number: int) -> SlotLease:
        link: Any = SimpleNamespace(handle=SimpleNamespace(id="c"), control=self)
        return self.book.hold(number, f"t{number}", LeaseKey(slot=number, epoch=1, secret="s" * 16), link)

    def give_back(self, lease: SlotLease) -> asyncio.Task[None]:
        async def reset() -> None:
            await self.go_on.wait()

        self.given_back.append(lease.id)
        return asyncio.create_task(reset())

    def left(self, lease: SlotLease) -> None:
        self.let_go.append(lease.id)

    def refused(self, lease: SlotLease, error: AgentEnvError) -> None:
        self.book.lose(lease.id, error)


async def test_a_lease_that_is_left_is_neither_released_nor_lost() -> None:
    keeper = Keeper()
    lease = keeper.hold(1)
    lease.leave()
    lease.leave()
    await lease.release()
    keeper.book.lose(1, ContainerLostError("gone"))
    assert (keeper.let_go, keeper.given_back, lease.lost) == ([1], [], None)
    with pytest.raises(StaleLeaseError):
        await lease.act(SealSlot())


@pytest.mark.parametrize("seed", range(20))
async def test_a_lease_is_released_or_lost_once(seed: int) -> None:
    chosen, keeper = random.Random(seed), Keeper()
    keeper.go_on.set()
    leases = [keeper.hold(number) for number in range(8)]
    for _ in range(40):
        lease = chosen.choice(leases)
        before = lease.released, lease.lost
        if chosen.random() < 0.5:
            await lease.release()
        else:
            keeper.book.lose(lease.id, ContainerLostError("gone"))
        assert (lease.released, lease.lost) == before or before == (False, None)
        assert lease.released is (lease.lost is None), "one of both"
        assert keeper.book.get(lease.id) is None
        ended = len(leases) - len(list(keeper.book))
        assert keeper.tally.released + keeper.tally.lost == ended
    assert sorted(keeper.given_back) == [lease.id for lease in leases if lease.released]
    assert keeper.tally.granted == 8


async def test_a_release_waits_for_the_reset_and_so_does_its_repetition() -> None:
    keeper = Keeper()
    lease = keeper.hold(0)
    waiting = [asyncio.create_task(lease.release()) for _ in range(2)]
    assert (await asyncio.wait(waiting, timeout=0.05))[0] == set()
    keeper.go_on.set()
    await asyncio.gather(*waiting)
    assert keeper.given_back == [0]


async def test_what_its_container_refuses_is_lost_and_nothing_is_done_after_that() -> None:
    keeper = Keeper()
    lease, other = keeper.hold(0), keeper.hold(1)
    answered: object = await lease.act(SealSlot())
    assert answered == "done"
    keeper.answer = ContainerLostError("gone")
    with pytest.raises(ContainerLostError):
        await lease.act(SealSlot())
    assert await lease.wait_lost() is keeper.answer
    keeper.answer = None
    with pytest.raises(ContainerLostError):
        await lease.act(SealSlot())
    keeper.book.give_back(other)
    with pytest.raises(StaleLeaseError, match="can no longer be used"):
        await other.act(SealSlot())


async def test_a_book_that_is_closed_gives_everything_back_and_says_so() -> None:
    keeper = Keeper()
    leases = [keeper.hold(number) for number in range(3)]
    keeper.book.close()
    assert keeper.given_back == [0, 1, 2]
    for lease in leases:
        assert isinstance(await lease.wait_lost(), LeaseLostError)
        await lease.release()  # does not wait: it is lost
