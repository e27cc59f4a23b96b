"""The frames that carry the connections of a slot's port (:mod:`agentenv.wire.connections`): bytes in, frames out, and
the other way round."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from agentenv.errors import ServingEndedError
from agentenv.wire.connections import MAX_DATA_BYTES, WINDOW_BYTES, FrameKind

_HEAD: Final = struct.Struct("<II")
_KIND_SHIFT: Final = 24
_MOST_BYTES: Final = {FrameKind.DATA: MAX_DATA_BYTES, FrameKind.ROOM: WINDOW_BYTES}


@dataclass(frozen=True, slots=True)
class Frame:
    """``count``: the length of ``data``, or how much room there is."""

    connection: int
    kind: FrameKind
    count: int = 0
    data: bytes = b""


def packed(connection: int, kind: FrameKind, data: bytes | bytearray = b"", *, room: int = 0) -> bytes:
    """A frame as it is sent."""
    return packed_head(connection, kind, room or len(data)) + data


def packed_head(connection: int, kind: FrameKind, count: int) -> bytes:
    """A frame without its data."""
    return _HEAD.pack(connection, kind << _KIND_SHIFT | count)


class FrameReader:
    """Cuts what a slot sends into frames. Holds less than one frame."""

    def __init__(self) -> None:
        self._rest = b""

    def read(self, piece: bytes) -> Iterator[Frame]:
        """The frames that are complete with this piece. Raises ServingEndedError at the first that is not valid."""
        pieces = self._rest + piece if self._rest else piece
        view, at = memoryview(pieces), 0
        try:
            while len(view) - at >= _HEAD.size:
                connection, head = _HEAD.unpack_from(view, at)
                kind, count = _checked(head)
                end = at + _HEAD.size + (count if kind is FrameKind.DATA else 0)
                if end > len(view):
                    break
                data = bytes(view[at + _HEAD.size : end])
                at = end
                yield Frame(connection, kind, count, data)
        finally:
            self._rest = bytes(view[at:])


def broken(why: str) -> ServingEndedError:
    """The error for a slot that breaks the protocol: nobody but a process of the slot can do that."""
    return ServingEndedError(f"what listened in the slot broke its protocol: {why}")


def _checked(head: int) -> tuple[FrameKind, int]:
    number, count = head >> _KIND_SHIFT, head & ((1 << _KIND_SHIFT) - 1)
    try:
        kind = FrameKind(number)
    except ValueError:
        raise broken(f"there are no frames of kind {number}") from None
    most = _MOST_BYTES.get(kind, 0)
    if not min(1, most) <= count <= most:
        raise broken(f"a frame {kind.name} of {count} bytes")
    return kind, count
