"""Waiting for work: to its end even if the waiter is cancelled, or until its lease is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from agentenv.errors import AgentEnvError

Result = TypeVar("Result")


async def finish(task: asyncio.Task[Result]) -> Result:
    """The task's result, awaited to the end. Cancellation of the waiter is delivered only afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen: the waiter gets the cancellation
        raise cancelled
    return task.result()


async def unless_lost(work: Awaitable[Result], lost: Awaitable[AgentEnvError]) -> Result:
    """The result of ``work``. When ``lost`` returns first, a copy of its error is raised and the work is cancelled;
    either way both have ended then."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(lost)
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise watching.result().copy()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
