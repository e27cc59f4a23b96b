"""Waiting for a change, with a deadline."""

from __future__ import annotations

import asyncio


class Changes:
    """Wakes waiters, which then check their condition again: a wake-up promises nothing."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiters: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        """Wake all waiters."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, deadline_s: float) -> bool:
        """Wait until something changes or the loop's clock reaches ``deadline_s``; returns whether something
        changed."""
        remaining_s = deadline_s - self._loop.time()
        if remaining_s <= 0:
            return False
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        timer = self._loop.call_later(remaining_s, _wake, waiter)
        try:
            return not await waiter
        finally:
            timer.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)


def _wake(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(True)
