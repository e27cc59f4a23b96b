"""Who may have a slot beside the one its rollout has, and who waits for whom."""

from __future__ import annotations

import asyncio

import pytest

from agentenv.agent.turns import Turns, inside_a_turn
from agentenv.errors import ConfigError


async def test_inside_a_turn_only_those_kept_for_it_are_had() -> None:
    turns = Turns(3, kept=1)
    both = asyncio.Barrier(2)
    inner = 0

    async def rollout() -> None:
        nonlocal inner
        async with turns.one():
            await both.wait()  # no other turn is free now
            async with turns.one():
                inner += 1
                assert inner == 1
                with pytest.raises(ConfigError, match="cannot wait for the slot of another one"):
                    await turns.one().__aenter__()
                await asyncio.sleep(0)
                inner -= 1
            assert inside_a_turn()

    async with asyncio.timeout(20):
        await asyncio.gather(rollout(), rollout())
    assert not inside_a_turn()


async def test_without_any_it_is_a_setting_that_is_wrong() -> None:
    turns = Turns(5)
    async with turns.one():
        with pytest.raises(ConfigError, match="hook_slots: is 0"):
            await asyncio.create_task(turns.one().__aenter__(), name="what a hook starts is inside, too")
        async with Turns(1).one():
            assert inside_a_turn(), "another farm has turns of its own"


async def test_what_outlives_a_turn_is_outside() -> None:
    turns, over = Turns(1), asyncio.Event()

    async def late() -> None:
        await over.wait()
        async with turns.one():
            assert inside_a_turn()

    async with turns.one():
        task = asyncio.create_task(late())
        await asyncio.sleep(0)
    over.set()
    async with asyncio.timeout(20):
        await task
    async with turns.one():
        pass
