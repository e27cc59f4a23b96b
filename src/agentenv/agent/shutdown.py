"""Closes what a command opened, however the command ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

_ENDING = (signal.SIGTERM, signal.SIGINT)


@asynccontextmanager
async def closed_at_end(close: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Await ``close()`` at the end of the body, also after SIGTERM or SIGINT (Ctrl-C), which cancel the body and then
    end the process with status 143, or raise KeyboardInterrupt. Outside the main thread, signals are left to the
    caller."""
    main, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert main is not None
    came: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        if not came:  # once: a second signal must not interrupt the closing
            main.cancel()
        came.append(number)

    with suppress(NotImplementedError, RuntimeError, ValueError):
        for number in _ENDING:
            loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        closing = asyncio.ensure_future(close())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing  # cancelled while closing: finish closing
        with suppress(NotImplementedError, RuntimeError, ValueError):
            for number in _ENDING:
                loop.remove_signal_handler(number)
                if came:  # the process is about to end, with what it still has to write
                    signal.signal(number, signal.SIG_IGN)
        if came:
            raise KeyboardInterrupt if came[0] is signal.SIGINT else SystemExit(128 + signal.SIGTERM)
