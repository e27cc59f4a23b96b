"""A call in flight, and its serialisation: once per call, however often it is sent.

The output is exactly :class:`agentenv.wire.calls.Batch`, ``Cancel`` and ``Forget``; the models themselves are not
built, because the container validates what it reads and the caller has already validated the arguments.
"""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic_core import to_json

from agentenv.containers.attachments import Part
from agentenv.errors import InvalidArgumentsError
from agentenv.wire.base import LARGE_BYTES, MAX_FILE_BYTES
from agentenv.wire.calls import MAX_ATTACHMENTS, Attachment, CallResult

ENVELOPE_BYTES = 64
"""Upper bound of a batch's JSON without its calls."""
BOOT_BYTES = 256
"""Upper bound of ``,"boot":"…"}`` and a comma."""
_JSON_BYTES_PER_CHAR: Final = 6
"""Most that JSON makes of a character of the basic plane (a control character: ``\\u0001``), and of what UTF-8 needs
four bytes for."""
_QUOTES: Final = '""'


def encode_arguments(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Part]]:
    """The arguments of a call as JSON values for its message, and those sent as attachments instead: each whose JSON
    takes more than LARGE_BYTES. Pure.

    ``arguments`` are JSON values, or ``bytes``: base64 in the message, themselves in an attachment. Text is attached
    as UTF-8, any other value as its JSON; the receiver knows by the type of the tool's field
    (:func:`agentenv.wire.base.carried_as`).

    Raises: InvalidArgumentsError: one is larger than MAX_FILE_BYTES, or there are more than MAX_ATTACHMENTS.
    """
    message: dict[str, Any] = {}
    attached: dict[str, Part] = {}
    for name, value in arguments.items():
        part = _large_part(value)
        if part is None:
            message[name] = base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value
            continue
        if (size_bytes := size_of(part)) > MAX_FILE_BYTES:
            raise InvalidArgumentsError(
                f"{name}: {size_bytes} bytes exceed the limit of {MAX_FILE_BYTES} bytes per call",
                next_step="send it in smaller parts",
            )
        attached[name] = part
    if len(attached) > MAX_ATTACHMENTS:
        raise InvalidArgumentsError(f"more than {MAX_ATTACHMENTS} arguments are large")
    return message, attached


def _large_part(value: Any) -> Part | None:
    """The value as it is attached; None when its JSON is small enough for a message."""
    if isinstance(value, bytes):
        return value if (len(value) + 2) // 3 * 4 + len(_QUOTES) > LARGE_BYTES else None
    if isinstance(value, str):
        if len(value) * _JSON_BYTES_PER_CHAR <= LARGE_BYTES:
            return None
        return value if len(value) > LARGE_BYTES or len(to_json(value)) > LARGE_BYTES else None
    if not isinstance(value, (dict, list, tuple)):
        return None
    return encoded if len(encoded := to_json(value)) > LARGE_BYTES else None


def size_of(part: Part) -> int:
    """Size in bytes; of text as UTF-8."""
    return len(part) if isinstance(part, bytes) or part.isascii() else len(part.encode())


def encode_call(key: bytes, tool: str, arguments: Mapping[str, Any], timeout_s: float) -> bytes:
    """A call without its ``boot`` and attachments, which are known when it is first sent. ``key`` is its CallKey;
    ``timeout_s`` infinite: it has no limit."""
    limit_s = None if timeout_s == math.inf else timeout_s
    rest = to_json({"tool": tool, "timeout_s": limit_s, "arguments": arguments}, inf_nan_mode="constants")
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

    ``arguments`` are what ToolCatalog.validate returns; ``lease`` is a LeaseKey as JSON, ``key`` the CallKey. ``parts``
    are the large arguments until they have been sent, ``transfer`` the task that sends them, or fetches the result's
    attachments; ``attached`` once the container may have some of them; ``awaited`` while a result is expected.
    ``kept``: the container stores the result until it ends. ``added_at``, ``sent_at`` and ``done_at`` are loop times in
    seconds; None until they happen.
    """

    __slots__ = (
        "added_at",
        "attached",
        "awaited",
        "body",
        "boot",
        "done_at",
        "future",
        "id",
        "kept",
        "key",
        "lease",
        "overdue_at",
        "parts",
        "sent_at",
        "timeout_s",
        "transfer",
    )

    def __init__(
        self,
        call_id: str,
        lease: bytes,
        tool: str,
        arguments: Mapping[str, Any],
        timeout_s: float,
        future: asyncio.Future[CallResult],
        added_at: float,
        *,
        kept: bool = False,
    ) -> None:
        """Raises InvalidArgumentsError when an argument is too large, or too many are large."""
        self.id = call_id
        self.lease = lease
        self.key = b'{"id":%b,"lease":%b}' % (to_json(call_id), lease)
        self.timeout_s = timeout_s
        values, self.parts = encode_arguments(arguments)
        self.body = encode_call(self.key, tool, values, timeout_s)
        self.transfer: asyncio.Task[Any] | None = None
        self.awaited = self.attached = False
        self.kept = kept
        self.overdue_at = math.inf
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
