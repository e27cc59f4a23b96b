"""One container as a child process: its event lines, the end of its log, its exit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections import deque
from pathlib import Path
from typing import Any, Self

from agentenv import shipped
from agentenv.config import cache_dir, launch_environment
from agentenv.deadlines import scaled
from agentenv.slots.backends.base import StartFailed
from agentenv.slots.backends.fleet import StartFailedError
from agentenv.slots.backends.local_scope import make_scope
from agentenv.wire.signals import signal_name

logger = logging.getLogger(__name__)

_STDERR_LINES = 20
_READ_GRACE_S = scaled(2.0)


class LocalProcess:
    """``python -m agentenv.sandbox`` with its lifeline held by this process: if this process dies, so does it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process
        self._last_words: deque[str] = deque(maxlen=_STDERR_LINES)
        self._events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._readers = (
            asyncio.create_task(self._read_stdout(), name=f"stdout of {name}"),
            asyncio.create_task(self._read_stderr(), name=f"stderr of {name}"),
        )

    @classmethod
    async def launch(cls, name: str, spec: Path) -> Self:
        """Start the process. Raises OSError."""
        # A session of its own: Ctrl-C in our terminal is turned into an orderly stop by us.
        process = await asyncio.create_subprocess_exec(
            *await container_command(name, spec, "--lifeline"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=container_environment(),
            start_new_session=True,
        )
        return cls(name, process)

    @property
    def pid(self) -> int:
        """The process that was started; everything in the container ends with it."""
        return self._process.pid

    async def ready(self) -> dict[str, Any]:
        """The `ready` event. Raises StartFailedError when it reported `failed`, or ended silently."""
        while (event := await self._events.get()) is not None:
            if event.get("event") == "ready":
                return event
            if event.get("event") == "failed":
                raise StartFailedError(StartFailed.from_event(event))
        raise StartFailedError(StartFailed(f"{self._name} ended before it was ready: {await self.ended()}"))

    async def ended(self) -> str:
        """Wait for its end; exit status and last words."""
        code = await self._process.wait()
        await asyncio.wait(self._readers, timeout=_READ_GRACE_S)
        how = f"killed by {signal_name(-code)}" if code < 0 else f"exited with {code}"
        return f"{how}; {self.last_words()}"

    def last_words(self) -> str:
        """The end of its log."""
        return "it logged: " + " | ".join(self._last_words) if self._last_words else "it logged nothing"

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM and close the lifeline, then SIGKILL if that did not end it. Returns when it is reaped."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            logger.warning("%s did not stop within %g s and is killed", self._name, grace_s)
            self._signal(signal.SIGKILL)
            await self._process.wait()
        await asyncio.wait(self._readers, timeout=_READ_GRACE_S)
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                if number is signal.SIGKILL:
                    os.killpg(self._process.pid, number)
                else:
                    self._process.send_signal(number)

    async def _read_stdout(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                self._process_line(line)
        finally:
            self._events.put_nowait(None)

    def _process_line(self, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            logger.warning("%s printed a line that is not an event: %r", self._name, line[:200])
            return
        if event.get("event") not in ("ready", "failed"):
            logger.info("%s: %s", self._name, event)
        self._events.put_nowait(event)

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(65_536):
            for line in chunk.decode("utf-8", "replace").splitlines():
                self._last_words.append(line[:500])
                logger.debug("%s: %s", self._name, line[:500])

    def __repr__(self) -> str:
        state = "running" if self._process.returncode is None else f"exited {self._process.returncode}"
        return f"<LocalProcess {self._name} pid {self.pid} {state}>"


async def container_command(name: str, spec: Path, option: str, *, kept: bool = False) -> list[str]:
    """The command that starts a container. ``kept``: it outlives this process."""
    scope = await asyncio.to_thread(make_scope, name, kept=kept)
    command = [sys.executable, "-m", "agentenv.sandbox", str(spec), option, "--cache", str(cache_dir().absolute())]
    return [*scope.words, *command] if scope else command


def container_environment() -> dict[str, str]:
    """Its environment: it must import this very package, installed or not."""
    env = launch_environment()
    package = str(shipped.PACKAGE.parent)
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, (package, env.get("PYTHONPATH"))))}
