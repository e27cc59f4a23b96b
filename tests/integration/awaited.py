"""A Sandbox as if its calls were awaited, so that one test tries both kinds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

from agentenv import AsyncSandbox, Sandbox
from agentenv.sdk.sandbox import Process


class Awaited:
    """Each call runs in a thread; sandboxes and processes that it returns are wrapped alike."""

    def __init__(self, plain: Sandbox | Process) -> None:
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._plain, name)
        if not callable(found):
            return found
        if name == "output":
            return lambda: _pieces(found())

        async def call(*given: Any, **named: Any) -> Any:
            return _wrapped(await asyncio.to_thread(found, *given, **named))

        return call


def awaited(box: Sandbox) -> AsyncSandbox:
    """The sandbox, which is used as if it were an AsyncSandbox."""
    return cast("AsyncSandbox", Awaited(box))


def _wrapped(value: Any) -> Any:
    if isinstance(value, list):
        return [_wrapped(one) for one in value]
    return Awaited(value) if isinstance(value, (Sandbox, Process)) else value


async def _pieces(plain: Iterator[bytes]) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(next, plain, b""):
        yield piece
