"""Codec of slotfiles' records. Pure. Input from a slot is untrusted: bounded and checked."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

from agentenv.errors import ProtocolError
from agentenv.wire.transfers import CHUNK_BYTES

_HEADER = struct.Struct("<BBHIIIQq")
_CHUNK = struct.Struct("<I")
_MAX_NAME_BYTES = 8192
_KINDS = b"fndlohpwxe"


@dataclass(frozen=True)
class FileRecord:
    """One entry. ``kind`` is f(ile), n(ew file), d(irectory), l(ink), o(ther), h(it of a search),
    p(art of a patch), w(hy a patch is refused), x (failed here) or e(nd)."""

    kind: str
    path: bytes = b""
    link: bytes = b""
    mode: int = 0
    size_bytes: int = 0
    modified_ns: int = 0
    truncated: bool = False
    content: bytes = b""
    pieces: tuple[memoryview, ...] = ()
    """The content of a record that was read; not joined, because it may be large."""

    @property
    def content_bytes(self) -> int:
        """Size of its content."""
        return len(self.content) + sum(len(piece) for piece in self.pieces)


class RecordReader:
    """Parses the records in a slot's output. Each method raises ProtocolError for invalid data."""

    def __init__(self, printed: bytes | memoryview) -> None:
        self._rest = memoryview(printed)

    def record(self) -> FileRecord:
        """The next record, without content."""
        kind, truncated, mode, path_bytes, link_bytes, _, size, modified_ns = _HEADER.unpack(self._take(_HEADER.size))
        if kind not in _KINDS or max(path_bytes, link_bytes) > _MAX_NAME_BYTES or mode > 0o7777 or size >= 2**63:
            raise ProtocolError("slotfiles printed a malformed record")
        path, link = self._take(path_bytes), self._take(link_bytes)
        return FileRecord(chr(kind), path, link, mode, size, modified_ns, bool(truncated))

    def numbers(self, count: int) -> tuple[int, ...]:
        """This many u64."""
        return struct.unpack(f"<{count}Q", self._take(8 * count))

    def view(self) -> memoryview:
        """Everything left, without a copy."""
        taken, self._rest = self._rest, self._rest[:0]
        return taken

    def entries(self, *, with_content: bool) -> Iterator[FileRecord]:
        """Records up to the end record; the last one yielded is the end record, and nothing follows it."""
        while True:
            record = self.record()
            if record.kind == "e":
                if self._rest:
                    raise ProtocolError("slotfiles printed something after its end record")
                yield record
                return
            if not _is_plain_name(record.path):
                raise ProtocolError("slotfiles printed an invalid path")
            yield replace(record, pieces=self._content()) if with_content and record.kind == "f" else record

    def _content(self) -> tuple[memoryview, ...]:
        parts: list[memoryview] = []
        while True:
            (count,) = _CHUNK.unpack(self._take(_CHUNK.size))
            if count > CHUNK_BYTES:
                raise ProtocolError("slotfiles printed a malformed chunk")
            if not count:
                return tuple(parts)
            parts.append(self._taken(count))

    def _take(self, count: int) -> bytes:
        return bytes(self._taken(count))

    def _taken(self, count: int) -> memoryview:
        if count > len(self._rest):
            raise ProtocolError("slotfiles printed less than it announced")
        taken = self._rest[:count]
        self._rest = self._rest[count:]
        return taken


def _is_plain_name(path: bytes) -> bool:
    """Relative, and without empty, ``.`` or ``..`` parts: names in a directory tree."""
    return b"\0" not in path and not any(part in (b"", b".", b"..") for part in path.split(b"/"))


def encode(record: FileRecord) -> bytes:
    """The record for slotfiles' stdin, followed by its content."""
    header = _HEADER.pack(
        ord(record.kind),
        record.truncated,
        record.mode,
        len(record.path),
        len(record.link),
        0,
        len(record.content),
        record.modified_ns,
    )
    return b"".join((header, record.path, record.link, record.content))
