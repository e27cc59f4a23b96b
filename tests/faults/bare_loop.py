"""How late this machine is: what a measurement of ours is compared with."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

BARE_LOOP = """
import asyncio, sys, time
async def main():
    worst, reader = 0.0, asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    while not reader.done():
        due = time.monotonic() + 0.005
        await asyncio.sleep(0.005)
        worst = max(worst, time.monotonic() - due)
    print(worst)
asyncio.run(main())
"""


@asynccontextmanager
async def this_loop(worst_s: list[float]) -> AsyncIterator[None]:
    """Appends how late the loop of the test itself was, at worst, in the meantime: what it packs and unpacks delays
    every call that it makes."""
    worst = 0.0

    async def watched() -> None:
        nonlocal worst
        while True:
            due_s = time.monotonic() + 0.005
            await asyncio.sleep(0.005)
            worst = max(worst, time.monotonic() - due_s)

    watching = asyncio.create_task(watched())
    try:
        yield
    finally:
        watching.cancel()
        worst_s.append(worst)


@asynccontextmanager
async def bare_loop(worst_s: list[float]) -> AsyncIterator[None]:
    """Appends how late an event loop that does nothing else was, at worst, in the meantime."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", BARE_LOOP, stdin=pipe, stdout=pipe)
    try:
        yield
    finally:
        printed, _ = await process.communicate(b"")
        worst_s.append(float(printed))
