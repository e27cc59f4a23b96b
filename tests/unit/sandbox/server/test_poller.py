"""Slots share the server's loop by the time they take, however many descriptors of them are ready."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest_asyncio

from agentenv.sandbox.server.poller import Lane, Poller
from tests.waiting import loop_turns

TURN_S = 0.001


class Slots:
    """Descriptors of slots that stay ready, and which were called back. Time passes in callbacks only."""

    def __init__(self, stack: ExitStack) -> None:
        self.now_s = 0.0
        self.poller = Poller(asyncio.get_running_loop(), lambda: self.now_s)
        self.called: list[tuple[str, int]] = []
        self.took_s: dict[str, float] = {}
        self._stack = stack
        self._lanes: dict[str, Lane] = {}

    def ready(self, slot: str, count: int = 1, *, takes_s: float) -> list[int]:
        """So many descriptors of the slot are ready from now on, whatever their callbacks do."""
        lane = self._lanes.setdefault(slot, Lane(self.poller))
        return [self._one(slot, lane, takes_s) for _ in range(count)]

    def forget(self, slot: str, fd: int) -> None:
        self._lanes[slot].remove(fd)

    def _one(self, slot: str, lane: Lane, takes_s: float) -> int:
        ours, theirs = map(self._stack.enter_context, socket.socketpair())
        theirs.send(b"x")
        fd = ours.fileno()

        def callback() -> None:
            self.now_s += takes_s
            self.took_s[slot] = self.took_s.get(slot, 0.0) + takes_s
            self.called.append((slot, fd))

        lane.add(fd, callback)
        return fd


@pytest_asyncio.fixture
async def slots() -> AsyncIterator[Slots]:
    with ExitStack() as stack:
        made = Slots(stack)
        yield made
        made.poller.close()


async def test_a_slot_that_did_little_is_served_before_all_that_another_has_ready(slots: Slots) -> None:
    slots.ready("flood", 200, takes_s=0.0002)
    await loop_turns(10)
    before = len(slots.called)
    slots.ready("calm", takes_s=0.0002)
    await loop_turns(2)
    waited = [slot for slot, _ in slots.called[before:]].index("calm")
    assert waited <= 1 + TURN_S / 0.0002


async def test_the_loops_other_work_waits_for_one_turn_only(slots: Slots) -> None:
    slots.ready("flood", 200, takes_s=0.0003)
    for _ in range(10):
        before_s = slots.now_s
        await loop_turns(1)
        assert slots.now_s - before_s <= 2 * (TURN_S + 0.0003)


async def test_slots_have_equal_time_whatever_their_callbacks_take(slots: Slots) -> None:
    slots.ready("many", 50, takes_s=0.0007)
    slots.ready("long", 2, takes_s=0.003)
    slots.ready("short", 50, takes_s=0.0001)
    await loop_turns(1_000)
    assert max(slots.took_s.values()) < 1.2 * min(slots.took_s.values()) + 0.01


async def test_a_slot_that_was_idle_has_saved_nothing_up(slots: Slots) -> None:
    slots.ready("busy", 5, takes_s=0.001)
    (late,) = slots.ready("late", takes_s=0.001)
    await loop_turns(20)
    slots.forget("late", late)
    await loop_turns(200)
    before = len(slots.called)
    slots.ready("late", takes_s=0.001)
    await loop_turns(50)
    since = Counter(slot for slot, _ in slots.called[before:])
    assert abs(since["busy"] - since["late"]) <= 3


async def test_every_descriptor_of_a_slot_has_its_turn(slots: Slots) -> None:
    slots.ready("one", 30, takes_s=0.002)
    await loop_turns(300)
    counts = Counter(fd for _, fd in slots.called)
    assert len(counts) == 30
    assert max(counts.values()) - min(counts.values()) <= 1


async def test_a_descriptor_that_was_removed_is_not_called_back(slots: Slots) -> None:
    fds = slots.ready("one", 10, takes_s=0.0009)
    await loop_turns(1)
    for fd in fds:
        slots.forget("one", fd)
    before = len(slots.called)
    await loop_turns(5)
    assert len(slots.called) == before
