"""How much longer something takes when there is more of it: a ratio, which a loaded machine does not change. And how
long others wait meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Final

TIMES: Final = 4
_TRIES: Final = 3


def growth(run: Callable[[int], object], size: int) -> float:
    """How many times longer ``run`` takes for TIMES the size, in CPU time of this thread: about TIMES if it is linear,
    its square if it is quadratic."""
    return _best_s(run, TIMES * size) / max(_best_s(run, size), 1e-4)


def _best_s(run: Callable[[int], object], size: int) -> float:
    best_s = float("inf")
    for _ in range(_TRIES):
        began_s = time.thread_time()
        run(size)
        best_s = min(best_s, time.thread_time() - began_s)
    return best_s


async def longest_turn_s(work: Coroutine[object, object, object]) -> float:
    """The longest time for which the event loop did nothing else while it did this work, in CPU time of this process:
    another thread holds the loop up as well if it does not let go of the interpreter."""
    task = asyncio.ensure_future(work)
    longest_s, last_s = 0.0, time.process_time()
    while not task.done():
        await asyncio.sleep(0.001)
        now_s = time.process_time()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    task.result()
    return longest_s
