"""`agentenv farm serve` as tests run it: a process of its own, whose containers outlive it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.ports import promised_port
from tests.waiting import START_S

SETTINGS = """
[pool]
min_containers = 1
max_containers = 2
[containers]
slots_per_container = 2
require_sandbox = false
"""
COMMAND = (sys.executable, "-c", "from agentenv.cli import main; main()")


class FarmProcess:
    """`agentenv farm serve` as its own process, on one port whenever it is started."""

    def __init__(
        self, directory: Path, more: str = "", *, settings: str = SETTINGS, port: int = 0, beneath: Sequence[str] = ()
    ) -> None:
        """``beneath``: the command that runs it, itself if none."""
        self._directory = directory
        self._config = directory / "farm.toml"
        self._config.write_text(settings + more)
        self._process: asyncio.subprocess.Process | None = None
        self._promise = ExitStack()
        self._port = port or self._promise.enter_context(promised_port())
        self._beneath = beneath
        self.url = ""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "AGENTENV_STATE_DIR": str(self._directory)}

    async def start(self, within_s: float = START_S) -> dict[str, Any]:
        """Returns when it leads."""
        self._process = await asyncio.create_subprocess_exec(
            *self._beneath, *COMMAND, "farm", "serve", "--json",
            "--config", str(self._config), "--port", str(self._port),
            env=self.environment, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdout is not None
        said: dict[str, Any] = json.loads(await asyncio.wait_for(self._process.stdout.readline(), within_s))
        self.url = said["url"]
        return said

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        await self._process.wait()

    async def token(self, run: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "farm", "token", "--json", "--run", run, "--scope", "admin",
            "--config", str(self._config), env=self.environment, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        told: dict[str, Any] = json.loads((await process.communicate())[0])
        return str(told["token"])

    async def end(self, *, kept: bool = True) -> None:
        """The service, and then its containers, if they are kept."""
        if self._process is not None and self._process.returncode is None:
            await self.kill(signal.SIGTERM)
        self._promise.close()
        if not kept:
            return
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "gc", "--kept", "default",
            env=self.environment, stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        await process.wait()
