"""Attachments of the calls of one lease, and a memory budget for waiting calls.

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

MAX_WAITING_BYTES = 128 * 1024 * 1024
"""Memory limit for waiting and running calls of one lease: JSON and attachments."""
MAX_ATTACHED = 64
"""Limit of attachments per lease that wait or are in use; each takes a descriptor of the server."""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Attached:
    """One attachment: written piece by piece, then sealed and read. Owns its descriptor until :meth:`close`."""

    __slots__ = ("_give", "_on_close", "_take", "_turn", "closed", "fd", "size_bytes")

    def __init__(self, take: Callable[[int], None], give: Callable[[int], None], on_close: Callable[[], None]) -> None:
        self._take = take
        self._give = give
        self._on_close = on_close
        self.fd = os.memfd_create("attachment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.size_bytes = 0
        self.closed = False
        self._turn = 0

    def __repr__(self) -> str:
        return f"Attached({self.size_bytes} bytes{', closed' if self.closed else ''})"

    def begin(self, at: int) -> int:
        """Start receiving at offset ``at``, which must be the current size. Returns a token for :meth:`feed`;
        earlier writers must not continue."""
        self._turn += 1
        if at < self.size_bytes:
            os.ftruncate(self.fd, at)
            self._give(self.size_bytes - at)
            self.size_bytes = at
        return self._turn

    def feed(self, piece: bytes, turn: int) -> None:
        """Append bytes. Raises InvalidArgumentsError, SandboxUnavailableError when there are too many,
        StaleLeaseError when the lease has ended meanwhile, or another writer has begun."""
        if self.closed or turn != self._turn:
            raise _gone()
        if self.size_bytes + len(piece) > MAX_FILE_BYTES:
            raise InvalidArgumentsError(f"at most {MAX_FILE_BYTES} bytes fit in one argument")
        self._take(len(piece))
        at = self.size_bytes
        self.size_bytes += len(piece)
        rest = memoryview(piece)
        while rest:
            written = os.pwrite(self.fd, rest, at)
            at, rest = at + written, rest[written:]

    def seal(self) -> None:
        """The attachment is complete: nobody can change it from here on, whoever else gets its descriptor."""
        self._turn += 1
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)

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
            self._give(self.size_bytes)
            self._on_close()


class Inbox:
    """The attachments of one lease, and the bytes its calls hold. ``counted`` is notified of every change."""

    def __init__(self, counted: Callable[[int], None] = lambda _: None, *, max_bytes: int = MAX_WAITING_BYTES) -> None:
        self._counted = counted
        self._max_bytes = max_bytes
        self._waiting: dict[tuple[str, str], Attached] = {}
        self._open = 0
        self.held_bytes = 0

    def __repr__(self) -> str:
        return f"Inbox({len(self._waiting)} waiting, {self.held_bytes} bytes held)"

    def hold(self, size_bytes: int) -> None:
        """Charge an amount to the lease. Raises SandboxUnavailableError when its budget is used up."""
        if self.held_bytes + size_bytes > self._max_bytes:
            raise SandboxUnavailableError(
                f"the calls that wait in this slot hold {self.held_bytes} bytes; at most {self._max_bytes} may wait",
                next_step="make fewer large calls at once",
            )
        self.held_bytes += size_bytes
        self._counted(size_bytes)

    def let_go(self, size_bytes: int) -> None:
        """Return an amount charged by :meth:`hold`."""
        self.held_bytes -= size_bytes
        self._counted(-size_bytes)

    def receive(self, call_id: str, field: str, at: int) -> Attached | None:
        """The attachment of which the first ``at`` bytes have arrived, or a new one when ``at`` is 0; None when
        fewer have. Raises SandboxUnavailableError when there are too many."""
        attached = self._waiting.get((call_id, field))
        if attached is None and at == 0:
            if self._open >= MAX_ATTACHED:
                raise SandboxUnavailableError(f"{MAX_ATTACHED} attachments wait in this slot already")
            attached = self._waiting[call_id, field] = Attached(self.hold, self.let_go, self._closed)
            self._open += 1
        return attached if attached is not None and at <= attached.size_bytes else None

    def size_of(self, call_id: str, field: str) -> int:
        """Number of bytes that have arrived."""
        attached = self._waiting.get((call_id, field))
        return 0 if attached is None else attached.size_bytes

    def take(self, call_id: str, wanted: tuple[Attachment, ...]) -> dict[str, Attached]:
        """The attachments of a call that begins; the caller closes them. Raises SandboxUnavailableError when one is
        missing or incomplete."""
        found = {part.field: self._waiting.get((call_id, part.field)) for part in wanted}
        for part in wanted:
            attached = found[part.field]
            if attached is None or attached.size_bytes != part.size_bytes:
                raise SandboxUnavailableError(f"the attachment {part.field!r} of the call did not arrive")
        for part in wanted:
            self._waiting.pop((call_id, part.field)).seal()
        return {field: attached for field, attached in found.items() if attached is not None}

    def drop(self, call_id: str) -> None:
        """Release the attachments waiting for this call, if any."""
        for key in [key for key in self._waiting if key[0] == call_id]:
            self._waiting.pop(key).close()

    def close(self) -> None:
        """The lease has ended: release everything. Repeatable."""
        while self._waiting:
            self._waiting.popitem()[1].close()

    def _closed(self) -> None:
        self._open -= 1


def _gone() -> StaleLeaseError:
    return StaleLeaseError("the lease has ended, or the call was given up")


def close_all(attached: Mapping[str, Attached]) -> None:
    """Release a call's attachments. Repeatable."""
    for each in attached.values():
        each.close()
