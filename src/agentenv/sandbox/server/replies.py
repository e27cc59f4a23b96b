"""The reply memory of one lease: what was asked, what was answered, what may be forgotten. Pure.

A call runs at most once: whoever asks again is told what the first asking led to, for as long as it is
remembered, and that it cannot be told any more after that; never does asking again run a call again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType

from agentenv.sandbox.server.inbox import Inbox

Raw = tuple[bytes | bytearray | memoryview, ...]
"""Content as it came, in pieces: nothing is copied to join them."""

MAX_ENDED_IDS = 16_384
"""Ids of forgotten calls kept per lease (as hashes): a copy of an old batch, late in some socket's
buffer, must not run."""


class Reply:
    """One call as the reply memory sees it. ``message`` is the finished answer, None while it runs;
    ``attachments`` are what it says is to be fetched."""

    __slots__ = ("attachments", "call_id", "delivered", "memory", "message", "size_bytes")

    def __init__(self, call_id: str, memory: ReplyMemory) -> None:
        self.call_id = call_id
        self.memory = memory
        self.message: bytes | None = None
        self.attachments: Mapping[str, Raw] = {}
        self.size_bytes = 0
        self.delivered = False

    def __repr__(self) -> str:
        state = "running" if self.message is None else "delivered" if self.delivered else "finished"
        return f"Reply({self.call_id!r}, {state})"


class ReplyMemory:
    """Replies of one lease, at most ``max_count`` and ``max_sent_bytes`` of finished ones that were sent
    (which should be more than a connection can hold on its way: that may have to be sent again), and the
    newest of them whatever its size.

    Finished replies that were not sent yet are never dropped, nor are those with attachments before they are
    forgotten; ``full`` says that there are ``max_unsent_bytes`` or ``max_count`` of them, and that no further
    call should begin. ``index`` is shared by all leases of the server: it finds a reply by its id alone.
    ``inbox`` holds what the calls brought along.
    """

    def __init__(
        self,
        index: dict[str, Reply],
        *,
        max_count: int,
        max_unsent_bytes: int,
        max_sent_bytes: int,
        inbox: Inbox | None = None,
    ) -> None:
        self.inbox = inbox or Inbox()
        self._index = index
        self._max_count = max_count
        self._max_unsent_bytes = max_unsent_bytes
        self._max_sent_bytes = max_sent_bytes
        self._running: dict[str, Reply] = {}
        self._unsent: dict[str, Reply] = {}
        self._sent: OrderedDict[str, Reply] = OrderedDict()
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._unsent_bytes = 0
        self._sent_bytes = 0

    def __repr__(self) -> str:
        return f"ReplyMemory(running={len(self._running)}, unsent={len(self._unsent)}, sent={len(self._sent)})"

    @property
    def full(self) -> bool:
        """Whether nothing more should be begun until replies are sent."""
        return self._unsent_bytes >= self._max_unsent_bytes or len(self._unsent) >= self._max_count

    @property
    def running(self) -> tuple[Reply, ...]:
        """Calls begun and not finished, oldest first."""
        return tuple(self._running.values())

    def has_ended(self, call_id: str) -> bool:
        """Whether that call was known here once and its reply is gone."""
        return hash(call_id) in self._ended

    def begin(self, reply: Reply) -> None:
        """Remember a new call. Raises ValueError when its id is known: look it up first."""
        if reply.call_id in self._index or self.has_ended(reply.call_id):
            raise ValueError(f"call {reply.call_id!r} is known already")
        self._index[reply.call_id] = reply
        self._running[reply.call_id] = reply

    def finish(self, reply: Reply, message: bytes, attachments: Mapping[str, Raw] = MappingProxyType({})) -> None:
        """The call ended with this answer. Raises KeyError when it was not running here."""
        del self._running[reply.call_id]
        reply.message = message
        reply.attachments = attachments
        reply.size_bytes = len(message) + sum(size_of(raw) for raw in attachments.values())
        self._unsent[reply.call_id] = reply
        self._unsent_bytes += reply.size_bytes

    def sent(self, reply: Reply) -> None:
        """The answer was handed to a connection; it may be dropped now when room is needed, unless something
        of it is still to be fetched."""
        reply.delivered = reply.message is not None
        if reply.attachments or self._unsent.pop(reply.call_id, None) is None:
            return
        self._unsent_bytes -= reply.size_bytes
        self._sent[reply.call_id] = reply
        self._sent_bytes += reply.size_bytes
        while len(self._sent) > max(1, self._max_count) or (
            self._sent_bytes > self._max_sent_bytes and len(self._sent) > 1
        ):
            self.forget(next(iter(self._sent.values())))

    def forget(self, reply: Reply) -> None:
        """Drop a finished answer. Nothing happens to a call that still runs."""
        if reply.message is None:
            return
        if self._sent.pop(reply.call_id, None) is not None:
            self._sent_bytes -= reply.size_bytes
        elif self._unsent.pop(reply.call_id, None) is not None:
            self._unsent_bytes -= reply.size_bytes
        else:
            return
        reply.attachments = {}
        del self._index[reply.call_id]
        self._ended[hash(reply.call_id)] = None
        if len(self._ended) > MAX_ENDED_IDS:
            self._ended.popitem(last=False)

    def clear(self) -> None:
        """The lease has ended: drop everything, running calls included."""
        for replies in (self._running, self._unsent, self._sent):
            for call_id, reply in replies.items():
                reply.attachments = {}
                del self._index[call_id]
            replies.clear()
        self._ended.clear()
        self.inbox.close()
        self._unsent_bytes = self._sent_bytes = 0


def size_of(raw: Raw) -> int:
    """Of all its pieces, in bytes."""
    return sum(len(piece) for piece in raw)
