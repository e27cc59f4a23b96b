"""Keeps the requested number of containers running: shared by the local backends and the fake one.

One keeper task per index starts its container, waits for its end, reports, and starts the next one. Scaling down
cancels the keepers of the highest indices; a stop is always completed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Protocol

from agentenv.background import finish
from agentenv.backoff import pause_s
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import AgentEnvError, SandboxUnavailableError
from agentenv.slots.backends.base import ContainerDraining, ContainerEvent, ContainerGone, ContainerStarted, StartFailed

logger = logging.getLogger(__name__)

RETRY_MIN_S = 0.25
RETRY_MAX_S = 10.0
PERMANENT_RETRY_S = 30.0
"""Pause after a failure that retrying cannot cure: somebody may have repaired the machine meanwhile."""
STABLE_AFTER_S = 5.0
"""A container that lived shorter than this counts as a failed start for the next pause."""


class StartFailedError(Exception):
    """A container did not start; ``event`` says why, and whether retrying can help."""

    def __init__(self, event: StartFailed) -> None:
        super().__init__(event.reason)
        self.event = event


class Running(Protocol):
    """One started container."""

    @property
    def handle(self) -> ContainerHandle:
        """Its address."""

    async def ended(self) -> str:
        """Wait until it has ended by itself; returns the reason. May be cancelled and called again."""

    async def stop(self) -> None:
        """Stop it, orderly if possible, else by force. Returns when nothing of it is left."""


class Fleet:
    """``start(index)`` starts one container or raises StartFailedError; everything else is done here."""

    def __init__(self, start: Callable[[int], Awaitable[Running]], *, starts_at_once: int) -> None:
        self._start = start
        self._starting = asyncio.Semaphore(starts_at_once)
        self._goal = 0
        self._keepers: dict[int, asyncio.Task[None]] = {}
        self._replacing: dict[str, asyncio.Future[str]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._events: asyncio.Queue[ContainerEvent | None] = asyncio.Queue()
        self._closed = False
        self._left = False

    def scale(self, count: int) -> None:
        """Make ``count`` the goal."""
        if self._closed:
            return
        self._goal = count
        for index in [index for index in self._keepers if index >= count]:
            keeper = self._keepers.pop(index)
            self._leaving.add(keeper)
            keeper.add_done_callback(self._leaving.discard)
            keeper.cancel()
        for index in range(count):
            if index not in self._keepers:
                self._hire(index)

    def adopt(self, indices: Iterable[int]) -> None:
        """Keep the containers of these indices until the first :meth:`scale`: ``start`` returns ones that run
        already."""
        for index in indices:
            self._hire(index)

    def _hire(self, index: int) -> None:
        keeper = self._keepers[index] = asyncio.create_task(self._keep(index), name=f"keep container {index}")
        keeper.add_done_callback(lambda ended: self._check(index, ended))

    def _check(self, index: int, keeper: asyncio.Task[None]) -> None:
        """A keeper never ends by itself: if one did, it is a bug of ours, and another takes its place."""
        if keeper.cancelled() or self._keepers.get(index) is not keeper:
            return
        error = keeper.exception()
        logger.error("the keeper of container %d failed", index, exc_info=error)
        self._events.put_nowait(StartFailed(f"container {index} is not kept: {error!r}", next_step="see the log"))
        asyncio.get_running_loop().call_later(RETRY_MAX_S, self._hire_again, index, keeper)

    def _hire_again(self, index: int, keeper: asyncio.Task[None]) -> None:
        if self._keepers.get(index) is keeper:
            self._hire(index)

    def replace(self, container_id: str, reason: str) -> None:
        """Stop this container; its keeper starts another. No effect if it is unknown (already gone)."""
        wish = self._replacing.get(container_id)
        if wish is not None and not wish.done():
            wish.set_result(reason)

    async def events(self) -> AsyncIterator[ContainerEvent]:
        """Every event, for one reader, until closed."""
        while (event := await self._events.get()) is not None:
            yield event

    async def aclose(self) -> None:
        """Stop everything and end events(). May be repeated; completes even when cancelled."""
        self.scale(0)
        self._closed = True
        await finish(asyncio.create_task(self._empty()))

    async def leave(self) -> None:
        """Let go of every container, running or starting, and end events(). Stops that have begun are completed.
        May be repeated; completes even when cancelled."""
        self._left = True
        await self.aclose()

    async def _empty(self) -> None:
        while self._leaving:
            await asyncio.wait(set(self._leaving))
        self._events.put_nowait(None)

    async def _keep(self, index: int) -> None:
        failures = 0
        loop = asyncio.get_running_loop()
        while True:
            try:
                running = await self._begin(index)
            except StartFailedError as error:
                failures += 1
                self._events.put_nowait(error.event)
                after_s = pause_s(RETRY_MIN_S, RETRY_MAX_S, failures)
                await asyncio.sleep(PERMANENT_RETRY_S if error.event.permanent else after_s)
                continue
            began = loop.time()
            await self._watch(running)
            failures = failures + 1 if loop.time() - began < STABLE_AFTER_S else 0
            await asyncio.sleep(pause_s(RETRY_MIN_S, RETRY_MAX_S, failures - 1) if failures > 1 else 0)

    async def _begin(self, index: int) -> Running:
        async with self._starting:
            try:
                return await self._start(index)
            except StartFailedError:
                raise
            except (OSError, AgentEnvError) as error:
                why, cure = (error.message, error.next_step) if isinstance(error, AgentEnvError) else (error, "")
                event = StartFailed(f"container {index} did not start: {why}", next_step=cure or "see the log")
                raise StartFailedError(event) from error
            except Exception as error:  # a bug, or settings of a wrong type: trying again cannot help
                logger.exception("the start of container %d failed", index)
                reason = f"container {index} did not start: {type(error).__name__}: {error}"
                raise StartFailedError(StartFailed(reason, next_step="see the log", permanent=True)) from error

    async def _watch(self, running: Running) -> None:
        """Watch a container from its start to its end, whatever ends it."""
        container = running.handle.id
        wish = self._replacing[container] = asyncio.get_running_loop().create_future()
        ended = asyncio.create_task(running.ended(), name=f"end of {container}")
        reason, dead = "scaled down", False
        self._events.put_nowait(ContainerStarted(running.handle))
        try:
            await asyncio.wait({wish, ended}, return_when=asyncio.FIRST_COMPLETED)
            dead = ended.done()
            reason = await _end_of(ended) if dead else wish.result()
        finally:
            ended.cancel()
            del self._replacing[container]
            if dead or wish.done() or not self._left:
                await self._stop(running, reason, dead=dead)

    async def _stop(self, running: Running, reason: str, *, dead: bool) -> None:
        container = running.handle.id
        if not dead:
            self._events.put_nowait(ContainerDraining(container, reason))
        try:
            await finish(asyncio.create_task(running.stop(), name=f"stop {container}"))
        finally:
            self._events.put_nowait(ContainerGone(container, reason))


async def _end_of(ended: asyncio.Task[str]) -> str:
    """The reason of its end, as far as it can be determined: it has ended in any case."""
    try:
        return await ended
    except Exception as error:
        logger.exception("%s cannot be told", ended.get_name())
        return f"it ended, and how cannot be told: {error!r}"


class FleetBackend:
    """Base class of backends that start and watch containers themselves. Open once ``_fleet`` is set."""

    _fleet: Fleet | None = None

    @property
    def found(self) -> int:
        """See :class:`ContainerBackend`."""
        return 0

    @property
    def generation(self) -> int:
        """See :class:`ContainerBackend`."""
        return 0

    async def scale(self, count: int) -> None:
        """See :class:`ContainerBackend`."""
        self._opened().scale(count)

    def events(self) -> AsyncIterator[ContainerEvent]:
        """See :class:`ContainerBackend`."""
        return self._opened().events()

    async def replace(self, container_id: str, reason: str) -> None:
        """See :class:`ContainerBackend`."""
        self._opened().replace(container_id, reason)

    def _opened(self) -> Fleet:
        if self._fleet is None:
            raise SandboxUnavailableError("the backend is not open", next_step="use it inside `async with`")
        return self._fleet
