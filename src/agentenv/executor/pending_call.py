"""A call in flight, and its serialisation: once per call, however often it is sent.

The output is exactly :class:`agentenv.wire.calls.Batch`, ``Cancel`` and ``Forget``; the models themselves are not
built, because the container validates what it reads and the caller has already validated the arguments.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import to_json

from agentenv.containers.attachments import Part
from agentenv.wire.calls import Attachment, CallResult

ENVELOPE_BYTES = 64
"""Upper bound of a batch's JSON without its calls."""
BOOT_BYTES = 256
"""Upper bound of ``,"boot":"…"}`` and a comma."""


def encode_key(call_id: str, lease: bytes) -> bytes:
    """``CallKey``; ``lease`` is a LeaseKey as JSON."""
    return b'{"id":%b,"lease":%b}' % (to_json(call_id), lease)


def encode_call(key: bytes, tool: str, arguments: Mapping[str, Any], timeout_s: float) -> bytes:
    """A call without its ``boot`` and attachments, which are known when it is first sent. ``key`` is its CallKey."""
    rest = to_json({"tool": tool, "timeout_s": timeout_s, "arguments": arguments}, inf_nan_mode="constants")
    return b"%b,%b" % (key[:-1], rest[1:-1])


def with_attachments(call: bytes, attachments: Iterable[Attachment]) -> bytes:
    """The call, listing the attachments sent before it."""
    return b'%b,"attachments":[%b]' % (call, b",".join(each.model_dump_json().encode() for each in attachments))


def with_boot(call: bytes, boot: str) -> bytes:
    """The complete call."""
    return b'%b,"boot":%b}' % (call, to_json(boot))


def encode_batch(number: int, calls: Iterable[bytes]) -> bytes:
    """A ``Batch`` of complete calls."""
    return b'{"type":"batch","batch":%d,"calls":[%b]}' % (number, b",".join(calls))


def encode_keys(kind: str, keys: Iterable[bytes]) -> bytes:
    """A ``Cancel`` or ``Forget`` of these CallKeys."""
    return b'{"type":"%b","calls":[%b]}' % (kind.encode(), b",".join(keys))


class PendingCall:
    """A call in flight: ``future`` resolves to its CallResult or raises the InfraError.

    ``key`` is its CallKey as JSON. ``parts`` are its large arguments until they have been sent, ``moving`` the task
    that sends them, or fetches the result's attachments; ``attached`` once the container may have some of them;
    ``asked`` while an answer is expected. ``kept``: the container stores the result until it ends. ``added_at``,
    ``sent_at`` and ``done_at`` are loop times in seconds; None until they happen.
    """

    __slots__ = (
        "added_at",
        "ask_again_at",
        "asked",
        "attached",
        "body",
        "boot",
        "done_at",
        "future",
        "id",
        "kept",
        "key",
        "lease",
        "moving",
        "parts",
        "sent_at",
        "timeout_s",
    )

    def __init__(
        self,
        call_id: str,
        lease: bytes,
        timeout_s: float,
        future: asyncio.Future[CallResult],
        added_at: float,
        *,
        kept: bool = False,
    ) -> None:
        self.id = call_id
        self.lease = lease
        self.key = encode_key(call_id, lease)
        self.timeout_s = timeout_s
        self.body = b""
        self.parts: dict[str, Part] = {}
        self.moving: asyncio.Task[Any] | None = None
        self.asked = self.attached = False
        self.kept = kept
        self.ask_again_at = math.inf
        self.future = future
        self.boot: str | None = None
        self.added_at = added_at
        self.sent_at: float | None = None
        self.done_at: float | None = None

    def __repr__(self) -> str:
        state = "done" if self.done_at is not None else "waiting" if self.sent_at is None else "sent"
        return f"<PendingCall {self.id} {state}>"

    @property
    def batch_wait_s(self) -> float:
        """Time the call waited here before its batch was sent; 0 if it was not."""
        return 0.0 if self.sent_at is None else self.sent_at - self.added_at
