"""How registries are asked by a keeper: few at a time, and again after a while when they are busy."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_delay, wait_exponential_jitter

from agentenv.store.registry import BusyRegistryError

T = TypeVar("T")

_FIRST_S: Final = 1.0
_LONGEST_S: Final = 120.0


@dataclass(frozen=True)
class PatienceSettings:
    """``pulls``: from one registry at once. ``patience_s``: how long a busy registry is asked again; ``first_s`` and
    ``longest_s``: pauses between attempts, doubled each time. What a registry demands itself (``Retry-After``) skopeo
    obeys within an attempt."""

    pulls: int = 3
    patience_s: float = 900.0
    first_s: float = _FIRST_S
    longest_s: float = _LONGEST_S


class Registry:
    """One registry, as this node asks it."""

    def __init__(self, settings: PatienceSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._turns = asyncio.Semaphore(settings.pulls)
        self._quiet_until_s = 0.0
        self.throttled = 0
        """How often it had too many requests."""

    async def ask(self, attempt: Callable[[], Awaitable[T]], failed: Callable[[str], None]) -> T:
        """The result of ``attempt``, repeated while the registry is busy; ``failed`` is called with the reason, each
        time. Raises what the last one raised."""
        settings = self._settings
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(BusyRegistryError),
            wait=wait_exponential_jitter(multiplier=settings.first_s, max=settings.longest_s, jitter=settings.first_s),
            stop=stop_after_delay(settings.patience_s),
            before_sleep=functools.partial(self._noted, failed),
            reraise=True,
        )
        return await retrying(self._attempt, attempt)

    async def _attempt(self, attempt: Callable[[], Awaitable[T]]) -> T:
        async with self._turn():
            return await attempt()

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One of the few requests at a time, none while it has asked for quiet."""
        async with self._turns:
            await asyncio.sleep(max(0.0, self._quiet_until_s - self._clock()))
            yield

    def _noted(self, failed: Callable[[str], None], state: RetryCallState) -> None:
        """If it has had too many requests of one pull, the others wait as long as that one does."""
        error = state.outcome.exception() if state.outcome is not None else None
        failed(str(error))
        if isinstance(error, BusyRegistryError) and error.throttled:
            self.throttled += 1
            pause_s = state.next_action.sleep if state.next_action is not None else 0.0
            self._quiet_until_s = max(self._quiet_until_s, self._clock() + pause_s)
