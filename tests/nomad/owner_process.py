"""A trainer as a process of its own, to be killed or frozen: ``python -m tests.nomad.owner_process SETTINGS.json``.

Opens the job with one container and says ``{"open": true}``, with its generation; then, whenever it changes, what is
wrong (``problem``) and what was reported to its pool (``told``). At end of input it closes, and says
``{"closed": true}``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path

from agentenv.config import ContainerSettings, NomadSettings
from agentenv.slots.backends.base import StartFailed
from agentenv.slots.backends.nomad.backend import NomadBackend


def say(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


async def report(backend: NomadBackend) -> None:
    async for event in backend.events():
        if isinstance(event, StartFailed):
            say(told=event.reason)


async def main(path: Path) -> None:
    given = json.loads(path.read_text())
    backend = NomadBackend(
        ContainerSettings(slots_per_container=given["slots"]),
        NomadSettings.model_validate(given["nomad"]),
        url=given["url"],
    )
    async with backend:
        await backend.scale(1)
        say(open=True, generation=backend.generation)
        reader, ended = asyncio.create_task(report(backend)), asyncio.to_thread(sys.stdin.read)
        waiting, problem = asyncio.create_task(ended), ""
        while not waiting.done():
            if (now := backend.status().problem) != problem:
                say(problem=(problem := now))
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiting), 0.1)
    reader.cancel()
    say(closed=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
