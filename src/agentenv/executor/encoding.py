"""Calls as bytes: each is serialised once, however often it is sent. Pure.

What is written here is exactly :class:`agentenv.wire.calls.Batch`, ``Cancel`` and ``Forget``; the
models themselves are not built, because the container validates what it reads and the caller has
already validated the arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import to_json

ENVELOPE_BYTES = 64
"""More than a batch's own JSON needs around its calls."""
BOOT_BYTES = 256
"""More than ``,"boot":"…"}`` and a comma need."""


def encode_call(call_id: str, lease: bytes, tool: str, arguments: Mapping[str, Any], timeout_s: float) -> bytes:
    """A call but for its ``boot``, which is known when it is first sent. ``lease`` is a LeaseKey as JSON."""
    rest = to_json({"tool": tool, "timeout_s": timeout_s, "arguments": arguments}, inf_nan_mode="constants")
    return b'{"id":%b,"lease":%b,%b' % (to_json(call_id), lease, rest[1:-1])


def with_boot(call: bytes, boot: str) -> bytes:
    """The whole call."""
    return b'%b,"boot":%b}' % (call, to_json(boot))


def encode_batch(number: int, calls: Iterable[bytes]) -> bytes:
    """``Batch`` of whole calls."""
    return b'{"type":"batch","batch":%d,"calls":[%b]}' % (number, b",".join(calls))


def encode_ids(kind: str, ids: Iterable[str]) -> bytes:
    """``Cancel`` or ``Forget``."""
    return to_json({"type": kind, "ids": list(ids)})
