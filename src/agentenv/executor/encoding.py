"""Serialisation of calls, once per call however often it is sent. Pure.

The output is exactly :class:`agentenv.wire.calls.Batch`, ``Cancel`` and ``Forget``; the models themselves are not
built, because the container validates what it reads and the caller has already validated the arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import to_json

from agentenv.wire.calls import Attachment

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
