"""Reaps children, as PID 1 must: the end of every child is collected, including orphans, and its waiter is notified."""

from __future__ import annotations

import asyncio
import os
import signal

from agentenv.wire.signals import signal_name


class Reaper:
    """Collects every dead child of this process. One per process: it takes SIGCHLD."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[int, asyncio.Future[int]] = {}
        loop.add_signal_handler(signal.SIGCHLD, self._collect)

    def watch(self, pid: int) -> asyncio.Future[int]:
        """A future of the child's wait status. Call it right after the fork, before any await."""
        future: asyncio.Future[int] = self._loop.create_future()
        self._waiting[pid] = future
        return future

    def close(self) -> None:
        """Stop reaping; futures still pending are left as they are."""
        self._loop.remove_signal_handler(signal.SIGCHLD)

    def _collect(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            future = self._waiting.pop(pid, None)
            if future is not None and not future.done():
                future.set_result(status)


async def readable(fd: int, timeout_s: float) -> None:
    """Return when ``fd`` is readable (or at EOF). Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def ready() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_reader(fd, ready)
    try:
        async with asyncio.timeout(timeout_s):
            await future
    finally:
        loop.remove_reader(fd)


def end_of(status: int) -> str:
    """A wait status as text."""
    if os.WIFSIGNALED(status):
        return f"killed by {signal_name(os.WTERMSIG(status))}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"
