"""Closing what a command opened, however it ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress


@asynccontextmanager
async def closed_at_end(close: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Await ``close()`` at the end of the body, also after SIGTERM, which cancels the body as Ctrl-C
    does and then ends the process with status 143. In a thread other than the main one signals are
    the caller's business.
    """
    main, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert main is not None
    terminated = asyncio.Event()

    def on_sigterm() -> None:
        if not terminated.is_set():  # once: a second one must not cut the closing short
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
            await closing  # Ctrl-C while closing: close all the same
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.remove_signal_handler(signal.SIGTERM)
        if terminated.is_set():
            raise SystemExit(128 + signal.SIGTERM)
