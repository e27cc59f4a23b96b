"""Where a relay finds containers: the farm's list, kept up to date."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, Self

from agentenv.errors import AgentEnvError, ForbiddenError, UnauthorizedError
from agentenv.farm_client.client import FarmClient
from agentenv.wire.farm import ContainerList

logger = logging.getLogger(__name__)

_EVERY_S: Final = 2.0
_AGAIN_S: Final = 0.5
"""Shortest time between two requests for a container that is not in the list."""
_KEPT_S: Final = 60.0


class Known:
    """The containers of the lists so far. Pure.

    A container stays for ``kept_s`` after the last list that had it: a farm that has just started does not see all
    of its containers yet, and they go on serving. While there are no lists, all stay.
    """

    def __init__(self, kept_s: float = _KEPT_S) -> None:
        self._kept_s = kept_s
        self._urls: dict[str, tuple[str, float]] = {}

    def __len__(self) -> int:
        return len(self._urls)

    def update(self, listed: ContainerList, now_s: float) -> None:
        """Take a list that came at this time."""
        for one in listed.containers:
            self._urls[one.id] = (one.base_url, now_s)
        for container, (_, seen_s) in tuple(self._urls.items()):
            if now_s - seen_s > self._kept_s:
                del self._urls[container]

    def url(self, container: str) -> str | None:
        """Its base URL; None for an unknown one."""
        found = self._urls.get(container)
        return None if found is None else found[0]


class FarmContainers:
    """Looks containers up in the farm's list, which is read again every other second, and at once for a container
    that is not in it. An async context manager; ``client`` stays the caller's."""

    def __init__(self, client: FarmClient, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._known = Known()
        self._asked_s = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self.problem = "the farm's list of containers has not come yet"
        """Why the list is not up to date; empty if it is."""

    async def __aenter__(self) -> Self:
        await self._ask()
        self._following = asyncio.create_task(self._follow(), name="containers of the farm")
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [task for task in (self._following, self._asking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __call__(self, container: str) -> str | None:
        """Base URL of a container; None if the farm has none of that name, as far as is known."""
        if (url := self._known.url(container)) is None and self._clock() - self._asked_s >= _AGAIN_S:
            await self._ask()
            url = self._known.url(container)
        return url

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            await self._ask()

    async def _ask(self) -> None:
        """Read the list; many who ask at the same time share one request."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._read(), name="list of containers")
        await asyncio.shield(self._asking)

    async def _read(self) -> None:
        try:
            listed = await self._client.containers()
        except AgentEnvError as error:
            if self.problem != str(error):
                logger.warning("no list of containers: %s", error)
            self.problem = str(error)
            if isinstance(error, (UnauthorizedError, ForbiddenError)):
                self._known = Known()
        else:
            self.problem = ""
            self._known.update(listed, self._clock())
        finally:
            self._asked_s = self._clock()

    def __repr__(self) -> str:
        return f"<FarmContainers {len(self._known)} of {self._client.url}>"
