"""Follows Nomad's state: its event stream, and periodic lists of everything. I/O, no decisions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from agentenv.backoff import Backoff
from agentenv.slots.backends.nomad import facts
from agentenv.slots.backends.nomad.api import EventStream, NomadApi, pause
from agentenv.slots.backends.nomad.explain import NomadError

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 60.0
"""Interval between lists while the event stream is followed, which in theory misses nothing."""
POLL_S = 2.0
"""Interval between lists without an event stream."""
TICK_S = 1.0
RETRY_MIN_S, RETRY_MAX_S = 0.25, 10.0

Following = Literal["stream", "polling", "unreachable"]


class Follower:
    """Passes every fact to ``tell``, in Nomad's order, and never gives up."""

    def __init__(
        self,
        api: NomadApi,
        stream: EventStream,
        tell: Callable[[facts.Fact], None],
        tick: Callable[[], None],
    ) -> None:
        self._api = api
        self._stream = stream
        self._emit = tell
        self._tick = tick
        self._index = 0
        self._look_now = asyncio.Event()
        self._look_due = False
        self._streaming = False
        self._answering = True
        self.problem = ""
        """Nomad's last refusal or silence; empty once it has answered again."""

    @property
    def following(self) -> Following:
        """How changes are detected at the moment."""
        if self._streaming:
            return "stream"
        return "polling" if self._answering else "unreachable"

    async def look(self) -> None:
        """List everything once. Raises NomadError."""
        with _understood():
            snapshot = await self._api.snapshot()
        self._index = snapshot.index
        self._emit(snapshot)

    async def keep_looking(self) -> None:
        """List everything again: on request, every minute, and often while there is no stream."""
        loop = asyncio.get_running_loop()
        looked_at = loop.time()
        while True:
            await pause(TICK_S, self._look_now)
            self._tick()
            due_s = LOOK_AGAIN_S if self._streaming else POLL_S
            if loop.time() - looked_at < due_s and not self._look_due:
                continue
            looked_at, self._look_due = loop.time(), False
            try:
                await self.look()
            except NomadError as error:
                self._trouble(error)
            else:
                self._answering, self.problem = True, ""

    async def follow(self) -> None:
        """Read the event stream; after a cut, continue from the last index."""
        nodes, backoff = True, Backoff(RETRY_MIN_S, RETRY_MAX_S)
        while True:
            began = asyncio.get_running_loop().time()
            try:
                async for line in self._stream.lines(after=self._index + 1, nodes=nodes):
                    self._process_line(line)
            except NomadError as error:
                self._streaming = False
                if error.status == 403 and nodes:
                    logger.info("no events of nodes without node:read: drains are seen when Nomad migrates")
                    nodes = False
                    continue
                if asyncio.get_running_loop().time() - began > RETRY_MAX_S:
                    backoff.reset()
                logger.warning("no event stream of Nomad, listing every %g s until there is: %s", POLL_S, error)
            await asyncio.sleep(backoff.next_s())

    def _process_line(self, line: dict[str, object]) -> None:
        if not self._streaming:
            self._streaming, self._answering = True, True
            logger.info("following Nomad's event stream from index %d", self._index)
            self.look_soon()  # events missed meanwhile may have left the stream's buffer
        with _understood():
            heard = list(facts.events(line, self._api.settings.job_id))
        for fact in heard:
            self._emit(fact)
        if isinstance(index := line.get("Index"), int):
            self._index = max(self._index, index)

    def look_soon(self) -> None:
        """List everything at once."""
        self._look_due = True
        self._look_now.set()

    def _trouble(self, error: NomadError) -> None:
        if self._answering:
            logger.warning("Nomad does not respond; known containers keep running: %s", error)
        self._answering = self._streaming and error.status != 0
        self.problem = error.message


@contextmanager
def _understood() -> Iterator[None]:
    """Ignore facts in an unknown form (of another version, perhaps) and keep following. Raises NomadError for an
    invalid fact."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NomadError(200, f"its answer is not understood: {error!r}") from error
