"""Waiting for work that must come to its end whoever is cancelled meanwhile."""

from __future__ import annotations

import asyncio
from typing import TypeVar

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
            task.exception()  # seen: the cancellation is what the waiter hears of
        raise cancelled
    return task.result()
