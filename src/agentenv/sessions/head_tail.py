"""The first and the last bytes of a stream under a cap. Pure."""

from __future__ import annotations

import codecs
from typing import NamedTuple

from agentenv.sessions.unread import Unread

ROLLING_BYTES = 200_000
_LONGEST_CHARACTER = 4


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
        """Head and tail as :func:`joined` joins them."""
        if self._tail is None:
            return str(self._head, "utf-8", "replace"), 0
        head, tail = self.parts()
        return joined(head, tail, self.total_bytes - len(head) - len(tail))

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


def joined(head: bytes, tail: bytes, dropped_bytes: int) -> tuple[str, int]:
    """Head and tail decoded (invalid UTF-8 becomes U+FFFD), and how many bytes are missing between.

    Missing bytes are marked in the text (:func:`seam`); otherwise head and tail would join into a line that was never
    printed. The cut never splits a character: its remaining bytes are dropped and counted too.
    """
    if not dropped_bytes:
        return (head + tail).decode("utf-8", "replace"), 0
    end, start = whole_end(head), whole_start(tail)
    dropped_bytes += len(head) - end + start
    before, after = (part.decode("utf-8", "replace") for part in (head[:end], tail[start:]))
    return before + seam(dropped_bytes) + after, dropped_bytes


def whole_end(head: bytes) -> int:
    """Where to cut so that ``head`` does not end with the beginning of a character. Bytes that begin none are not cut
    off."""
    last = head[-_LONGEST_CHARACTER:]
    return len(head) - len(last) + codecs.utf_8_decode(last, "replace", False)[1]


def whole_start(tail: bytes) -> int:
    """Number of bytes of a split character at the beginning of ``tail``."""
    start = 0
    while start < min(3, len(tail)) and tail[start] & 0xC0 == 0x80:
        start += 1
    return start


class Piece(NamedTuple):
    """A piece of a stream's text: its place in the stream, and whether there is more to read now."""

    text: str
    begin: int
    end: int
    more: bool


class Rolling:
    """The last ``cap_bytes`` of a stream; earlier bytes are counted. Offsets of bytes never change."""

    def __init__(self, cap_bytes: int = ROLLING_BYTES, *, terminal: bool = False, unread: Unread | None = None) -> None:
        self._unread = Unread() if unread is None else unread
        self._shed_bytes = 0
        self._cap_bytes = cap_bytes
        self._terminal = terminal
        self._kept = bytearray()
        self._carry = b""
        self._ended = False
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
        self._add(chunk)

    def end(self) -> None:
        """Nothing more will be fed: what was held back as the beginning of something longer can be read. Repeatable."""
        carry, self._carry, self._ended = self._carry, b"", True
        self._add(carry)

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

    def read(self, offset: int, limit: int) -> Piece:
        """Text from byte ``offset`` on, at most ``limit`` bytes, or one character that has more. It begins later if
        those bytes were dropped, and up to 3 bytes earlier if ``offset`` is inside a character. No character is split:
        until :meth:`end`, the beginning of one at the end of the stream is left to the next read."""
        most = limit + 2 * _LONGEST_CHARACTER
        data, begin = self.read_bytes(self._start_of_character(offset), most)
        if begin > offset:
            skipped = whole_start(data)
            begin, data = begin + skipped, data[skipped:]
        last = self._ended and begin + len(data) == self.total_bytes
        readable = data if last else data[: whole_end(data)]
        taken = _whole(readable, limit)
        return Piece(taken.decode("utf-8", "replace"), begin, begin + len(taken), len(taken) < len(readable))

    def _start_of_character(self, offset: int) -> int:
        """Where the character begins that the byte at ``offset`` belongs to; ``offset`` where that is not kept."""
        data, begin = self.read_bytes(max(0, offset - _LONGEST_CHARACTER + 1), 2 * _LONGEST_CHARACTER)
        for at in range(min(len(data), max(0, offset - begin))):
            end = at + _length_of_character(data[at])
            if begin + end > offset and _begins_character(data[at:end]):
                return begin + at
        return offset

    def _add(self, chunk: bytes) -> None:
        self.total_bytes += len(chunk)
        self._kept += chunk
        if len(self._kept) > 2 * self._cap_bytes:
            del self._kept[: len(self._kept) - self._cap_bytes]
        self._unread.holds(self, len(self._kept))


def _whole(data: bytes, limit: int) -> bytes:
    """The whole characters that fit in ``limit`` bytes, or the first one alone."""
    for most in range(limit, len(data)):
        if end := whole_end(data[:most]):
            return data[:end]
    return data


def _length_of_character(first: int) -> int:
    """Length in bytes of the character that begins with this byte; 1 for what begins none."""
    return 4 if first >= 0xF0 else 3 if first >= 0xE0 else 2 if first >= 0xC0 else 1


def _begins_character(data: bytes) -> bool:
    """Whether ``data`` is a character, or the beginning of one."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return not whole_end(data)
    return True
