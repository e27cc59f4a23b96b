"""Threads for blocking work of an event loop that has to close what it has when the interpreter exits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from threading import Thread
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_THREADS: Final = 6


class LastingThreads(ThreadPoolExecutor):
    """An executor that works until the functions of :mod:`atexit` have run. Those of the standard library refuse work
    as soon as the main thread has ended, which is before; and no thread can be started then (Python 3.12). So all of
    them are started at once.

    It is a ThreadPoolExecutor in name, because event loops take no other.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._started = [Thread(target=self._work, name="agentenv work", daemon=True) for _ in range(_THREADS)]
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
