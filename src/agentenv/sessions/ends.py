"""Our ends of a program's streams, for coroutines: whoever waits here makes the program wait, and nobody else."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Watcher:
    """Calls back whenever a descriptor is readable, from ``add`` to ``remove``."""

    loop: asyncio.AbstractEventLoop
    add: Callable[[int, Callable[[], None]], None]
    remove: Callable[[int], None]


class ReadEnd:
    """Owns the descriptor, from which one coroutine at a time reads."""

    def __init__(self, watcher: Watcher, fd: int) -> None:
        os.set_blocking(fd, False)
        self._watcher = watcher
        self._fd = fd

    async def read(self, most_bytes: int) -> bytes:
        """What there is, once there is something; empty at the end."""
        while self._fd >= 0:
            try:
                return os.read(self._fd, most_bytes)
            except BlockingIOError:
                await self._readable()
            except ConnectionResetError:
                break
        return b""

    def close(self) -> None:
        """Release the descriptor. Repeatable. A coroutine that reads has to be cancelled."""
        if self._fd >= 0:
            self._watcher.remove(self._fd)
            os.close(self._fd)
            self._fd = -1

    async def _readable(self) -> None:
        ready = self._watcher.loop.create_future()

        def found() -> None:
            # At once: the coroutine reads later, and until then a watcher finds the descriptor again and again.
            self._watcher.remove(self._fd)
            if not ready.done():
                ready.set_result(None)

        self._watcher.add(self._fd, found)
        try:
            await ready
        finally:
            if self._fd >= 0:
                self._watcher.remove(self._fd)


class WriteEnd:
    """Owns the descriptor, to which one coroutine at a time writes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self._fd = fd

    async def write(self, data: bytes) -> bool:
        """Write all of ``data``. False when it is no longer read."""
        rest = memoryview(data)
        while rest:
            if self._fd < 0:
                return False
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                await self._writable()
            except (BrokenPipeError, ConnectionResetError):
                return False
        return True

    def close(self) -> None:
        """Close it: the reader gets end of file. Repeatable. A coroutine that writes has to be cancelled."""
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = -1

    async def _writable(self) -> None:
        ready = self._loop.create_future()
        self._loop.add_writer(self._fd, lambda: None if ready.done() else ready.set_result(None))
        try:
            await ready
        finally:
            if self._fd >= 0:
                self._loop.remove_writer(self._fd)
