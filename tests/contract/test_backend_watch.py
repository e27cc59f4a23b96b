"""The watch of a container: what its slots do, as it happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import pytest

from agentenv.config import ContainerSettings
from agentenv.containers.control import ContainerControl
from agentenv.containers.handle import ContainerHandle
from agentenv.containers.watch import watch
from agentenv.errors import ConnectionLostError, FencedError
from agentenv.slots.backends.base import ContainerStarted
from agentenv.slots.backends.fake import FakeBackend
from agentenv.wire.leases import EndRequest, RenewRequest, SealSlot, SlotReport, Tags
from agentenv.wire.states import SlotState
from agentenv.wire.watch import WatchBeat, WatchChange, WatchLine, WatchList
from tests.contract.conftest import Client
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAIT_S = 60.0


class Followed:
    """What a watch has said, read as fast as it comes. ``failed`` is the error that ended it."""

    def __init__(self) -> None:
        self.lines: list[WatchLine] = []
        self.slots: dict[int, SlotReport] = {}
        self.failed: Exception | None = None

    async def read(self, handle: ContainerHandle, *, generation: int = 0, silence_s: float = WAIT_S) -> None:
        try:
            async with aclosing(watch(handle, generation=generation, silence_s=silence_s)) as lines:
                async for line in lines:
                    self._take(line)
        except ConnectionLostError as error:
            self.failed = error

    def _take(self, line: WatchLine) -> None:
        self.lines.append(line)
        match line:
            case WatchList(slots=slots):
                self.slots = {slot.slot: slot for slot in slots}
            case WatchChange(slot=slot):
                self.slots[slot.slot] = slot

    def beats(self) -> list[WatchBeat]:
        return [line for line in self.lines if isinstance(line, WatchBeat)]

    def states(self, slot: int) -> list[SlotState]:
        """The slot's states that changes have told."""
        return [line.slot.state for line in self.lines if isinstance(line, WatchChange) and line.slot.slot == slot]

    async def until_in(self, slot: int, state: SlotState, epoch: int) -> None:
        """Until the slot is in that state and epoch."""
        await self.until(lambda: (self.slots[slot].state, self.slots[slot].epoch) == (state, epoch))

    async def until(self, condition: Callable[[], object]) -> None:
        await until(condition, explain=lambda: f"{self.failed!r} {self.lines!r}")


@asynccontextmanager
async def _followed(
    handle: ContainerHandle, *, generation: int = 0, silence_s: float = WAIT_S
) -> AsyncIterator[Followed]:
    followed = Followed()
    reading = asyncio.create_task(followed.read(handle, generation=generation, silence_s=silence_s))
    try:
        await followed.until(lambda: followed.lines)
        yield followed
    finally:
        reading.cancel()
        await asyncio.wait([reading])


async def test_the_list_is_the_inventory(container: Client) -> None:
    tags = Tags(run="exp7", kind="eval")
    await container.lease(slot=1, trajectory="held", tags=tags)
    async with _followed(container.handle) as followed:
        first = followed.lines[0]
        assert isinstance(first, WatchList)
        assert (first.boot, len(first.slots)) == (container.boot, 3)
        assert [slot.state for slot in first.slots] == [SlotState.free, SlotState.leased, SlotState.free]
        assert (first.slots[1].trajectory, first.slots[1].tags) == ("held", tags)


async def test_leases_are_seen_as_they_come_and_go(container: Client) -> None:
    tags = Tags(run="exp7")
    async with _followed(container.handle) as one, _followed(container.handle) as other:
        key = await container.lease(slot=2, trajectory="held", tags=tags)
        for followed in (one, other):
            await followed.until_in(2, SlotState.leased, key.epoch)
            assert (followed.slots[2].trajectory, followed.slots[2].tags) == ("held", tags)
        await container.control.release(key)
        for followed in (one, other):
            await followed.until_in(2, SlotState.free, key.epoch + 1)
            assert followed.slots[2].tags is None
            assert followed.states(2) == [SlotState.leased, SlotState.resetting, SlotState.free]
            assert followed.states(0) == []


async def test_a_lease_that_expires_or_is_ended_is_seen(container: Client) -> None:
    async with _followed(container.handle) as followed:
        silent = await container.lease(slot=0, ttl_s=0.2)
        ended = await container.lease(slot=1)
        await container.control.end(EndRequest(slot=1, epoch=ended.epoch))
        for key in (silent, ended):
            await followed.until_in(key.slot, SlotState.free, key.epoch + 1)
            assert SlotState.resetting in followed.states(key.slot)


async def test_heartbeats_calls_and_seals_are_no_changes(container: Client) -> None:
    async with _followed(container.handle) as followed:
        key = await container.lease()
        await container.control.renew(RenewRequest(keys=(key,), ttl_s=30))
        await container.run(key, "echo work")
        await container.control.act(key, SealSlot())
        await container.control.release(key)
        await followed.until_in(0, SlotState.free, key.epoch + 1)
        assert followed.states(0) == [SlotState.leased, SlotState.resetting, SlotState.free]


async def test_beats_tell_statistics(container: Client) -> None:
    async with _followed(container.handle, silence_s=15.0) as followed:  # a beat every six seconds
        key = await container.lease()
        await followed.until(lambda: followed.beats() and followed.beats()[-1].statistics["slots_leased"] == 1)
        await container.run(key, "echo work")
        told = len(followed.beats())
        await followed.until(lambda: len(followed.beats()) > told + 1)
        assert followed.beats()[-1].statistics["calls_running"] == 0
        assert not followed.beats()[-1].draining


async def test_a_watch_with_a_generation_fences(container: Client) -> None:
    async with _followed(container.handle, generation=5) as followed:
        first = followed.lines[0]
        assert isinstance(first, WatchList)
        assert first.generation == 5
        with pytest.raises(FencedError):
            await ContainerControl(container.handle, container.session).renew(RenewRequest(keys=(), ttl_s=60))
    async with _followed(container.handle, generation=4) as followed:  # a standby's, which only looks
        first = followed.lines[0]
        assert isinstance(first, WatchList)
        assert first.generation == 5
    farm = ContainerControl(container.handle, container.session, generation=5)
    await farm.renew(RenewRequest(keys=(), ttl_s=60))


# -- what only the fake can be made to do on demand


@asynccontextmanager
async def _fake() -> AsyncIterator[tuple[FakeBackend, Client]]:
    async with FakeBackend(ContainerSettings(slots_per_container=2)) as backend:
        await backend.scale(1)
        async for event in backend.events():
            if isinstance(event, ContainerStarted):
                async with Client.open(event.handle) as client:
                    yield backend, client
                return


async def test_a_quarantined_slot_is_told_with_its_reason() -> None:
    async with _fake() as (backend, client), _followed(client.handle) as followed:
        key = await client.lease()
        backend.quarantine_next_reset(client.handle.id)
        await client.control.release(key)
        await followed.until(lambda: followed.slots[0].state is SlotState.quarantined)
        assert "configured to fail" in followed.slots[0].reason


async def test_a_container_that_stalls_is_silent() -> None:
    async with _fake() as (backend, client), _followed(client.handle, silence_s=2.5) as followed:
        await followed.until(followed.beats)
        backend.stall(client.handle.id, 3600)
        await followed.until(lambda: followed.failed)
        assert "nothing came for 2.5 s" in str(followed.failed)


async def test_a_container_that_is_killed_cuts_its_watch() -> None:
    async with _fake() as (backend, client), _followed(client.handle) as followed:
        backend.kill(client.handle.id)
        await followed.until(lambda: followed.failed)


async def test_after_a_crash_of_the_server_a_new_watch_finds_the_leases() -> None:
    tags = Tags(run="exp7")
    async with _fake() as (backend, client):
        key = await client.lease(tags=tags)
        async with _followed(client.handle, generation=3) as followed:
            backend.crash_and_restart(client.handle.id)
            await followed.until(lambda: followed.failed)
        async with _followed(client.handle) as followed:
            first = followed.lines[0]
            assert isinstance(first, WatchList)
            assert first.boot != client.boot
            assert first.generation == 3
            assert (first.slots[0].state, first.slots[0].epoch, first.slots[0].tags) == ("leased", key.epoch, tags)
