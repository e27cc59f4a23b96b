"""Bodies in chunks (RFC 9112, 7.1): what they carry, found piece by piece. Pure, and bounded whatever is sent.

Lines are found by their position in one buffer that is cut at its front, so a line costs what is in it. A decoder
returns after a number of lines, because a body of chunks of one byte has 10,000 lines in what one read brings.
"""

from __future__ import annotations

import re
from typing import Final

from agentenv.errors import InvalidArgumentsError

MOST_LINES: Final = 128
"""That one :meth:`Chunks.take` reads: a fifth of a millisecond."""
_MAX_LINE_BYTES: Final = 4096
_MAX_TRAILER_BYTES: Final = 32 * 1024
_FREE_BYTES: Final = 16
_FREE_PER_BYTE: Final = 2
_MAX_EXCESS_BYTES: Final = 16 * 1024
"""As Go's net/http counts: a chunk may have 16 bytes that are not data and twice as many as it has data; what is beyond
that adds up over the body, less what other chunks do not use, and may be 16 KiB."""
_SIZE: Final = re.compile(rb"[ \t]*([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?")


class Chunks:
    """Decodes one body. Extensions of chunks and trailer fields are dropped."""

    def __init__(self) -> None:
        self.ended = False
        """The last line of the body has been taken; what follows it stays in the buffer."""
        self._left = 0
        """Of the present chunk's data."""
        self._after_data = self._in_trailer = False
        self._excess_bytes = self._trailer_bytes = 0

    def take(self, buffer: bytearray) -> tuple[bytes, bool]:
        """Cut from the front of ``buffer`` what can be decoded, at most MOST_LINES lines. Returns the data in it, and
        whether more can be decoded only when more is received. Raises InvalidArgumentsError when the body is malformed
        or too much of it is chunk framing."""
        found, at = [], 0
        try:
            for _ in range(MOST_LINES):
                if self._left:
                    data = buffer[at : at + self._left]
                    found.append(data)
                    at += len(data)
                    self._left -= len(data)
                    if self._left:
                        return b"".join(found), True
                end = buffer.find(b"\r\n", at, at + _MAX_LINE_BYTES)
                if end < 0:
                    if len(buffer) - at >= _MAX_LINE_BYTES:
                        raise _malformed(f"a line is longer than {_MAX_LINE_BYTES} bytes")
                    return b"".join(found), True
                self._line(bytes(buffer[at:end]))
                at = end + 2
                if self.ended:
                    break
            return b"".join(found), False
        finally:
            del buffer[:at]

    def _line(self, line: bytes) -> None:
        if self._in_trailer:
            self._trailer_bytes += len(line) + 2
            if self._trailer_bytes > _MAX_TRAILER_BYTES:
                raise _malformed(f"its trailer is longer than {_MAX_TRAILER_BYTES} bytes")
            self.ended = not line
        elif self._after_data:
            if line:
                raise _malformed("a chunk is longer than its size")
            self._after_data = False
        else:
            size = _SIZE.fullmatch(line)
            if size is None:
                raise _malformed("the size of a chunk is not a number")
            self._left = int(size[1], 16)
            self._after_data, self._in_trailer = self._left > 0, self._left == 0
            excess = len(line) + 4 - _FREE_BYTES - _FREE_PER_BYTE * self._left
            self._excess_bytes = max(0, self._excess_bytes + excess)
            if self._excess_bytes > _MAX_EXCESS_BYTES:
                raise _malformed("too much of it is chunk framing")


def _malformed(reason: str) -> InvalidArgumentsError:
    return InvalidArgumentsError(f"The chunked body is malformed: {reason}.")
