"""Which agents may hold a second slot, and which wait."""

from __future__ import annotations

import asyncio

import pytest

from agentenv.agent.hook_slot_gate import HookSlotGate, holds_slot
from agentenv.errors import ConfigError
from tests.waiting import DEADLINE_S


async def test_a_holder_gets_only_reserved_passes() -> None:
    gate = HookSlotGate(3, reserved=1)
    both = asyncio.Barrier(2)
    inner = 0

    async def rollout() -> None:
        nonlocal inner
        async with gate.enter():
            await both.wait()  # no other pass is free now
            async with gate.enter():
                inner += 1
                assert inner == 1
                with pytest.raises(ConfigError, match="cannot wait for the slot of another one"):
                    await gate.enter().__aenter__()
                await asyncio.sleep(0)
                inner -= 1
            assert holds_slot()

    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(rollout(), rollout())
    assert not holds_slot()


async def test_without_any_it_is_a_setting_that_is_wrong() -> None:
    gate = HookSlotGate(5)
    async with gate.enter():
        with pytest.raises(ConfigError, match="hook_slots: is 0"):
            await asyncio.create_task(gate.enter().__aenter__(), name="what a hook starts is inside, too")
        async with HookSlotGate(1).enter():
            assert holds_slot(), "another farm has its own passes"


async def test_what_outlives_a_pass_is_outside() -> None:
    gate, over = HookSlotGate(1), asyncio.Event()

    async def late() -> None:
        await over.wait()
        async with gate.enter():
            assert holds_slot()

    async with gate.enter():
        task = asyncio.create_task(late())
        await asyncio.sleep(0)
    over.set()
    async with asyncio.timeout(DEADLINE_S):
        await task
    async with gate.enter():
        pass
