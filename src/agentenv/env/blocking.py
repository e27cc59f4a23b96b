"""Lets blocking code wait for the event loop that it runs on.

A verifier of another harness calls its tools without ``await``. :func:`run_with_waits` runs it in a greenlet, and
:func:`wait` switches back to the loop until an awaitable is done: nothing else is blocked, and no thread is needed.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet

T = TypeVar("T")


async def run_with_waits(function: Callable[..., Any], *args: Any) -> Any:
    """Call a plain or async function, below which :func:`wait` may be called."""

    async def called() -> Any:
        value = function(*args)
        return await value if inspect.isawaitable(value) else value

    return await _driven(called())


def wait(awaitable: Coroutine[Any, Any, T]) -> T:
    """Wait for an awaitable without ``await``. Raises: RuntimeError outside of :func:`run_with_waits`."""
    here = getcurrent()
    if not getattr(here, "runs_a_hook", False):
        awaitable.close()
        raise RuntimeError("a blocking call works in the hook itself or in a thread, not in another task")
    return here.parent.switch(awaitable)  # type: ignore[no-any-return]


@types.coroutine
def _driven(coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
    resume: Callable[[Any], Any] = coroutine.send
    value: Any = None
    while True:
        step = greenlet(resume)  # until the coroutine's next own await
        step.runs_a_hook = True
        step.gr_context = getcurrent().gr_context  # the context variables of the task
        try:
            waited_for = step.switch(value)
            while not step.dead:
                try:
                    outcome = yield from waited_for.__await__()
                except BaseException as error:
                    waited_for = step.throw(error)
                else:
                    waited_for = step.switch(outcome)
        except StopIteration as ended:
            return ended.value
        try:
            value, resume = (yield waited_for), coroutine.send
        except BaseException as error:
            value, resume = error, coroutine.throw
