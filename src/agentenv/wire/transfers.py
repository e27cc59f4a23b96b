"""Transfer of files and directories to and from a slot, as a stream that neither server nor client holds in memory.

``PUT /v1/slots/{slot}/transfer?path=P`` receives such a stream and answers with a :class:`TransferReply`; ``GET``
of the same path sends one. The lease's key travels in the header :data:`LEASE_HEADER`. A server passes the bytes on
as they are: only the client and ``slotfiles`` (inside the slot) understand them.

A stream is records, each a header, its path and its link target. First the root, with an empty path: a file (``f``)
or a directory (``d``) with everything below it, then the end (``e``). A file's content follows its record as ``u32
bytes, bytes`` until a zero, then its SHA-256: the receiver compares before the file gets its name. Modes of
directories come as ``m`` when all is in them. A sender that fails reports it with an ``x`` record, or, inside content,
with :data:`BROKEN_OFF` and a ``u32`` code; a stream that just ends was cut.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from agentenv.errors import ProtocolError
from agentenv.wire.base import WireModel

LEASE_HEADER = "X-Agentenv-Lease"
"""Holds a :class:`agentenv.wire.leases.LeaseKey` as JSON."""
MAX_ENTRIES = 1_000_000
"""Maximum number of files, directories and links in one transfer."""
CHUNK_BYTES = 65536
BROKEN_OFF = 0xFFFF_FFFF
CHUNKED = 0xFFFF_FFFF_FFFF_FFFF
"""Size in the record of a file whose content comes in chunks."""
HEADER = struct.Struct("<BBHIIIQq")
LENGTH = struct.Struct("<I")
DIGEST_BYTES = 32
MAX_NAME_BYTES = 8191
OUTSIDE, NOT_REGULAR, TOO_LARGE = 200, 202, 204
"""Exit codes of slotfiles besides errnos: a path outside the directory it is kept beneath, not a regular file, too
many entries."""
_KINDS = b"fdlmxe"


class TransferReply(WireModel):
    """The outcome of an upload. ``exit_code`` 0: everything is in place. Otherwise an errno, or 128 + n when signal
    n ended it; ``path`` is where it failed and ``stderr`` the reason. Files that arrived before are in place, no
    others were touched."""

    exit_code: int = 0
    stderr: str = ""
    path: str = ""
    entries: int = 0
    total_bytes: int = 0


@dataclass(frozen=True)
class Entry:
    """One record. ``kind``: f(ile), d(irectory), l(ink), m(ode of a directory), x (failed), e(nd)."""

    kind: str
    path: bytes = b""
    link: bytes = b""
    mode: int = 0
    size: int = 0
    modified_ns: int = 0

    def encode(self) -> bytes:
        """The record's bytes."""
        sizes = (len(self.path), len(self.link), 0)
        return HEADER.pack(ord(self.kind), 0, self.mode, *sizes, self.size, self.modified_ns) + self.path + self.link


def chunk(content: bytes) -> bytes:
    """A piece of content as sent, at most CHUNK_BYTES; an empty one ends the content."""
    return LENGTH.pack(len(content)) + content


class BrokenOffError(Exception):
    """The sender reported a failure. ``code`` is an errno, or one of slotfiles' own codes."""

    def __init__(self, code: int, path: bytes) -> None:
        super().__init__(code, path)
        self.code = code
        self.path = path


@dataclass(frozen=True)
class Sink:
    """Receives the parts of a stream, in order: ``entry``, and for a file ``content`` (any number of times), then
    ``verified`` with its SHA-256 in hex."""

    entry: Callable[[Entry], None]
    content: Callable[[bytes], None]
    verified: Callable[[str], None]


class Decoder:
    """Incremental parser of a stream; holds at most one record or chunk. Its input is untrusted."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held = bytearray()
        self._step = self._record
        self._digest = sha256()
        self._entries = 0
        self._path = b""
        self.complete = False
        """Whether the end record was read."""

    def feed(self, data: bytes) -> None:
        """Raises ProtocolError for malformed input or a wrong checksum; BrokenOffError when the sender reports a
        failure."""
        self._held += data
        while self._step():
            pass
        if self.complete and self._held:
            raise ProtocolError("a transfer continues after its end")

    def _record(self) -> bool:
        if self.complete or len(self._held) < HEADER.size:
            return False
        kind, _, mode, path_bytes, link_bytes, _, size, modified_ns = HEADER.unpack_from(self._held)
        if kind not in _KINDS or mode > 0o7777 or max(path_bytes, link_bytes) > MAX_NAME_BYTES:
            raise ProtocolError("a transfer has a malformed record")
        if len(self._held) < HEADER.size + path_bytes + link_bytes:
            return False
        del self._held[: HEADER.size]
        path, link = self._take(path_bytes), self._take(link_bytes)
        self._checked(Entry(chr(kind), path, link, mode, size, modified_ns))
        return True

    def _checked(self, entry: Entry) -> None:
        self._path = entry.path
        if entry.kind == "x":
            raise BrokenOffError(entry.size, entry.path)
        if entry.kind == "e":
            self.complete = True
            return
        if self._entries == 0:
            if entry.path or entry.kind not in "fd":
                raise ProtocolError("a transfer begins without its root")
        elif not _is_plain_name(entry.path):
            raise ProtocolError("a transfer has a path that leads elsewhere")
        self._entries += 1
        if self._entries > 2 * MAX_ENTRIES:  # a directory comes twice: when created, and to set its mode
            raise ProtocolError(f"a transfer has more than {MAX_ENTRIES} entries")
        self._sink.entry(entry)
        if entry.kind == "f":
            self._digest = sha256()
            self._step = self._content

    def _content(self) -> bool:
        if len(self._held) < LENGTH.size:
            return False
        (count,) = LENGTH.unpack_from(self._held)
        if count == BROKEN_OFF:
            if len(self._held) < 2 * LENGTH.size:
                return False
            raise BrokenOffError(LENGTH.unpack_from(self._held, LENGTH.size)[0], self._path)
        if count > CHUNK_BYTES:
            raise ProtocolError("a transfer has a malformed chunk")
        if len(self._held) < LENGTH.size + count:
            return False
        del self._held[: LENGTH.size]
        if not count:
            self._step = self._verify
            return True
        content = self._take(count)
        self._digest.update(content)
        self._sink.content(content)
        return True

    def _verify(self) -> bool:
        if len(self._held) < DIGEST_BYTES:
            return False
        if self._take(DIGEST_BYTES) != self._digest.digest():
            raise ProtocolError(f"{self._path!r} arrived with another SHA-256 than it was sent with")
        self._sink.verified(self._digest.hexdigest())
        self._step = self._record
        return True

    def _take(self, count: int) -> bytes:
        taken = bytes(self._held[:count])
        del self._held[:count]
        return taken


def _is_plain_name(path: bytes) -> bool:
    return b"\0" not in path and not any(part in (b"", b".", b"..") for part in path.split(b"/"))
