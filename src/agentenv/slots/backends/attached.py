"""Containers run by somebody else: their slots are leased, but nothing is started or stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

from agentenv.containers.handle import ContainerHandle
from agentenv.slots.backends.base import ContainerEvent, ContainerGone, ContainerStarted


class AttachedBackend:
    """A fixed set of containers, found elsewhere. Their owner may lease slots too: each container arbitrates.

    A container that does not answer is left alone: :meth:`replace` only forgets it.
    """

    name = "attached"
    found = 0
    generation = 0

    def __init__(self, handles: Sequence[ContainerHandle]) -> None:
        self._handles = {handle.id: handle for handle in handles}
        self._events: asyncio.Queue[ContainerEvent | None] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self.found = len(self._handles)
        for handle in self._handles.values():
            self._events.put_nowait(ContainerStarted(handle))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for container in tuple(self._handles):
            await self.replace(container, "detached")
        self._events.put_nowait(None)

    async def scale(self, count: int) -> None:
        """Does nothing: the owner decides how many there are."""

    async def events(self) -> AsyncIterator[ContainerEvent]:
        """See :class:`ContainerBackend`."""
        while (event := await self._events.get()) is not None:
            yield event

    async def replace(self, container_id: str, reason: str) -> None:
        """Forget it. See :class:`ContainerBackend`."""
        if self._handles.pop(container_id, None) is not None:
            self._events.put_nowait(ContainerGone(container_id, reason))

    def __repr__(self) -> str:
        return f"<AttachedBackend {len(self._handles)} containers>"
