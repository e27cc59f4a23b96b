"""Waits for a farm's containers, showing a progress bar."""

from __future__ import annotations

import asyncio

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from agentenv.cli.output import err
from agentenv.errors import SandboxUnavailableError
from agentenv.slots.backends.base import ContainerEvent, ContainerGone, ContainerStarted, StartFailed


class Arrival:
    """Waits for containers to become ready, with a progress bar; a context manager."""

    def __init__(self, goal: int, doing: str) -> None:
        self.goal = goal
        self.running: set[str] = set()
        self._last_failure: StartFailed | None = None
        self._changed = asyncio.Event()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=err(), transient=True)
        self._bar = self._progress.add_task(doing, total=goal)

    def __enter__(self) -> Arrival:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def describe(self, doing: str) -> None:
        """What is being waited for."""
        self._progress.update(self._bar, description=doing)

    def handle(self, event: ContainerEvent) -> None:
        """Process an event."""
        match event:
            case ContainerStarted(handle):
                self.running.add(handle.id)
            case ContainerGone(container):
                self.running.discard(container)
            case StartFailed():
                self._last_failure = event
                if not self._progress.finished and not event.permanent:
                    self._progress.console.print(f"[yellow]waiting:[/] {escape(event.reason)}", soft_wrap=True)
        self._progress.update(self._bar, completed=len(self.running))
        self._changed.set()

    async def complete(self, timeout_s: float) -> None:
        """Wait until all are ready. Raises SandboxUnavailableError when they never will be, or not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.running) < self.goal:
                    failed = self._last_failure
                    if failed is not None and failed.permanent and not self.running:
                        raise SandboxUnavailableError(failed.reason, next_step=failed.next_step)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            failed = self._last_failure
            because = f"; last: {failed.reason}" if failed is not None else ""
            raise SandboxUnavailableError(
                f"{len(self.running)} of {self.goal} containers are ready after {timeout_s:g} s{because}",
                next_step=failed.next_step if failed is not None and failed.next_step else "raise --timeout",
            ) from None
