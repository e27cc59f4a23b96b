from __future__ import annotations

import asyncio
import contextvars

import pytest

from agentenv.env.blocking import run_with_waits, wait

NAME = contextvars.ContextVar("NAME", default="")


async def later(value: int) -> int:
    await asyncio.sleep(0)
    if value < 0:
        raise ValueError(value)
    return value + 1


async def test_blocking_code_waits_while_the_loop_goes_on() -> None:
    ready = asyncio.Event()

    def blocking() -> int:
        wait(ready.wait())
        return wait(later(wait(later(1))))

    async def opener() -> None:
        await asyncio.sleep(0)
        ready.set()

    value, _ = await asyncio.gather(run_with_waits(blocking), opener())
    assert value == 3


async def test_a_hook_may_both_await_and_wait() -> None:
    NAME.set("task")

    async def mixed(start: int) -> tuple[int, str]:
        first = await later(start)
        second = wait(later(first))
        return await later(second), NAME.get()

    assert await run_with_waits(mixed, 0) == (3, "task")


async def test_errors_arise_where_they_are_waited_for() -> None:
    async def catches() -> str:
        try:
            wait(later(-1))
        except ValueError:
            with pytest.raises(ValueError, match="-2"):
                await later(-2)
            return "caught"
        raise AssertionError

    assert await run_with_waits(catches) == "caught"
    with pytest.raises(ValueError, match="-3"):
        await run_with_waits(lambda: wait(later(-3)))


async def test_cancellation_reaches_blocking_code() -> None:
    seen: list[str] = []

    def blocking() -> None:
        try:
            wait(asyncio.Event().wait())
        finally:
            seen.append("cleaned up")

    task = asyncio.create_task(run_with_waits(blocking))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cleaned up"]


async def test_waiting_elsewhere_is_refused() -> None:
    async def other_task() -> int:
        return wait(later(1))

    async def hook() -> int:
        return await asyncio.create_task(other_task())

    with pytest.raises(RuntimeError, match="in the hook itself or in a thread"):
        await run_with_waits(hook)
