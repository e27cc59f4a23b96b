"""`agentenv farm relay` as tests run it: a process of its own, which drains on SIGTERM."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.farm_process import COMMAND
from tests.waiting import START_S


@asynccontextmanager
async def relay_process(farm_url: str, token: str) -> AsyncIterator[tuple[str, Process]]:
    """Its URL, and the process; it is killed at the end, if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "farm", "relay", "--json", "--port", "0", "--url", farm_url, "--token", token, stdout=PIPE
    )
    try:
        assert process.stdout is not None
        said = json.loads(await asyncio.wait_for(process.stdout.readline(), START_S))
        assert said["event"] == "ready"
        yield said["url"], process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
