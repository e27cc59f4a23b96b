"""A relay as a process: ``python -m tests.relay_process ID=URL ...`` prints its URL, and drains on SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from agentenv.api.farm_server.relay import serve_relay


@asynccontextmanager
async def relay_process(containers: Mapping[str, str]) -> AsyncIterator[tuple[str, Process]]:
    """Its URL, and the process; it is killed at the end, if it still runs."""
    pairs = [f"{container}={url}" for container, url in containers.items()]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.relay_process", *pairs, stdout=PIPE)
    try:
        assert process.stdout is not None
        yield (await process.stdout.readline()).decode().strip(), process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def main(containers: Mapping[str, str]) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)

    async def lookup(container: str) -> str | None:
        return containers.get(container)

    async with serve_relay(lookup) as url:
        print(url, flush=True)
        await ended.wait()


if __name__ == "__main__":
    asyncio.run(main(dict(pair.split("=", 1) for pair in sys.argv[1:])))
