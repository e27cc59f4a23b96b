"""An event loop in a background thread: how plain functions run coroutines, even where a loop runs already, and how
coroutines of other loops do."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from queue import SimpleQueue
from typing import Any, Final, Generic, ParamSpec, TypeVar

from agentenv.errors import PoolClosedError

P = ParamSpec("P")
T = TypeVar("T")

_THREADS: Final = 6
"""For blocking work of the loop."""


class LoopThread:
    """An event loop in a separate thread, started at the first :meth:`run`.

    A process forked from the one that made it has the object, but not the thread: there :meth:`run` raises
    PoolClosedError, and closing does nothing.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._last_work: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return not self.inherited and self._thread is not None and self._thread.is_alive()

    @property
    def inherited(self) -> bool:
        """Whether this process was forked from the one that made it."""
        return os.getpid() != self._process

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the thread and wait for its result. An interruption of the wait (KeyboardInterrupt)
        cancels ``work`` and is raised when it has ended. Raises PoolClosedError after :meth:`close`."""
        # Held until the end. A plain lock, because no interrupt can leave it half changed, unlike an Event.
        running = threading.Lock()
        running.acquire()
        call = _Call(self._loop_for(work), work, running.release)
        try:
            call.begin()
            running.acquire()
        except BaseException:
            call.cancel()
            running.acquire()
            raise
        return call.result()

    async def awaited(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work`` in the thread, from a coroutine of any loop. Cancelling that cancels ``work``, and is raised
        when it has ended. Raises PoolClosedError after :meth:`close`."""
        here = asyncio.get_running_loop()
        ended = asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # the caller's loop was closed under it
                here.call_soon_threadsafe(ended.set)

        call = _Call(self._loop_for(work), work, tell)
        call.begin()
        try:
            await ended.wait()
        except asyncio.CancelledError:
            call.cancel()
            while not ended.is_set():
                with suppress(asyncio.CancelledError):
                    await ended.wait()
            raise
        return call.result()

    @asynccontextmanager
    async def held_for(self, work: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
        """As :meth:`held`, for a coroutine of any loop."""
        entered = await self.awaited(work.__aenter__())
        try:
            yield entered
        except BaseException as error:
            if not await self.awaited(work.__aexit__(type(error), error, error.__traceback__)):
                raise
        else:
            await self.awaited(work.__aexit__(None, None, None))

    @contextmanager
    def held(self, work: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """Enter ``work`` in the thread, and leave it there when the block ends. Raises as :meth:`run`."""
        entered = self.run(work.__aenter__())
        try:
            yield entered
        except BaseException as error:
            if not self.run(work.__aexit__(type(error), error, error.__traceback__)):
                raise
        else:
            self.run(work.__aexit__(None, None, None))

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Iterate over ``items``, each of which is awaited in the thread. Raises as :meth:`run`."""
        while found := self.run(_next(items)):
            yield from found

    async def iterated(self, items: AsyncIterator[T]) -> AsyncIterator[T]:
        """As :meth:`iterate`, for a coroutine of any loop."""
        while found := await self.awaited(_next(items)):
            yield found[0]

    def close(self) -> None:
        """Stop the loop and end the thread. Repeatable."""
        if self.inherited:
            return  # the loop's descriptors are those of the parent
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
            self._loop = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    @property
    def inside(self) -> bool:
        """Whether the caller is that thread itself."""
        return threading.current_thread() is self._thread

    def check_caller(self) -> None:
        """Raise RuntimeError in the thread itself, which would wait for itself for ever."""
        if self.inside:
            raise RuntimeError("the sandbox cannot be used from its own callbacks")

    def begin(self, work: Coroutine[Any, Any, None], *, then_end: bool) -> None:
        """For the thread itself: run ``work``, then end, if so wanted. Nobody waits for it."""
        with self._lock:
            loop = self._loop
            if then_end:
                self._closed, self._loop = True, None
        if loop is None:
            work.close()
            return
        self._last_work = loop.create_task(work)
        if then_end:
            self._last_work.add_done_callback(lambda _: loop.stop())

    def _loop_for(self, work: Coroutine[Any, Any, Any]) -> asyncio.AbstractEventLoop:
        try:
            return self._started()
        except BaseException:
            work.close()
            raise

    def _started(self) -> asyncio.AbstractEventLoop:
        if self.inherited:  # asked before the lock, which another thread may have held when this process was forked
            raise forked_error(self._process)
        self.check_caller()
        with self._lock:
            if self._closed:
                raise PoolClosedError("the sandbox is closed", next_step="make a new one")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                given = (self._loop, LastingThreads())
                # A daemon: an interpreter that exits must not wait for a sandbox that was not closed.
                self._thread = threading.Thread(target=_serve, args=given, name="agentenv sandbox", daemon=True)
                self._thread.start()
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop, threads: LastingThreads) -> None:
    asyncio.set_event_loop(loop)
    loop.set_default_executor(threads)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        threads.shutdown()
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def _next(items: AsyncIterator[T]) -> tuple[T, ...]:
    """The next of them; empty at their end."""
    async for item in items:
        return (item,)
    return ()


class _Call(Generic[T]):
    """One coroutine being run in the loop's thread, which calls ``ended`` when it has ended."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], ended: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._work = work
        self._ended = ended
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        """Start it, once. If interrupted, it may not have begun, which :meth:`cancel` settles."""
        self._loop.call_soon_threadsafe(self._begin)

    def cancel(self) -> None:
        """Cancel it; it ends when it has cleaned up."""
        self._loop.call_soon_threadsafe(self._cancel)

    def result(self) -> T:
        """The result of a call that has ended; raises what it raised."""
        assert self._task is not None
        if self._task.cancelled():
            raise PoolClosedError("the sandbox was closed while it was used")
        return self._task.result()

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(lambda _: self._ended())

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self._work.close()
            self._ended()


def forked_error(process: int) -> PoolClosedError:
    """The error of an object of ``process`` that a process forked from it uses."""
    return PoolClosedError(
        f"this sandbox belongs to process {process}, from which this one was forked",
        next_step="open a sandbox in each process, or start processes with the method 'spawn'",
    )


class LastingThreads(ThreadPoolExecutor):
    """An executor that works until the functions of :mod:`atexit` have run. Those of the standard library refuse work
    as soon as the main thread has ended, which is before; and no thread can be started then (Python 3.12). So all of
    them are started at once.

    It is a ThreadPoolExecutor in name, because event loops take no other.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._started = [
            threading.Thread(target=self._work, name="agentenv work", daemon=True) for _ in range(_THREADS)
        ]
        for thread in self._started:
            thread.start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See :class:`concurrent.futures.Executor`."""
        future: Future[T] = Future()

        def order() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._orders.put(order)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See :class:`concurrent.futures.Executor`. Repeatable."""
        super().shutdown(wait=wait, cancel_futures=cancel_futures)
        for _ in self._started:
            self._orders.put(None)
        if wait:
            for thread in self._started:
                thread.join()

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            order()
            del order  # what it had is not kept until the next
