"""``GET /v1/watch``: a container's slots, followed instead of polled (:mod:`agentenv.wire.watch`).

A watcher holds the numbers of the slots that have changed since its last line, no lines: a slot that changes twice
in between is sent once, with its latest report; its epoch shows a lease that began and ended. So a slow watcher costs
no more than a fast one, and one that reads nothing is disconnected.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aiohttp import web

from agentenv.errors import ProtocolError
from agentenv.sandbox.server.access import generation_of
from agentenv.sandbox.server.bodies import UNREAD_S, streamed, write_lines
from agentenv.sandbox.server.container import Container
from agentenv.wire.watch import (
    BEAT_S,
    GENERATION_HEADER,
    LEAST_BEAT_S,
    MOST_BEAT_S,
    WatchBeat,
    WatchChange,
    WatchLine,
    WatchList,
)


class Watcher:
    """The changes that one watcher was not sent yet."""

    def __init__(self) -> None:
        self._slots: dict[int, None] = {}
        self._woken = asyncio.Event()

    def changed(self, slot: int) -> None:
        """The slot has to be sent (again), after those that changed before it."""
        self._slots.pop(slot, None)
        self._slots[slot] = None
        self.wake()

    def wake(self) -> None:
        """End :meth:`wait`."""
        self._woken.set()

    async def wait(self, until_s: float) -> None:
        """Wait for a change, or until that time of the loop's clock."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                await self._woken.wait()
        self._woken.clear()

    def take(self) -> list[int]:
        """The changed slots, in order of their latest change; they count as sent."""
        slots, self._slots = list(self._slots), {}
        return slots


class Watchers:
    """All watchers of one container's slots."""

    def __init__(self) -> None:
        self.ended = False
        self._watchers: set[Watcher] = set()

    @contextmanager
    def watching(self) -> Iterator[Watcher]:
        """A watcher that gets every change from now on."""
        watcher = Watcher()
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    def changed(self, slot: int) -> None:
        """A slot's state or lease has changed, or is about to within this iteration of the loop."""
        for watcher in self._watchers:
            watcher.changed(slot)

    def end(self) -> None:
        """The server ends: end every watch, after a last beat."""
        self.ended = True
        for watcher in self._watchers:
            watcher.wake()


class WatchRoute:
    """The route, over one container."""

    def __init__(self, container: Container, watchers: Watchers) -> None:
        self._container = container
        self._watchers = watchers
        self._poller = container.context.poller

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Register it."""
        router.add_get("/v1/watch", self._get, allow_head=False)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        beat_s = _beat_s(request.query.get("beat_s"))
        self._container.obey(generation_of(request.headers.get(GENERATION_HEADER)) or 0)
        async with streamed(request, "application/x-ndjson") as response:
            _limit_unread_time(request.transport)
            with self._watchers.watching() as watcher:
                await self._follow(watcher, response, beat_s)
        return response

    async def _follow(self, watcher: Watcher, response: web.StreamResponse, beat_s: float) -> None:
        """Write lines until the server ends. Raises TimeoutError when the watcher does not read, ConnectionError when
        it has disconnected."""
        loop = self._poller.loop
        await write_lines(response, [self._list()])
        beat_at_s = loop.time()
        while True:
            await self._poller.going.wait()
            lines: list[WatchLine] = [self._change(slot) for slot in watcher.take()]
            ended, beats = self._watchers.ended, loop.time() >= beat_at_s
            if ended or beats:
                lines.append(self._beat())
                beat_at_s = loop.time() + beat_s
            if lines:
                await write_lines(response, lines)
            if beats:
                self._container.heard()
            if ended:
                return
            await watcher.wait(beat_at_s)

    def _list(self) -> WatchList:
        slots = self._container.inventory().slots
        return WatchList(boot=self._container.boot, generation=self._container.generation, slots=slots)

    def _change(self, slot: int) -> WatchChange:
        return WatchChange(slot=self._container.slot(slot).report())

    def _beat(self) -> WatchBeat:
        return WatchBeat(
            statistics=self._container.statistics(),
            supervisor_silent_s=self._container.supervisor_silent_s,
            draining=self._container.draining,
            call_times=self._container.counted.call_times(),
        )


def _beat_s(text: str | None) -> float:
    """The interval in the query. Raises ProtocolError."""
    if text is None:
        return BEAT_S
    try:
        beat_s = float(text)
    except ValueError:
        beat_s = math.nan
    if not LEAST_BEAT_S <= beat_s <= MOST_BEAT_S:
        raise ProtocolError(f"beat_s must be a number of {LEAST_BEAT_S:g} to {MOST_BEAT_S:g}")
    return beat_s


def _limit_unread_time(transport: asyncio.Transport | None) -> None:
    """Cut the connection when nothing sent over it is acknowledged for UNREAD_S, so that a watcher on a dead machine
    does not count as following the container: the kernel would wait for a quarter of an hour."""
    raw = transport.get_extra_info("socket") if transport is not None else None
    if raw is not None:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNREAD_S * 1000))
