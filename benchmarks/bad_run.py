"""``python -m benchmarks.bad_run URL TOKEN DEED SLOTS``: a run that does what it may through its own leases, as hard as
it can, until its input ends. A process of its own, and a nice one: only the containers are to carry what it does.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from types import MappingProxyType

from agentenv.errors import AgentEnvError
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.tools.catalog import ToolCatalog
from benchmarks.service import Access

_AT_ONCE = 32
"""Calls of one slot that are sent without waiting for each other."""
_SHORT_AT_ONCE = 8
_LARGE = 512 * 1024


async def short_calls(session: ToolSession, _: int) -> None:
    """As many short calls as are served, several at once."""
    calls = [session.call("bash", {"command": "true"}) for _ in range(_SHORT_AT_ONCE)]
    await asyncio.gather(*calls, return_exceptions=True)


async def queued_calls(session: ToolSession, _: int) -> None:
    """Large calls that wait behind a slow one until the lease's share of the container is full, and are refused."""
    calls = [session.call("bash", {"command": "sleep 1"})]
    calls += [session.call("bash", {"command": f": {'x' * _LARGE}"}) for _ in range(8 * _AT_ONCE)]
    await asyncio.gather(*calls, return_exceptions=True)


async def outputs(session: ToolSession, _: int) -> None:
    """Outputs far beyond what is kept of them, and others as large as may be had."""
    for command in ("head -c 256M /dev/zero", "head -c 1M /dev/zero | tr '\\0' x"):
        await session.call("bash", {"command": command})


async def cancels(session: ToolSession, _: int) -> None:
    """Calls that are cancelled as soon as they are made."""
    calls = {asyncio.ensure_future(session.call("bash", {"command": "sleep 5"})) for _ in range(_AT_ONCE)}
    try:
        await asyncio.wait(calls, timeout=0.05)
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def sessions(session: ToolSession, turn: int) -> None:
    """Shells that stay, opened and used without pause; those of earlier turns are ended by the slot's own bound."""
    names = [f"s{(turn + number) % 16}" for number in range(8)]
    calls = [session.call("terminal", {"command": "echo $$", "session": name, "pty": True}) for name in names]
    await asyncio.gather(*calls, return_exceptions=True)


async def seals(session: ToolSession, _: int) -> None:
    """Resets of its own slot: the supervisor's work, not the server's."""
    await session.seal()


DEEDS: Mapping[str, Callable[[ToolSession, int], Awaitable[None]]] = MappingProxyType(
    {
        "short calls": short_calls,
        "queued calls": queued_calls,
        "outputs": outputs,
        "cancels": cancels,
        "sessions": sessions,
        "seals": seals,
    }
)


async def _again_and_again(executor: ToolExecutor, deed: str, name: str, at_work: asyncio.Barrier) -> None:
    turn = 0
    while True:
        async with executor.open(name) as session:
            if turn == 0:
                await at_work.wait()
            try:
                while session.lease.lost is None:
                    turn += 1
                    await DEEDS[deed](session, turn)
            except AgentEnvError:
                await asyncio.sleep(0.1)  # refused, or the slot is lost: on with the next


async def _main(url: str, token: str, deed: str, slots: int) -> None:
    os.nice(10)
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(Access(url, token, slots).pool("bad"))
        executor = await stack.enter_async_context(ToolExecutor(pool, ToolCatalog.builtin()))
        at_work = asyncio.Barrier(slots + 1)
        work = [
            asyncio.create_task(_again_and_again(executor, deed, f"bad-{number}", at_work)) for number in range(slots)
        ]
        await at_work.wait()
        print("at work", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
