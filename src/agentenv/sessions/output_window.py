"""Reads one output during its whole life; keeps what came since it was last taken, under a cap."""

from __future__ import annotations

import re
from collections.abc import Callable

from agentenv.sessions.head_tail import HeadTail, seam, whole_end
from agentenv.sessions.host import Host
from agentenv.sessions.reader import Reader
from agentenv.sessions.unread import Unread

_PREFIX = b"bash: "
MAX_MARKER_BYTES = 256
"""Longest line of a marker."""
_TTY_NOISE = re.compile(rb"bash: \[\d+: \d+ \(\d+\)\] tcsetattr: Inappropriate ioctl for device\n")
"""Messages of an interactive bash without a terminal when a signal ended a command."""


class OutputWindow(Reader):
    """A reader that keeps its output. ``on_bytes`` is called after each read.

    Line ends of a *terminal* are normalised, and an expected marker is removed from its stream (``marked`` is then
    called).
    """

    def __init__(
        self, host: Host, fd: int, cap_bytes: int, on_bytes: Callable[[], None], *, terminal: bool, unread: Unread
    ) -> None:
        self._cap_bytes = cap_bytes
        self._unread = unread
        self._shed_bytes = 0
        self._window = HeadTail(cap_bytes)
        self._held = b""
        self._marker: re.Pattern[bytes] | None = None
        self._mark = b""
        self._marked: Callable[[], None] | None = None
        self._arrived: Callable[[], None] | None = on_bytes
        super().__init__(host, fd, self._feed, terminal=terminal)

    @property
    def waiting_bytes(self) -> int:
        """Number of bytes that came and were not taken, kept or not."""
        return self._shed_bytes + self._window.total_bytes + len(self._held)

    def expect(self, nonce: str, marker: re.Pattern[bytes], marked: Callable[[], None]) -> None:
        """Remove ``marker`` (a line that contains ``nonce``) from the stream when it comes, then call back."""
        self._mark, self._marker, self._marked = nonce.encode(), marker, marked

    @property
    def expecting(self) -> bool:
        """Whether a marker is still expected."""
        return self._marker is not None and self._fd >= 0

    def expect_nothing(self) -> None:
        """The marker will not come."""
        self._marker = self._marked = None

    def take(self, *, last: bool = False) -> tuple[str, int]:
        """The output since the last call, decoded, and how many bytes of it were dropped (the text marks where). A
        partial character at the end is kept for the next time, unless this is the ``last``."""
        if self._held:
            self._window.feed(self._held)
            self._held = b""
        window, self._window = self._window, HeadTail(self._cap_bytes)
        head, tail = window.parts()
        end = tail or head
        cut = len(end) if last else whole_end(end)
        if self._terminal and not last and end[:cut].endswith(b"\r"):
            cut -= 1
        if rest := end[cut:]:
            self._window.feed(rest)
            head, tail = (head, tail[:cut]) if tail else (head[:cut], b"")
        shed_bytes, self._shed_bytes = self._shed_bytes, 0
        self._notify_held()
        return self._decoded(head, tail, window.total_bytes - len(rest) + shed_bytes)

    def forget(self) -> None:
        """Drop the output so far."""
        self._window = HeadTail(self._cap_bytes)
        self._held = b""
        self._shed_bytes = 0
        self._notify_held()

    def shed(self) -> None:
        """Holder: the slot exceeds its limit of unread output."""
        self._shed_bytes += self._window.total_bytes
        self._window = HeadTail(self._cap_bytes)
        self._notify_held()

    def close(self) -> None:
        """Reader; pending output is dropped, and there are no more callbacks."""
        super().close()
        self.forget()
        self.expect_nothing()
        self._arrived = None

    def _notify_held(self) -> None:
        self._unread.holds(self, self._window.held_bytes)

    def _decoded(self, head: bytes, tail: bytes, came_bytes: int) -> tuple[str, int]:
        if tail:
            head = head[: whole_end(head)]
            while tail and tail[0] & 0xC0 == 0x80:
                tail = tail[1:]
        dropped = came_bytes - len(head) - len(tail)
        if not dropped:
            return self._plain(head), 0
        # Data dropped for the slot's budget was older than all of it.
        first, last = (head, tail) if tail else (b"", head)
        return self._plain(first) + seam(dropped) + self._plain(last), dropped

    def _plain(self, kept: bytes) -> str:
        kept = kept.replace(b"\r\n", b"\n") if self._terminal else _TTY_NOISE.sub(b"", kept)
        return kept.decode("utf-8", "replace")

    def _feed(self, chunk: bytes) -> None:
        if self._marker is None:
            self._window.feed(chunk)
        else:
            self._feed_marked(self._marker, self._held + chunk)
        self._notify_held()
        if self._arrived is not None:
            self._arrived()

    def _feed_marked(self, marker: re.Pattern[bytes], stream: bytes) -> None:
        found = marker.search(stream) if self._mark in stream else None
        if found is None:
            keep = _beginning(stream, self._mark) if self._fd >= 0 else len(stream)
            self._window.feed(stream[:keep])
            self._held = stream[keep:]
            return
        self._held = b""
        self._window.feed(stream[: found.start()] + stream[found.end() :])
        marked, self._marker, self._marked = self._marked, None, None
        if marked is not None:
            marked()


def _beginning(stream: bytes, mark: bytes) -> int:
    """Where an incomplete marker may have begun: only in the last bytes, so that output that begins like a marker
    is held back no longer than one line."""
    begin = stream.find(b"/" + mark, max(0, len(stream) - MAX_MARKER_BYTES))
    if begin < 0:
        return len(stream) - _overlap(stream, _PREFIX + b"/" + mark)
    return begin - len(_PREFIX) if stream.endswith(_PREFIX, 0, begin) else begin


def _overlap(stream: bytes, marker: bytes) -> int:
    """Length of the end of ``stream`` that may be the beginning of ``marker``."""
    for count in range(min(len(stream), len(marker)), 0, -1):
        if stream.endswith(marker[:count]):
            return count
    return 0
