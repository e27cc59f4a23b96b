"""Reads one output descriptor of a session completely, at a rate that leaves time for everything else."""

from __future__ import annotations

import os
from collections.abc import Callable

from agentenv.sessions.allowance import Allowance
from agentenv.sessions.host import Host

_READ_BYTES = 64 * 1024
_DRAIN_BYTES = 1024 * 1024
"""Capacity of a pipe: read at once when everything printed so far is wanted."""
_FLOOD_BYTES_PER_S = 16 * 1024 * 1024
_FLOOD_BURST_BYTES = 4 * 1024 * 1024
"""Maximum rate for a session that floods: it slows down itself, not the server."""


class Reader:
    """One descriptor (a pipe, or our side of a terminal), from its start to :meth:`close`. Owns it.

    ``on_bytes`` gets each piece; an empty piece is the end. Beyond a burst of 4 MiB, ``most_bytes_per_s`` are read.
    """

    def __init__(
        self,
        host: Host,
        fd: int,
        on_bytes: Callable[[bytes], None],
        *,
        terminal: bool,
        most_bytes_per_s: int = _FLOOD_BYTES_PER_S,
    ) -> None:
        os.set_blocking(fd, False)
        self._host = host
        self._fd = fd
        self._on_bytes: Callable[[bytes], None] | None = on_bytes
        self._terminal = terminal
        self._allowance = Allowance(most_bytes_per_s, _FLOOD_BURST_BYTES)
        self._on_hold = self._throttled = False
        host.watch(fd, self._readable)

    @property
    def open(self) -> bool:
        """Whether there may be more output."""
        return self._fd >= 0

    @property
    def fd(self) -> int:
        """The descriptor, -1 once closed: for writing to a terminal."""
        return self._fd

    def hold(self) -> None:
        """Pause reading until :meth:`go_on`. Repeatable."""
        self._on_hold = True
        if self._fd >= 0:
            self._host.unwatch(self._fd)

    def go_on(self) -> None:
        """End the pause of :meth:`hold`. Repeatable."""
        if self._on_hold:
            self._on_hold = False
            self._watch_again()

    def drain(self) -> None:
        """Read what is available now, without waiting for more."""
        budget = _DRAIN_BYTES
        while budget > 0 and self._fd >= 0:
            count = self._read()
            if not count:
                return
            budget -= count

    def close(self) -> None:
        """Release the descriptor and the callback; writers to a pipe are not disturbed. Repeatable."""
        self._on_bytes = None
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._host.unwatch(fd)
            if self._terminal:
                os.close(fd)
            else:
                self._host.orphan(fd)

    def _readable(self) -> None:
        count = self._read()
        if count and self._fd >= 0:
            self._throttle(count)

    def _read(self) -> int | None:
        """One read: number of bytes; 0 at the end (now closed); None if nothing is available now."""
        try:
            chunk = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            chunk = b""  # EIO: the terminal was closed by everybody
        if not chunk:
            self._host.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1
        if self._on_bytes is not None:
            self._on_bytes(chunk)
        return len(chunk)

    def _throttle(self, count: int) -> None:
        wait_s = self._allowance.take(count, self._host.loop.time())
        if wait_s and not self._throttled:
            self._throttled = True
            self._host.unwatch(self._fd)
            self._host.loop.call_later(wait_s + 0.001, self._resume, self._fd)

    def _resume(self, fd: int) -> None:
        self._throttled = False
        if self._fd == fd:
            self._watch_again()

    def _watch_again(self) -> None:
        if self._fd >= 0 and not self._on_hold and not self._throttled:
            self._host.watch(self._fd, self._readable)
