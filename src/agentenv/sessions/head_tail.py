"""The first and the last bytes of a stream under a cap. Pure."""

from __future__ import annotations

from agentenv.sessions.unread import Unread


def seam(dropped_bytes: int) -> str:
    """The line that marks the place in a text where ``dropped_bytes`` are missing."""
    return f"\n[... {dropped_bytes} bytes dropped ...]\n"


class HeadTail:
    """The first and the last bytes of a stream, ``cap_bytes`` together; the bytes between are counted.

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

    @property
    def held_bytes(self) -> int:
        """Memory in use."""
        return self.total_bytes if self._tail is None else self._cap

    def feed(self, chunk: bytes) -> None:
        """Add the next bytes of the stream."""
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

    @property
    def kept_bytes(self) -> int:
        """Number of bytes kept."""
        return min(self.total_bytes, self._cap)

    def parts(self) -> tuple[bytes, bytes]:
        """Head and tail unchanged, before any cut at character boundaries."""
        if self._tail is None:
            return bytes(self._head), b""
        return bytes(self._head), bytes(self._tail[self._at :] + self._tail[: self._at])

    def pieces(self) -> tuple[tuple[memoryview, ...], int]:
        """The bytes that :meth:`text` decodes, without a copy of the head, and how many bytes are missing. Nothing
        may be fed afterwards."""
        if self._tail is None:
            return (memoryview(self._head),), 0
        tail = memoryview(self.parts()[1])
        head = memoryview(self._head)[: whole_end(bytes(self._head[-4:])) + max(0, len(self._head) - 4)]
        tail = tail[whole_start(bytes(tail[:4])) :]
        return (head, tail), self.total_bytes - len(head) - len(tail)

    def text(self) -> tuple[str, int]:
        """Head and tail decoded (invalid UTF-8 becomes U+FFFD), and how many bytes are missing between.

        Missing bytes are marked in the text (:func:`seam`); otherwise head and tail would join into a line that was
        never printed. The cut never splits a character: its remaining bytes are dropped and counted too.
        """
        if self._tail is None:
            return str(self._head, "utf-8", "replace"), 0
        head, tail = self.parts()
        head = head[: whole_end(head)]
        tail = tail[whole_start(tail) :]
        dropped = self.total_bytes - len(head) - len(tail)
        return head.decode("utf-8", "replace") + seam(dropped) + tail.decode("utf-8", "replace"), dropped

    def read(self, begin: int, limit: int) -> tuple[int, bytes]:
        """At most ``limit`` of the kept bytes from offset ``begin`` of the stream, and the offset of the first of them:
        larger than ``begin`` where bytes were dropped."""
        if begin >= self.total_bytes:
            return self.total_bytes, b""
        if self._tail is None or begin < len(self._head):
            return begin, bytes(self._head[begin : begin + limit])
        oldest = self.total_bytes - len(self._tail)
        begin = max(begin, oldest)
        return begin, self.parts()[1][begin - oldest :][:limit]

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


def whole_end(head: bytes) -> int:
    """Where to cut so that ``head`` does not end inside a character."""
    for back in range(1, min(4, len(head)) + 1):
        byte = head[-back]
        if byte & 0xC0 == 0x80:
            continue
        needs = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return len(head) - back if needs > back else len(head)
    return len(head)


def whole_start(tail: bytes) -> int:
    """Number of bytes of a split character at the beginning of ``tail``."""
    start = 0
    while start < min(3, len(tail)) and tail[start] & 0xC0 == 0x80:
        start += 1
    return start


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

    def read_bytes(self, offset: int, limit: int) -> tuple[bytes, int]:
        """At most ``limit`` bytes from ``offset`` on, and where they begin: later if those bytes were dropped."""
        del self._kept[: max(0, len(self._kept) - self._cap_bytes)]
        self._unread.holds(self, len(self._kept))
        begin = min(max(offset, self.dropped_bytes), self.total_bytes)
        at = begin - self.dropped_bytes
        return bytes(self._kept[at : at + limit]), begin

    def read(self, offset: int, limit: int) -> tuple[str, int, int]:
        """Text from byte ``offset`` on, at most ``limit`` bytes: returns the text, its actual beginning (later if
        those bytes were dropped), and where the next read should begin. No character is split."""
        data, begin = self.read_bytes(offset, limit)
        if begin > offset:  # cut somewhere: not inside a character
            skipped = whole_start(data)
            begin, data = begin + skipped, data[skipped:]
        end = whole_end(data)
        data = data[: end or len(data)]
        return data.decode("utf-8", "replace"), begin, begin + len(data)
