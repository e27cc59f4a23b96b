"""Shows the steps of long work: one line each with its time. On a terminal the current line is animated; elsewhere
a long step is reported from time to time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from agentenv.cli.output import err, escape
from agentenv.errors import SandboxUnavailableError
from agentenv.image.progress import BuildStep, Report, silent
from agentenv.slots.backends.base import ContainerEvent, ContainerGone, ContainerStarted, StartFailed

_STILL_S = 15.0
"""Interval between reports of a step without a terminal."""


@contextmanager
def shown(*, quiet: bool = False) -> Iterator[Report]:
    """A callback that shows each report on stderr; with ``quiet`` it shows nothing."""
    if quiet:
        yield silent
        return
    console = err()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=console, transient=True)
    lines = _Lines(progress)
    try:
        yield lines.report
    except BaseException:
        lines.finish("[red]✗[/]")
        raise
    else:
        lines.finish()
    finally:
        if progress.live.is_started:
            progress.stop()


class Bars(Progress):
    """A bar per task of known length. Without a terminal, which redraws them, one that moves is a line until its end,
    from time to time: ``rollouts 12/32``."""

    def __init__(self, *, transient: bool = False) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=err(), transient=transient)
        self._said = time.monotonic()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """See :class:`rich.progress.Progress`."""
        super().update(task_id, **changes)
        self._say(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """See :class:`rich.progress.Progress`."""
        super().advance(task_id, advance)
        self._say(task_id)

    def _say(self, task_id: TaskID) -> None:
        task = next((task for task in self.tasks if task.id == task_id), None)
        if task is None or task.finished or self.console.is_terminal or time.monotonic() - self._said < _STILL_S:
            return
        self._said = time.monotonic()
        done = f"{task.completed:g}/{task.total:g}" if task.total is not None else ""
        self.console.print(f"  {task.description} {done}".rstrip(), soft_wrap=True)


class _Lines:
    """The running step as an animated line; finished steps as permanent lines."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)
        self._name = ""
        self._began = self._said = time.monotonic()

    def report(self, step: BuildStep) -> None:
        """Show this step."""
        if not self._progress.live.is_started:  # one that has nothing to show prints nothing
            self._progress.start()
        if step.name != self._name:
            self.finish()
            self._name, self._began = step.name, time.monotonic()
            self._said = self._began
            self._progress.reset(self._task)
        words = escape(f"{step.name}: {step.detail}" if step.detail else step.name)
        self._progress.update(self._task, description=words, completed=step.done, total=step.total or None)
        if not self._progress.console.is_terminal and time.monotonic() - self._said >= _STILL_S:
            self._said = time.monotonic()
            self._progress.console.print(f"  {words}", soft_wrap=True)

    def finish(self, mark: str = "[green]✓[/]") -> None:
        """Print the finished step."""
        if self._name:
            took_s = time.monotonic() - self._began
            self._progress.console.print(f"{mark} {escape(self._name):<10} {took_s:6.1f} s")
        self._name = ""


class Arrival:
    """Waits for containers to become ready, with a progress bar; a context manager."""

    def __init__(self, goal: int, doing: str) -> None:
        self.goal = goal
        self.running: set[str] = set()
        self._last_failure: StartFailed | None = None
        self._changed = asyncio.Event()
        self._progress = Bars(transient=True)
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
