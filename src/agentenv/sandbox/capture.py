"""What a command printed: head and tail under a cap, however much it was and whoever holds the pipe."""

from __future__ import annotations

import fcntl
import os
from collections import OrderedDict

from agentenv.sandbox.poller import Poller

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


class HeadTail:
    """The first and the last bytes of a stream, ``cap_bytes`` together; what lies between is counted.

    Memory is bounded by ``cap_bytes`` however small or many the pieces are. Pure.
    """

    __slots__ = ("_at", "_cap", "_head", "_tail", "total_bytes")

    def __init__(self, cap_bytes: int) -> None:
        if cap_bytes < 2:
            raise ValueError("cap_bytes must be at least 2")
        self._cap = cap_bytes
        self._head: bytes | bytearray = b""
        self._tail: bytearray | None = None
        self._at = 0
        self.total_bytes = 0

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total_bytes += len(chunk)
        if self._tail is not None:
            self._keep_last(memoryview(chunk))
        elif self.total_bytes > self._cap:
            self._overflow(chunk)
        elif not self._head:
            self._head = chunk
        else:
            if isinstance(self._head, bytes):
                self._head = bytearray(self._head)
            self._head += chunk

    def parts(self) -> tuple[bytes, bytes]:
        """Head and tail as they are, before any cut at character boundaries."""
        if self._tail is None:
            return bytes(self._head), b""
        return bytes(self._head), bytes(self._tail[self._at :] + self._tail[: self._at])

    def text(self) -> tuple[str, int]:
        """Head and tail decoded (U+FFFD for what is not UTF-8), and how many bytes are missing between.

        The cut never splits a character: what would be left of one is dropped, and counted.
        """
        if self._tail is None:
            return str(self._head, "utf-8", "replace"), 0
        head, tail = self.parts()
        head = head[: _whole_end(head)]
        tail = tail[_whole_start(tail) :]
        dropped = self.total_bytes - len(head) - len(tail)
        return head.decode("utf-8", "replace") + tail.decode("utf-8", "replace"), dropped

    def _overflow(self, chunk: bytes) -> None:
        head_cap = self._cap // 2
        everything = memoryview(bytes(self._head) + chunk) if self._head else memoryview(chunk)
        self._head = bytes(everything[:head_cap])
        self._tail = bytearray(self._cap - head_cap)
        self._keep_last(everything[head_cap:])

    def _keep_last(self, chunk: memoryview) -> None:
        tail = self._tail
        assert tail is not None
        size = len(tail)
        chunk = chunk[-size:]
        first = min(len(chunk), size - self._at)
        tail[self._at : self._at + first] = chunk[:first]
        rest = len(chunk) - first
        tail[:rest] = chunk[first:]
        self._at = (self._at + len(chunk)) % size


def _whole_end(head: bytes) -> int:
    """Where to cut so that ``head`` does not end inside a character."""
    for back in range(1, min(4, len(head)) + 1):
        byte = head[-back]
        if byte & 0xC0 == 0x80:
            continue
        needs = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return len(head) - back if needs > back else len(head)
    return len(head)


def _whole_start(tail: bytes) -> int:
    """How many bytes of a cut character ``tail`` begins with."""
    start = 0
    while start < min(3, len(tail)) and tail[start] & 0xC0 == 0x80:
        start += 1
    return start


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
        budget = max(self._read_bytes, _FIRST_READ_BYTES)
        while budget > 0 and self._fd >= 0:
            count = self._read()
            if count is None:
                break
            budget -= count
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._poller.remove(fd)
            orphans.add(fd)

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


class Orphans:
    """The pipes that background processes of finished calls still hold: drained and dropped, so that
    these processes live on undisturbed. At most :data:`MAX_ORPHANS`; beyond, the oldest is closed."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._drained: OrderedDict[int, int] = OrderedDict()
        self._null = -1

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
        if self._null >= 0:
            os.close(self._null)
            self._null = -1

    def _drain(self, fd: int) -> None:
        if self._null < 0:
            self._null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            # splice throws the pages away without copying them
            count = os.splice(fd, self._null, _GROWN_PIPE_BYTES, flags=_SPLICE_F_NONBLOCK)
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
