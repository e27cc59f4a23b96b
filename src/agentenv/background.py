"""Background tasks, by key; and waiting for work to its end, or until the lease it depends on is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Iterator
from typing import Any, TypeVar

from agentenv.errors import AgentEnvError

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class TaskSet:
    """Background tasks by key. Tasks that have ended are not kept; a failure is logged."""

    def __init__(self) -> None:
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._tasks

    def __iter__(self) -> Iterator[asyncio.Task[None]]:
        return iter([task for tasks in self._tasks.values() for task in tasks])

    @property
    def keys(self) -> list[str]:
        """Keys with running tasks."""
        return list(self._tasks)

    def start(self, key: str, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task for ``key``; the log calls it "<name> of <key>"."""
        task = asyncio.create_task(work, name=f"{name} of {key}")
        self._tasks.setdefault(key, set()).add(task)
        task.add_done_callback(lambda ended: self._ended(key, ended))
        return task

    def cancel(self, key: str) -> None:
        """Cancel the tasks of ``key``; they may take a moment to end."""
        for task in set(self._tasks.get(key, ())):
            task.cancel()

    async def wait(self) -> None:
        """Wait until every task has ended, including those started meanwhile."""
        while tasks := set(self):
            await asyncio.wait(tasks)

    async def aclose(self) -> None:
        """Cancel every task and wait until they have ended. Repeatable."""
        for key in self.keys:
            self.cancel(key)
        await self.wait()

    def _ended(self, key: str, task: asyncio.Task[None]) -> None:
        tasks = self._tasks[key]
        tasks.discard(task)
        if not tasks:
            del self._tasks[key]
        report_failure(task)


def report_failure(task: asyncio.Task[Any]) -> None:
    """Log the exception of a failed background task that is not awaited. For ``add_done_callback``."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed", task.get_name(), exc_info=error)


async def finish(task: asyncio.Task[Result]) -> Result:
    """The task's result, awaited to the end. Cancellation of the waiter is delivered only afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen: the waiter gets the cancellation
        raise cancelled
    return task.result()


async def unless_lost(work: Awaitable[Result], lost: Awaitable[AgentEnvError]) -> Result:
    """The result of ``work``. When ``lost`` returns first, a copy of its error is raised and the work is cancelled;
    either way both have ended then."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(lost)
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise watching.result().copy()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
