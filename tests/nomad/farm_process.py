"""An environment as a process of its own, to be killed: ``python -m tests.nomad.farm_process SETTINGS.json``.

Leases every slot of the job's containers, has 100 calls under way at once, and says so on standard output,
a JSON line at a time: ``{"leased": n}``, ``{"answered": id}`` for each call, ``{"under_way": n}`` once all
are sent. It never ends by itself.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from agentenv.config import ContainerSettings, NomadSettings, PoolSettings
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.backends.nomad.backend import NomadBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog

CALLS = 100


def say(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


async def call(session: ToolSession, number: int) -> None:
    await session.call("bash", {"command": f"echo {number} >> ran; sleep 0.2"})
    say(answered=number)


async def main(path: Path) -> None:
    given = json.loads(path.read_text())
    containers, slots = given["containers"], given["slots"]
    backend = NomadBackend(ContainerSettings(slots_per_container=slots), NomadSettings.model_validate(given["nomad"]))
    settings = PoolSettings(min_containers=containers, max_containers=containers, acquire_timeout_s=90.0)
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(SlotPool(backend, settings))
        executor = await stack.enter_async_context(ToolExecutor(pool, ToolCatalog.builtin()))
        sessions = await asyncio.gather(
            *(stack.enter_async_context(executor.open(f"doomed-{number}")) for number in range(containers * slots))
        )
        say(leased=len(sessions))
        calls = [asyncio.create_task(call(sessions[number % len(sessions)], number)) for number in range(CALLS)]
        await asyncio.sleep(0)
        say(under_way=len(calls))
        await asyncio.gather(*calls)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
