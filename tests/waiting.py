"""Waiting for a condition: looked at again and again, with a deadline that only a hang or a lost event exceeds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from agentenv.deadlines import scaled

DEADLINE_S = scaled(120.0)
START_S = scaled(180.0)
"""For what starts programs, containers or a cluster, on a machine that others load as well."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02

Found = TypeVar("Found")
Explain = Callable[[], str] | str
"""What to say when it did not happen."""


async def until(condition: Callable[[], object], deadline_s: float = DEADLINE_S, explain: Explain = "") -> float:
    """Wait until ``condition()`` is true. Returns how long it took; fails the test past the deadline."""
    began = time.monotonic()
    for pause_s in _pauses(deadline_s, explain):
        if condition():
            break
        await asyncio.sleep(pause_s)
    return time.monotonic() - began


async def eventually(condition: Callable[[], Awaitable[object]], deadline_s: float = DEADLINE_S) -> None:
    """As :func:`until`, for a condition that has to be awaited."""
    for pause_s in _pauses(deadline_s, ""):
        if await condition():
            break
        await asyncio.sleep(pause_s)


async def loop_turns(count: int) -> None:
    """Let the loop turn so many times: a task that was started meanwhile gets so far, and no farther."""
    for _ in range(count):
        await asyncio.sleep(0)


def wait_for(look: Callable[[], Found | None], deadline_s: float = DEADLINE_S, explain: Explain = "") -> Found:
    """The first true value that ``look()`` returns; fails the test past the deadline. Blocks."""
    for pause_s in _pauses(deadline_s, explain):
        if found := look():
            return found
        time.sleep(pause_s)
    raise AssertionError("the pauses end by raising")


def _pauses(deadline_s: float, explain: Explain) -> Iterator[float]:
    ends, pause_s = time.monotonic() + deadline_s, _FIRST_PAUSE_S
    while time.monotonic() < ends:
        yield pause_s
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
    raise AssertionError(f"not within {deadline_s:g} s: {explain if isinstance(explain, str) else explain()}")
