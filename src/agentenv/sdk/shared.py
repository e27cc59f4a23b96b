"""One farm per process and settings, for whoever asks: adapters of harnesses, libraries, plugins.

::

    async with shared_farm(slots=50).sandbox("debian:trixie", memory_mib=1024) as box:
        print((await box.run("cat /etc/debian_version")).stdout)
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Final, Literal, Self, Unpack, cast

from agentenv.config import ContainerFields, ContainerSettings
from agentenv.deadlines import CALL_TIMEOUT_S, START_TIMEOUT_S
from agentenv.errors import AgentEnvError
from agentenv.executor.session import Checkpoint
from agentenv.farm_client.access import FarmAccess, farm_access
from agentenv.sdk.async_sandbox import SLOTS_PER_CONTAINER, AsyncFarm, AsyncSandbox
from agentenv.sdk.elsewhere import SandboxElsewhere
from agentenv.sdk.loop_thread import LoopThread
from agentenv.sdk.named import IDLE_TIMEOUT_S, NamedSandbox, OnIdle
from agentenv.sdk.roots import ImageFields, ImageRoot
from agentenv.sdk.sandbox import Farm
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.backends.registry import BackendName
from agentenv.wire.roots import RootSpec


def shared_farm(
    backend: BackendName | Literal["farm"] | ContainerBackend = "local",
    *,
    slots: int = SLOTS_PER_CONTAINER,
    memory_mib: int | None = None,
    settings: ContainerSettings | None = None,
    timeout_s: float = CALL_TIMEOUT_S,
    start_timeout_s: float = START_TIMEOUT_S,
    farm: FarmAccess | None = None,
    **fields: Unpack[ContainerFields],
) -> SharedFarm:
    """The farm of this process with these arguments, which are those of :class:`agentenv.AsyncFarm`: whoever asks with
    equal ones gets the same. It starts with its first sandbox, and ends with the process. One that was closed, or did
    not start, is replaced at the next call, and a process forked from this one has its own.

    Raises ConfigError naming the wrong setting.
    """
    if backend == "farm" and farm is None:
        farm = farm_access()
    new = functools.partial(
        _OpenedByFirst,
        backend,
        slots=slots,
        memory_mib=memory_mib,
        settings=settings,
        timeout_s=timeout_s,
        start_timeout_s=start_timeout_s,
        farm=farm,
        **fields,
    )
    one_form = ContainerSettings.made(None, fields)  # in which fields are compared
    return _FARMS.of(
        (backend, slots, memory_mib, settings, timeout_s, start_timeout_s, farm, one_form, fields.keys()), new
    )


class SharedFarm:
    """What :func:`shared_farm` returns: a farm whose coroutines may be awaited in any event loop, and whose
    :attr:`blocking` is for threads without one.

    Its calls run in the loop of one background thread; cancelling one cancels it there. ``await`` and ``async with``
    open it, which its first sandbox does as well; leaving the block does not close it.
    """

    def __init__(self, driven: _OpenedByFirst, loop: LoopThread) -> None:
        self._driven = driven
        self._loop = loop
        self._blocking = _Blocking(driven, loop)

    def __repr__(self) -> str:
        return repr(self._driven).replace("<_OpenedByFirst", "<SharedFarm", 1)

    @property
    def is_open(self) -> bool:
        """Whether it has started, and was not closed."""
        return self._driven.is_open and not self._loop.inherited

    @property
    def blocking(self) -> Farm:
        """The same farm for code without an event loop, from any number of threads."""
        return self._blocking

    async def open(self) -> Self:
        """Start it, if nobody has: cancelling this does not cancel that. Raises SandboxUnavailableError with cause and
        cure; PoolClosedError when it was closed."""
        await self._loop.awaited(self._driven.open())
        return self

    async def close(self) -> None:
        """End it for all who use it, with its sandboxes. Repeatable. Not needed at the end of the process."""
        if not self._loop.inherited:
            await self._loop.awaited(self._driven.close())

    def __await__(self) -> Generator[Any, None, Self]:
        return self.open().__await__()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing: others use it."""

    def sandbox(
        self,
        root: ImageRoot | RootSpec | Checkpoint | str | None = None,
        *,
        name: str | None = None,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        on_idle: OnIdle = "kill",
        **fields: Unpack[ImageFields],
    ) -> AsyncSandbox:
        """See :meth:`agentenv.AsyncFarm.sandbox`. It may be used from any event loop. Callbacks (``on_output``,
        ``progress``) are called in the caller's. What ``progress`` raises goes to that loop's exception handler."""
        box = self._driven.sandbox(root, name=name, idle_timeout_s=idle_timeout_s, on_idle=on_idle, **fields)
        return self._elsewhere(box)

    def connect(self, name: str) -> AsyncSandbox:
        """See :meth:`agentenv.AsyncFarm.connect`."""
        return self._elsewhere(self._driven.connect(name))

    async def sandboxes(self) -> list[NamedSandbox]:
        """See :meth:`agentenv.AsyncFarm.sandboxes`."""
        return await self._loop.awaited(self._driven.sandboxes())

    async def pause(self, name: str) -> None:
        """See :meth:`agentenv.AsyncFarm.pause`."""
        await self._loop.awaited(self._driven.pause(name))

    async def kill(self, name: str) -> None:
        """See :meth:`agentenv.AsyncFarm.kill`."""
        await self._loop.awaited(self._driven.kill(name))

    def _elsewhere(self, box: AsyncSandbox) -> AsyncSandbox:
        return cast("AsyncSandbox", SandboxElsewhere(box, self._loop))


class _OpenedByFirst(AsyncFarm):
    """Opened by whoever is the first to need it."""

    _opening: asyncio.Task[object] | None = None
    _closed = False

    @property
    def over(self) -> bool:
        """Whether nobody will be able to use it any more."""
        opening = self._opening
        return self._closed or (opening is not None and opening.done() and not self.is_open)

    async def open(self) -> Self:
        if self._opening is None:
            self._opening = asyncio.create_task(super().open(), name="open a shared farm")
        await asyncio.shield(self._opening)
        self._usable()
        return self

    async def close(self) -> None:
        self._closed = True
        if self._opening is not None:
            await asyncio.wait({self._opening})
        await super().close()

    async def _ready(self) -> None:
        await self.open()


class _Blocking(Farm):
    """A view of a farm that others use too: it is not closed with this object."""

    def __init__(self, driven: _OpenedByFirst, loop: LoopThread) -> None:
        self._driven = driven
        self._loop = loop
        self._maker = None

    def close(self) -> None:
        """End it for all who use it, with its sandboxes. Repeatable."""
        self._loop.run(self._driven.close())

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing: others use it."""


class _Farms:
    """The shared farms of this process, and the thread that has them."""

    def __init__(self) -> None:
        self.forget()
        os.register_at_fork(after_in_child=self.forget)
        atexit.register(self._close_all)

    def forget(self) -> None:
        """In a process that was forked: the farms are its parent's, whose threads may have held the lock."""
        self._lock = threading.Lock()
        self._loop = LoopThread()
        self._found: list[tuple[object, SharedFarm]] = []

    def of(self, asked: object, new: Callable[[], _OpenedByFirst]) -> SharedFarm:
        """The farm of arguments that equal ``asked``; ``new`` makes it, if there is none."""
        with self._lock:
            self._found = [one for one in self._found if not one[1]._driven.over]
            for known, farm in self._found:
                if known == asked:
                    return farm
            made = SharedFarm(new(), self._loop)
            self._found.append((asked, made))
            return made

    def _close_all(self) -> None:
        if not self._found or self._loop.inherited or not self._loop.running:
            return
        with contextlib.suppress(AgentEnvError):
            self._loop.run(_close_each([farm._driven for _, farm in self._found]))


async def _close_each(farms: list[_OpenedByFirst]) -> None:
    await asyncio.gather(*(farm.close() for farm in farms), return_exceptions=True)


_FARMS: Final = _Farms()
