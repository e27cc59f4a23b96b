"""Objects of the async SDK that belong to the event loop of a background thread, used by coroutines of any loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self

from agentenv.containers.byte_stream import ByteStream
from agentenv.containers.connect import Streams
from agentenv.containers.live_output import OnOutput, OutputBytes, Stream, tell
from agentenv.containers.programs import StreamedProgram
from agentenv.containers.transfer import Progress
from agentenv.sdk.async_sandbox import AsyncSandbox
from agentenv.sdk.forwards import as_socket
from agentenv.sdk.loop_thread import LoopThread
from agentenv.sdk.processes import SlotProcess
from agentenv.sdk.python import SlotPython
from agentenv.sdk.serving import Served, Target, answered_here
from agentenv.wire.connections import LINGER_S

_KINDS: Final = (SlotProcess, StreamedProgram, SlotPython, ByteStream)


class Elsewhere:
    """Has the attributes and methods of ``driven``, which it runs in the loop that ``driven`` belongs to. What they
    return is of the same kind; callbacks are called in the caller's own loop."""

    def __init__(self, driven: Any, loop: LoopThread) -> None:
        self._driven = driven
        self._loop = loop

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """For ``isinstance``: it is one to its users."""
        return type(self._driven)

    def __repr__(self) -> str:
        return repr(self._driven)

    def __dir__(self) -> list[str]:
        return dir(self._driven)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._driven, name)
        if not callable(found):
            return self._here(found)

        @functools.wraps(found)
        def called(*args: Any, **given: Any) -> Any:
            for name, function in _CALLBACKS.items():
                if given.get(name) is not None:
                    given[name] = function(given[name])
            return self._here(found(*args, **given))

        return called

    async def __aenter__(self) -> Self:
        await self._loop.awaited(self._driven.__aenter__())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._loop.awaited(self._driven.__aexit__(kind, error, trace))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        return await self._loop.awaited(self._driven.__anext__())

    def _here(self, found: Any) -> Any:
        """What ``driven`` has or returned, for coroutines of any loop."""
        if isinstance(found, AsyncSandbox):
            return SandboxElsewhere(found, self._loop)
        if isinstance(found, _KINDS):
            return Elsewhere(found, self._loop)
        if isinstance(found, list):
            return [self._here(one) for one in found]
        if asyncio.iscoroutine(found):
            return self._awaited(found)
        if isinstance(found, AbstractAsyncContextManager):
            return self._loop.held_for(found)
        if isinstance(found, AsyncIterator):
            return self._loop.iterated(found)
        return found

    async def _awaited(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._here(await self._loop.awaited(work))


class SandboxElsewhere(Elsewhere):
    """A sandbox, used from any loop."""

    async def open(self) -> Self:
        """See :meth:`AsyncSandbox.open`."""
        try:
            await self._loop.awaited(self._driven.open())
        except asyncio.CancelledError:  # it may have been open already when that came, and nobody else would close it
            await self._loop.awaited(self._driven.close())
            raise
        return self

    async def __aenter__(self) -> Self:
        return self if self._driven.is_open else await self.open()

    @asynccontextmanager
    async def connect(self, port: int, *, timeout_s: float = 30.0) -> AsyncIterator[Streams]:
        """See :meth:`AsyncSandbox.connect`; the streams belong to the caller's loop. What the connection is lost with
        reads as its end, and is raised on leaving."""
        async with self._loop.held_for(as_socket(self._driven.connect(port, timeout_s=timeout_s))) as ours:
            reader, writer = await asyncio.open_connection(sock=ours.dup())
            try:
                yield reader, writer
            finally:
                writer.close()
                try:
                    async with asyncio.timeout(LINGER_S):
                        await writer.wait_closed()
                except (TimeoutError, OSError):
                    writer.transport.abort()

    @asynccontextmanager
    async def serve(self, target: Target, port: int = 0, *, timeout_s: float = 30.0) -> AsyncIterator[Served]:
        """See :meth:`AsyncSandbox.serve`; an application runs in the caller's loop."""
        async with (
            answered_here(target) as answered,
            self._loop.held_for(self._driven.serve(answered, port, timeout_s=timeout_s)) as found,
        ):
            yield found


def _output_here(on_output: OnOutput) -> OnOutput:
    """``on_output``, called in the loop that this is called in, wherever the output is read. The reader waits for it,
    and what it raises is raised there, which cancels the command."""
    here = asyncio.get_running_loop()

    async def there(stream: Stream, piece: Any) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(tell(on_output, stream, piece), here))

    return OutputBytes(there) if isinstance(on_output, OutputBytes) else there


def _progress_here(progress: Progress) -> Progress:
    """``progress``, called in the loop that this is called in."""
    here = asyncio.get_running_loop()

    def there(*figures: Any) -> None:
        here.call_soon_threadsafe(progress, *figures)

    return there


_CALLBACKS: Final[dict[str, Callable[[Any], Any]]] = {"on_output": _output_here, "progress": _progress_here}
