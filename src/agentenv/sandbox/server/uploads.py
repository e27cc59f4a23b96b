"""Attachments of the calls of one lease.

A large argument is received before its call, piece by piece, into a file in memory, which is then the standard
input of a program in the slot: the server never holds it as a Python object.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Mapping

from agentenv.errors import InvalidArgumentsError, SandboxUnavailableError, StaleLeaseError
from agentenv.wire.base import MAX_FILE_BYTES
from agentenv.wire.calls import Attachment

MAX_UPLOADS = 64
"""Limit of attachments per lease that wait or are in use; each takes a descriptor of the server."""
_ALL_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Upload:
    """One attachment: written piece by piece, then sealed and read. Owns its descriptor until :meth:`close`."""

    __slots__ = ("_buffer", "_writer", "closed", "fd", "size_bytes")

    def __init__(self, buffer: UploadBuffer) -> None:
        self._buffer = buffer
        self.fd = os.memfd_create("attachment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.size_bytes = 0
        self.closed = False
        self._writer = 0

    def __repr__(self) -> str:
        return f"Upload({self.size_bytes} bytes{', closed' if self.closed else ''})"

    def begin(self, at: int) -> int:
        """Start receiving at offset ``at``, at most its current size: what is beyond it is dropped. Returns a token for
        :meth:`feed`; earlier writers must not continue."""
        self._writer += 1
        if at < self.size_bytes:
            os.ftruncate(self.fd, at)
            self._buffer.release(self.size_bytes - at)
            self.size_bytes = at
        return self._writer

    def feed(self, piece: bytes, writer: int) -> None:
        """Append bytes. Raises InvalidArgumentsError, SandboxUnavailableError when there are too many,
        StaleLeaseError when the lease has ended, or another writer has begun."""
        if self.closed or writer != self._writer:
            raise StaleLeaseError("the lease has ended, or the call was abandoned")
        if self.size_bytes + len(piece) > MAX_FILE_BYTES:
            raise InvalidArgumentsError(f"at most {MAX_FILE_BYTES} bytes fit in one argument")
        self._buffer.hold(len(piece))
        at = self.size_bytes
        self.size_bytes += len(piece)
        rest = memoryview(piece)
        while rest:
            written = os.pwrite(self.fd, rest, at)
            at, rest = at + written, rest[written:]

    def seal(self) -> None:
        """The attachment is complete: nobody can change it from here on, whoever else gets its descriptor."""
        self._writer += 1
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _ALL_SEALS)

    def content(self, field: str, max_bytes: int) -> bytes:
        """All of it. Raises InvalidArgumentsError when it is larger than ``max_bytes``."""
        if self.size_bytes > max_bytes:
            raise InvalidArgumentsError(f"{field}: {self.size_bytes} bytes exceed the limit of {max_bytes} bytes")
        return os.pread(self.fd, self.size_bytes, 0)

    def close(self) -> None:
        """Release it. Repeatable."""
        if not self.closed:
            self.closed = True
            os.close(self.fd)
            self._buffer.release(self.size_bytes)
            self._buffer.open_count -= 1


class UploadBuffer:
    """The uploads of one lease. ``hold`` and ``release`` charge their bytes to the lease (see :class:`CallQueue`);
    ``hold`` raises SandboxUnavailableError when its budget is used up."""

    def __init__(self, hold: Callable[[int], None], release: Callable[[int], None]) -> None:
        self.hold = hold
        self.release = release
        self.open_count = 0
        self._waiting: dict[tuple[str, str], Upload] = {}

    def __repr__(self) -> str:
        return f"UploadBuffer({len(self._waiting)} waiting, {self.open_count} open)"

    def receive(self, call_id: str, field: str, at: int) -> Upload | None:
        """The attachment of which the first ``at`` bytes have arrived, or a new one when ``at`` is 0; None when
        fewer have. Raises SandboxUnavailableError when there are too many."""
        upload = self._waiting.get((call_id, field))
        if upload is None and at == 0:
            if self.open_count >= MAX_UPLOADS:
                raise SandboxUnavailableError(f"too many attachments wait in this slot: {MAX_UPLOADS}")
            upload = self._waiting[call_id, field] = Upload(self)
            self.open_count += 1
        return upload if upload is not None and at <= upload.size_bytes else None

    def size_of(self, call_id: str, field: str) -> int:
        """Number of bytes that have arrived."""
        upload = self._waiting.get((call_id, field))
        return 0 if upload is None else upload.size_bytes

    def take(self, call_id: str, wanted: tuple[Attachment, ...]) -> dict[str, Upload]:
        """The attachments of a call that begins; the caller closes them. Raises SandboxUnavailableError when one is
        missing or incomplete."""
        uploads = {part.field: self._waiting.get((call_id, part.field)) for part in wanted}
        for part in wanted:
            upload = uploads[part.field]
            if upload is None or upload.size_bytes != part.size_bytes:
                raise SandboxUnavailableError(f"the attachment {part.field!r} of the call did not arrive")
        for part in wanted:
            self._waiting.pop((call_id, part.field)).seal()
        return {field: upload for field, upload in uploads.items() if upload is not None}

    def drop(self, call_id: str) -> None:
        """Release the attachments waiting for this call, if any."""
        for key in [key for key in self._waiting if key[0] == call_id]:
            self._waiting.pop(key).close()

    def close(self) -> None:
        """The lease has ended: release everything. Repeatable."""
        while self._waiting:
            self._waiting.popitem()[1].close()


def close_all(uploads: Mapping[str, Upload]) -> None:
    """Release a call's uploads. Repeatable."""
    for upload in uploads.values():
        upload.close()
