"""What a command printed: head and tail under a cap, however much it was and whoever holds the pipe."""

from __future__ import annotations

import fcntl
import os
import sys
import termios
from collections import OrderedDict

from agentenv.sandbox.poller import Poller
from agentenv.sessions.head_tail import HeadTail

_FIRST_READ_BYTES = 64 * 1024
"""The size of a new pipe: a full read means that the writer waits for us."""
_GROWN_PIPE_BYTES = 1024 * 1024
_FLOOD_BYTES_PER_S = 256 * 1024 * 1024
"""How fast one pipe is drained at most: a flood must not eat the event loop."""
_FLOOD_BURST_BYTES = 16 * 1024 * 1024
_ORPHAN_BURST_BYTES = 1024 * 1024
_ORPHAN_PAUSE_S = 0.01
_SPLICE_F_NONBLOCK = 2
MAX_ORPHANS = 16


class PipeReader:
    """Reads one output pipe of a run, from :meth:`watch` to :meth:`finish`. Owns the descriptor."""

    __slots__ = ("_allowed_bytes", "_fd", "_poller", "_read_bytes", "_since", "kept")

    def __init__(self, poller: Poller, fd: int, cap_bytes: int) -> None:
        os.set_blocking(fd, False)
        self._poller = poller
        self._fd = fd
        self._read_bytes = _FIRST_READ_BYTES
        self._allowed_bytes = float(_FLOOD_BURST_BYTES)
        self._since = 0.0
        self.kept = HeadTail(cap_bytes)

    def watch(self) -> None:
        """Read whenever there is something to read."""
        self._poller.add(self._fd, self._readable)

    def finish(self, orphans: Orphans) -> None:
        """Read what is in the pipe now, never waiting for its end. A pipe that background processes
        still hold goes to ``orphans``."""
        if self._fd < 0:
            return
        if self._read_up_to(max(self._read_bytes, _FIRST_READ_BYTES)):
            # The command has made its pipe larger. Not more than is there now: who writes on is no longer the call.
            self._read_up_to(_waiting_bytes(self._fd))
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._poller.remove(fd)
            orphans.add(fd)

    def _read_up_to(self, budget: int) -> bool:
        """Read until ``budget`` is used up, or nothing is left; whether there may be more."""
        while budget > 0 and self._fd >= 0:
            count = self._read()
            if count is None:
                return False
            budget -= count
        return self._fd >= 0

    def close(self) -> None:
        """Let go of the pipe. Repeatable."""
        if self._fd >= 0:
            self._poller.remove(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _readable(self) -> None:
        count = self._read()
        if count and self._fd >= 0:
            if count == self._read_bytes:
                self._grow()
            self._throttle(count)

    def _read(self) -> int | None:
        """One read: how many bytes; 0 at the end (now closed); None when there is nothing now."""
        try:
            chunk = os.read(self._fd, self._read_bytes)
        except BlockingIOError:
            return None
        except OSError:
            chunk = b""
        if not chunk:
            self.close()
            return 0
        self.kept.feed(chunk)
        return len(chunk)

    def _grow(self) -> None:
        if self._read_bytes < _GROWN_PIPE_BYTES:
            self._read_bytes = _GROWN_PIPE_BYTES
            try:
                fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, _GROWN_PIPE_BYTES)
            except OSError:
                self._read_bytes = 2 * _FIRST_READ_BYTES  # the slot's pipe quota is used up: as it is, then

    def _throttle(self, count: int) -> None:
        now = self._poller.loop.time()
        earned = (now - self._since) * _FLOOD_BYTES_PER_S if self._since else 0.0
        self._since = now
        self._allowed_bytes = min(self._allowed_bytes + earned, _FLOOD_BURST_BYTES) - count
        if self._allowed_bytes < 0:
            self._poller.remove(self._fd)
            self._poller.loop.call_later(-self._allowed_bytes / _FLOOD_BYTES_PER_S + 0.001, self._resume)

    def _resume(self) -> None:
        if self._fd >= 0:
            self.watch()


def _waiting_bytes(fd: int) -> int:
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"), sys.byteorder)


class Orphans:
    """The pipes that background processes of finished calls still hold: drained and dropped, so that
    these processes live on undisturbed. At most :data:`MAX_ORPHANS`; beyond, the oldest is closed."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._drained: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._drained)

    def add(self, fd: int) -> None:
        """Take over ``fd`` (non-blocking)."""
        if len(self._drained) >= MAX_ORPHANS:
            self._close(next(iter(self._drained)))
        self._drained[fd] = 0
        self._poller.add(fd, lambda: self._drain(fd))

    def close(self) -> None:
        """Close them all. Repeatable."""
        for fd in list(self._drained):
            self._close(fd)

    def _drain(self, fd: int) -> None:
        try:
            # splice throws the pages away without copying them
            count = os.splice(fd, self._poller.null, _GROWN_PIPE_BYTES, flags=_SPLICE_F_NONBLOCK)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self._close(fd)
            return
        self._drained[fd] += count
        if self._drained[fd] > _ORPHAN_BURST_BYTES:
            self._drained[fd] = 0
            self._poller.remove(fd)
            self._poller.loop.call_later(_ORPHAN_PAUSE_S, self._resume, fd)

    def _resume(self, fd: int) -> None:
        # The number may meanwhile be another orphan's, which is watched already: then nothing is to do.
        if fd in self._drained and not self._poller.watches(fd):
            self._poller.add(fd, lambda: self._drain(fd))

    def _close(self, fd: int) -> None:
        del self._drained[fd]
        self._poller.remove(fd)
        os.close(fd)
