"""Shows the steps of long work: one line each with its time. On a terminal the current line is animated; elsewhere
a long step is reported from time to time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from agentenv.cli.output import err
from agentenv.image.progress import BuildStep, Report, silent

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
    with Progress(*columns, console=console, transient=True) as progress:
        lines = _Lines(progress)
        try:
            yield lines.report
        except BaseException:
            lines.finish("[red]✗[/]")
            raise
        lines.finish()


class _Lines:
    """The running step as an animated line; finished steps as permanent lines."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)
        self._name = ""
        self._began = self._said = time.monotonic()

    def report(self, step: BuildStep) -> None:
        """Show this step."""
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
