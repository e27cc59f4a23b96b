"""Closes what a command opened, however the command ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress


@asynccontextmanager
async def closed_at_end(close: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Await ``close()`` at the end of the body, also after SIGTERM, which cancels the body as Ctrl-C does and then
    ends the process with status 143. Outside the main thread, signals are left to the caller."""
    main, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert main is not None
    terminated = asyncio.Event()

    def on_sigterm() -> None:
        if not terminated.is_set():  # once: a second signal must not interrupt the closing
            terminated.set()
            main.cancel()

    with suppress(NotImplementedError, RuntimeError, ValueError):
        loop.add_signal_handler(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        closing = asyncio.ensure_future(close())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing  # Ctrl-C while closing: finish closing
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.remove_signal_handler(signal.SIGTERM)
        if terminated.is_set():
            raise SystemExit(128 + signal.SIGTERM)
