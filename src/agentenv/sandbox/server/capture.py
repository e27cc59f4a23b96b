"""Captures a command's output: head and tail under a cap, however long it is."""

from __future__ import annotations

import os

from agentenv.sandbox.server.poller import Lane
from agentenv.sessions.allowance import Allowance
from agentenv.sessions.head_tail import HeadTail

_READ_BYTES = 256 * 1024
"""More than the capacity of the agent's socket."""
_FLOOD_BYTES_PER_S = 64 * 1024 * 1024
_FLOOD_BURST_BYTES = 4 * 1024 * 1024
"""Beyond this burst, the rate at which an output is read whose bytes are dropped: a flood slows down itself, and what
somebody will see is never waited for."""


class OutputReader:
    """Reads one output of a run, from :meth:`watch` to :meth:`finish`. Owns the descriptor."""

    __slots__ = ("_allowance", "_fd", "_lane", "kept")

    def __init__(self, lane: Lane, fd: int, cap_bytes: int) -> None:
        os.set_blocking(fd, False)
        self._lane = lane
        self._fd = fd
        self._allowance = Allowance(_FLOOD_BYTES_PER_S, _FLOOD_BURST_BYTES)
        self.kept = HeadTail(cap_bytes)

    def watch(self) -> None:
        """Start reading whenever there is data."""
        self._lane.add(self._fd, self._readable)

    def finish(self) -> None:
        """The run has ended: read the rest, which is already here, and release the descriptor."""
        while self._fd >= 0:
            if self._read() is None:
                self.close()

    def close(self) -> None:
        """Release the descriptor. Writers are not disturbed. Repeatable."""
        if self._fd >= 0:
            self._lane.remove(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _readable(self) -> None:
        count = self._read() or 0
        dropped = min(count, self.kept.total_bytes - self.kept.kept_bytes)
        if dropped and self._fd >= 0:
            self._throttle(dropped)

    def _read(self) -> int | None:
        """One read: number of bytes; 0 at the end (now closed); None if nothing is available now."""
        try:
            chunk = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            chunk = b""
        if not chunk:
            self.close()
            return 0
        self.kept.feed(chunk)
        return len(chunk)

    def _throttle(self, count: int) -> None:
        if wait_s := self._allowance.take(count, self._lane.loop.time()):
            self._lane.remove(self._fd)
            self._lane.loop.call_later(wait_s + 0.001, self._resume)

    def _resume(self) -> None:
        if self._fd >= 0:
            self.watch()
