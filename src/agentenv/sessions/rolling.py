"""The last bytes of an endless output. Pure."""

from __future__ import annotations

from agentenv.sessions.head_tail import whole_end, whole_start
from agentenv.sessions.unread import Unread

ROLLING_BYTES = 200_000


class Rolling:
    """The last ``cap_bytes`` of a stream; earlier bytes are counted. Offsets of bytes never change."""

    def __init__(self, cap_bytes: int = ROLLING_BYTES, *, terminal: bool = False, unread: Unread | None = None) -> None:
        self._unread = Unread() if unread is None else unread
        self._shed_bytes = 0
        self._cap_bytes = cap_bytes
        self._terminal = terminal
        self._kept = bytearray()
        self._carry = b""
        self.total_bytes = 0

    @property
    def dropped_bytes(self) -> int:
        """Number of bytes dropped at the beginning."""
        return max(self._shed_bytes, self.total_bytes - self._cap_bytes)

    def feed(self, chunk: bytes) -> None:
        """Add the next bytes; line ends of a terminal are normalised."""
        if self._terminal:
            chunk = self._carry + chunk
            self._carry = b"\r" if chunk.endswith(b"\r") else b""
            chunk = chunk[: len(chunk) - len(self._carry)].replace(b"\r\n", b"\n")
        self.total_bytes += len(chunk)
        self._kept += chunk
        if len(self._kept) > 2 * self._cap_bytes:
            del self._kept[: len(self._kept) - self._cap_bytes]
        self._unread.holds(self, len(self._kept))

    def shed(self) -> None:
        """Holder: the slot exceeds its limit of unread output."""
        self._shed_bytes = self.total_bytes
        self._kept = bytearray()
        self._unread.holds(self, 0)

    def read(self, offset: int, limit: int) -> tuple[str, int, int]:
        """Text from byte ``offset`` on, at most ``limit`` bytes: returns the text, its actual beginning (later if
        those bytes were dropped), and where the next read should begin. No character is split."""
        del self._kept[: max(0, len(self._kept) - self._cap_bytes)]
        self._unread.holds(self, len(self._kept))
        begin = min(max(offset, self.dropped_bytes), self.total_bytes)
        at = begin - self.dropped_bytes
        data = bytes(self._kept[at : at + limit])
        if begin > offset:  # cut somewhere: not inside a character
            skipped = whole_start(data)
            begin, data = begin + skipped, data[skipped:]
        end = whole_end(data)
        data = data[: end or len(data)]
        return data.decode("utf-8", "replace"), begin, begin + len(data)
