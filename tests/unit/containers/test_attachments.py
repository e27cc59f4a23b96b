"""How arguments travel: one decision, by their type and the size of their JSON."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast, get_args
from unittest.mock import AsyncMock, Mock

import pytest
from pydantic_core import to_json

from agentenv.containers.attachments import Attachments
from agentenv.containers.connection import ContainerConnection, Retries
from agentenv.errors import ConnectionLostError, InvalidArgumentsError
from agentenv.executor.pending_call import encode_arguments
from agentenv.wire.base import LARGE_BYTES, MAX_FILE_BYTES, carried_as
from agentenv.wire.calls import MAX_ATTACHMENTS, Attachment, CallResult
from agentenv.wire.sessions import SLOT_TOOLS
from tests.sizes import around

SIZES = around(LARGE_BYTES)
VALUES: tuple[Callable[[int], Any], ...] = (
    bytes,
    lambda size: "x" * size,
    lambda size: "é" * size,
    lambda size: "\U0001f600" * size,
    lambda size: "\x01" * size,
    lambda size: '"' * size,
    lambda size: {"NAME": "x" * size},
    lambda size: ["\x01"] * (size // 8),
    lambda size: ["", "é" * size],
    lambda size: "x" * (size - len('""')),  # of exactly so many bytes as JSON
    lambda size: ["x" * (size - len('[""]'))],
    lambda size: size,
    lambda size: size > 0,
)


@pytest.mark.parametrize("value_of", VALUES)
def test_a_value_travels_once_and_whole(value_of: Callable[[int], Any]) -> None:
    for size in (0, 1, 100, *SIZES):
        value = value_of(size)
        message, attached = encode_arguments({"a": value})
        as_json = to_json(base64.b64encode(value).decode() if isinstance(value, bytes) else value)
        if len(as_json) > LARGE_BYTES:
            assert attached.pop("a") == (value if isinstance(value, (bytes, str)) else as_json), size
        else:
            assert to_json(message.pop("a")) == as_json, size
        assert not message
        assert not attached


def test_too_much_is_refused_by_its_size_in_bytes() -> None:
    encode_arguments({"a": "é" * (MAX_FILE_BYTES // 2)})
    with pytest.raises(InvalidArgumentsError, match=f"a: {MAX_FILE_BYTES + 2} bytes exceed the limit"):
        encode_arguments({"a": "é" * (MAX_FILE_BYTES // 2 + 1)})
    with pytest.raises(InvalidArgumentsError, match="arguments are large"):
        encode_arguments({str(n): bytes(LARGE_BYTES) for n in range(MAX_ATTACHMENTS + 1)})


async def fetched(*answers: bytes) -> str:
    """A result's attachment of six bytes, of which every request brings a part."""
    left = iter(answers)

    async def pieces() -> AsyncIterator[bytes]:
        yield next(left)

    @asynccontextmanager
    async def stream(*_: object, **__: object) -> AsyncIterator[Any]:
        yield SimpleNamespace(content=SimpleNamespace(iter_any=pieces))

    connection = cast("ContainerConnection", SimpleNamespace(stream=stream, lost=ConnectionLostError))
    result = CallResult(id="c" * 8, attachments=(Attachment(field="stdout", size_bytes=6),))
    return (await Attachments(connection, 5.0).complete(b"{}", result)).stdout


async def test_what_came_whole_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Retries, "after", AsyncMock(side_effect=AssertionError("tried again")))
    assert await fetched(b"onetwo") == "onetwo"


async def test_only_bytes_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    after, progressed = AsyncMock(), Mock()
    monkeypatch.setattr(Retries, "after", after)
    monkeypatch.setattr(Retries, "progressed", progressed)
    assert await fetched(b"one", b"", b"", b"two") == "onetwo"
    assert (after.await_count, progressed.call_count) == (3, 1)


def test_the_type_of_every_field_tells_how_it_is_attached() -> None:
    """A field that took text or a list could not be read by its receiver."""
    for tool in SLOT_TOOLS:
        for name, field in tool.arguments.model_fields.items():
            leaves = str(field.annotation)
            carried = carried_as(tool.arguments, name)
            assert (carried == "bytes") == ("bytes" in leaves), (tool.name, name)
            if carried == "json":
                plain = [one for one in get_args(field.annotation) if one in (str, bytes)]
                assert not plain, (tool.name, name)
    assert carried_as(SLOT_TOOLS[0].arguments, "argv") == carried_as(SLOT_TOOLS[0].arguments, "env") == "json"
    assert carried_as(SLOT_TOOLS[0].arguments, "stdin_data") == "bytes"
    assert carried_as(SLOT_TOOLS[0].arguments, "user") == carried_as(SLOT_TOOLS[0].arguments, "command") == "text"
