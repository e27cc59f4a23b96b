"""The reply memory of one lease: calls, answers, and what may be forgotten. Pure.

A call runs at most once: resubmitting it returns the original answer while that is remembered, and an error after
that, but never runs the call again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType

from agentenv.sandbox.server.inbox import Inbox

Raw = tuple[bytes | bytearray | memoryview, ...]
"""Content in pieces as it came: nothing is copied to join them."""

MAX_ENDED_IDS = 16_384
"""Ids of forgotten calls kept per lease (as hashes), so that a late copy of an old batch does not run."""


class RememberedReply:
    """One call in the reply memory. ``message`` is the finished answer, None while it runs; ``attachments`` are
    those it lists."""

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
    """Replies of one lease. Keeps at most ``max_count`` and ``max_sent_bytes`` of finished replies that were sent,
    and always the newest. The limit should exceed what a connection can buffer, because that may have to be sent
    again.

    Unsent replies are never dropped, nor are those with attachments until the client forgets them; ``full`` means
    that there are ``max_unsent_bytes`` or ``max_count`` of them, and that no further call should begin. ``index``
    is shared by all leases of the server: it finds a reply by its id alone. ``inbox`` holds the calls' attachments.
    """

    def __init__(
        self,
        index: dict[str, RememberedReply],
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
        self._running: dict[str, RememberedReply] = {}
        """Calls that began and have not finished."""
        self._unsent: dict[str, RememberedReply] = {}
        self._sent: OrderedDict[str, RememberedReply] = OrderedDict()
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._unsent_bytes = 0
        self._sent_bytes = 0

    def __repr__(self) -> str:
        return f"ReplyMemory(running={len(self._running)}, unsent={len(self._unsent)}, sent={len(self._sent)})"

    @property
    def full(self) -> bool:
        """Whether no further call should begin until replies are sent."""
        return self._unsent_bytes >= self._max_unsent_bytes or len(self._unsent) >= self._max_count

    def has_ended(self, call_id: str) -> bool:
        """Whether that call was known here and its reply is gone."""
        return hash(call_id) in self._ended

    def begin(self, reply: RememberedReply) -> None:
        """Remember a new call. Raises ValueError when its id is already known: look it up first."""
        if reply.call_id in self._index or self.has_ended(reply.call_id):
            raise ValueError(f"call {reply.call_id!r} is known already")
        self._index[reply.call_id] = reply
        self._running[reply.call_id] = reply

    def finish(
        self, reply: RememberedReply, message: bytes, attachments: Mapping[str, Raw] = MappingProxyType({})
    ) -> None:
        """The call ended with this answer. Raises KeyError when it was not running here."""
        del self._running[reply.call_id]
        reply.message = message
        reply.attachments = attachments
        reply.size_bytes = len(message) + sum(size_of(raw) for raw in attachments.values())
        self._unsent[reply.call_id] = reply
        self._unsent_bytes += reply.size_bytes

    def sent(self, reply: RememberedReply) -> None:
        """The answer was handed to a connection; it may be dropped when room is needed, unless some of its
        attachments are still to be fetched."""
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

    def forget(self, reply: RememberedReply) -> None:
        """Drop a finished answer. No effect on a call that is still running."""
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
    """Total size of the pieces, in bytes."""
    return sum(len(piece) for piece in raw)
