"""A tool's reply as JSON, encoded in pieces, so that a listing of 100,000 entries does not block the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from pydantic_core import to_json

from agentenv.sandbox.server.calls import NO_CONTENT, Content
from agentenv.sandbox.server.tools.files import FileOutcome
from agentenv.wire.base import WireModel

_AT_ONCE = 500
"""Entries of a list encoded in one iteration of the loop: a millisecond or two."""


async def encoded(outcome: FileOutcome) -> Content:
    """The outcome of a file tool, ready to be sent."""
    if outcome.content is None:
        return NO_CONTENT
    pieces = []
    for piece in _pieces(outcome.content):
        pieces.append(piece)
        if len(piece) > _AT_ONCE:
            await asyncio.sleep(0)
    return Content(tuple(pieces), {f"content.{name}": (raw,) for name, raw in outcome.raw.items()})


def _pieces(content: WireModel) -> Iterator[bytes]:
    """The JSON of ``content``, with its one long list in parts."""
    long = next((name for name, value in content if isinstance(value, tuple) and len(value) > _AT_ONCE), None)
    if long is None:
        yield content.model_dump_json().encode()
        return
    entries = getattr(content, long)
    rest = content.model_dump_json(exclude={long}).encode()
    yield b'{"%b":[' % long.encode()
    for start in range(0, len(entries), _AT_ONCE):
        part = to_json(entries[start : start + _AT_ONCE])
        yield (b"," if start else b"") + part[1:-1]
    yield b"]}" if rest == b"{}" else b"]," + rest[1:]
