"""What a user sees of ``process``, ``serve`` and ``evaluate``: how far they are, and what came of them.

On a terminal one line is kept up to date; elsewhere a line is written per group, fewer the longer a run takes.
Progress goes to stderr, the results at the end to stdout.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from atroposlib.envs import base as atropos
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from agentenv.agent import failure_log
from agentenv.agent.failure_log import MOST_KINDS, is_shown, same_kind
from agentenv.agent.program_totals import program_rows
from agentenv.agent.results import Results, counted, faults_text, one_line, scored_text, scores_text
from agentenv.agent.transcript import Transcript
from agentenv.config import debug
from agentenv.durations import duration

LEAST_GAP = 0.02
"""Without a terminal a line comes no sooner than this part of the run's time after the one before: at most 35 lines
each time the run becomes twice as long."""
ERRORS_SHOWN = 10
MOST_PASS_AT = 8
"""Estimates of pass@k that are shown one by one."""
LEAST_SECRET = 8
"""Characters of a secret that is looked for in a log: shorter ones are words, such as ``unused``."""


@dataclass(frozen=True)
class Ending:
    """What a command says at its end beside its results."""

    files: Sequence[tuple[str, str]] = ()
    """(what, where) of what was written outside the run's directory."""
    then: Sequence[str] = ()
    """Commands to go on with."""
    run: str = ""
    """The run's id, where it has a directory, or its records lie among those of others."""
    directory: str = ""


class RunProgress:
    """The progress of one command. Does nothing outside :meth:`shown`, so an environment that is used without atropos'
    commands prints nothing."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.results = Results()
        self._as_json = as_json
        self._shown: _Shown | None = None
        self._took_s = 0.0

    @contextmanager
    def shown(
        self, verb: str, about: str, goal: int | None, ending: Callable[[bool], Ending] = lambda _: Ending()
    ) -> Iterator[None]:
        """Show the progress of ``verb`` within the body, and the results at its end, however it ends.

        ``about`` says what is run. ``goal`` is the number of groups, None if it is not known. ``ending`` is called at
        the end, with whether something is missing.
        """
        self.results = Results.of(verb)
        self._shown = _Shown(Console(stderr=True, highlight=False, emoji=False), verb, goal)
        self._shown.say(f"{verb}: {about}")
        incomplete = True
        try:
            with self._shown.live():
                yield
            incomplete = bool(self.results.missing.text())
        finally:
            self._took_s, self._shown = self._shown.elapsed_s(), None
            end = ending(incomplete)
            if self._as_json:
                print_rows(self.document(end).items(), as_json=True)
            elif self.results.rollouts or end.directory:
                print_rows(result_rows(self.results, self._took_s, end))

    def document(self, end: Ending) -> dict[str, Any]:
        """The results so far, as ``--json`` prints them."""
        took_s = self._shown.elapsed_s() if self._shown is not None else self._took_s
        return result_document(self.results, took_s, end)

    @property
    def verb(self) -> str:
        """The command that runs; empty outside :meth:`shown`."""
        return self._shown.verb if self._shown is not None else ""

    def say(self, text: str) -> None:
        """Write a line."""
        if self._shown is not None:
            self._shown.say(text)

    def earlier(self, transcripts: Sequence[Transcript]) -> None:
        """A group has finished before this run was resumed."""
        self.results.add(transcripts)
        if self._shown is not None:
            self._shown.earlier = self.results.groups

    def forget(self) -> None:
        """There are no results: what was to be resumed is refused."""
        self.results = Results.of(self.verb)

    def add(self, item: str, transcripts: Sequence[Transcript]) -> None:
        """A group has finished, with or without scores."""
        self.results.add(transcripts)
        if self._shown is not None:
            self._shown.group(item, transcripts, self.results)


class _Shown:
    """The line of a command that runs."""

    def __init__(self, console: Console, verb: str, goal: int | None) -> None:
        self.verb = verb
        self.earlier = 0
        """Groups from before this run was resumed."""
        self._console = console
        self._goal = goal
        self._began = time.monotonic()
        self._said = self._began
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bars = Progress(*columns, console=console, transient=True)
        self._bar = self._bars.add_task(verb, total=goal)

    def live(self) -> Progress | nullcontext[None]:
        return self._bars if self._console.is_terminal else nullcontext()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def group(self, item: str, transcripts: Sequence[Transcript], results: Results) -> None:
        mean = "no score yet" if results.mean is None else f"mean score {results.mean:.3g}"
        faults = f", faults: {faults_text(results.faults)}" if results.faults else ""
        self._bars.update(self._bar, completed=results.groups, description=escape(f"{self.verb}: {mean}{faults}"))
        now = time.monotonic()
        ended = results.groups == self._goal
        if self._console.is_terminal or (not ended and now - self._said < LEAST_GAP * (now - self._began)):
            return
        self._said = now
        done = f"{results.groups}/{self._goal}" if self._goal is not None else str(results.groups)
        scores = scores_text(transcripts) if any(t.score is not None for t in transcripts) else "no score"
        left = self._left(results.groups - self.earlier, results.groups)
        self.say(f"group {done}: {item[:60]}: {scores}; {mean}{faults}; {duration(self.elapsed_s())}{left}")

    def _left(self, done_here: int, done: int) -> str:
        if self._goal is None or done_here < 1 or done >= self._goal:
            return ""
        return f", about {duration(self.elapsed_s() / done_here * (self._goal - done))} left"


def print_rows(rows: Iterable[tuple[str, Any]], *, as_json: bool = False) -> None:
    """Write (name, value) to stdout, a line each, or all as one JSON document."""
    if as_json:
        sys.stdout.write(f"{json.dumps(dict(rows))}\n")
        return
    console = Console(highlight=False, emoji=False)
    for name, text in rows:
        console.print(f"{name:<8} {text}", markup=False, soft_wrap=True)


def print_models(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table of the runs of several models, to stdout."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    last = max((int(k) for row in rows for k in row.get("pass_at") or ()), default=1)
    for heading in ("model", "mean", *([f"pass@{last}"] if last > 1 else []), "scored", "faults", "state", "run"):
        table.add_column(heading, no_wrap=heading != "faults", overflow="fold")
    for row in rows:
        error = f" ± {row['stderr']:.3f}" if row.get("stderr") is not None else ""
        mean = f"{row['mean']:.3f}{error}" if row.get("mean") is not None else "–"
        at_last = [f"{row['pass_at'][str(last)]:.3f}" if str(last) in (row.get("pass_at") or {}) else "–"]
        scored = f"{row['scored']} of {row['rollouts']}" if "scored" in row else "–"
        faults = faults_text(Counter(row.get("faults", {})))
        found = [row["model"], mean, *at_last * (last > 1), scored, faults, row["state"], row["run"] or "–"]
        table.add_row(*map(escape, found))
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, 200)  # nothing is folded in a file
    console.print(table)


def result_rows(results: Results, took_s: float, end: Ending) -> list[tuple[str, str]]:
    """(name, text) of every line that is printed at the end of a command."""
    scored = scored_text(results.scored, results.rollouts, own=results.returned is not None)
    rows = [("scored", f"{scored}, in {duration(took_s)}")]
    returned = (results.returned or {}).items()
    rows += [("" if number else "returned", f"{name} {value:g}") for number, (name, value) in enumerate(returned)]
    if results.mean is not None:
        spread = f" (sd {results.deviation:.3f})" if results.deviation is not None else ""
        margin = f" ± {results.stderr:.3f}" if results.stderr is not None else ""
        rows.append(("mean", f"{results.mean:.3f}{margin}{spread}"))
    if estimates := results.pass_at():
        rows.append(("pass@k", _pass_at_text(estimates)))
    rows += results.missing.rows()
    rows += program_rows(results.programs.document())
    rows.append(("faults", faults_text(results.faults)))
    errors = results.errors.most_frequent()
    for number, error in enumerate(errors[:ERRORS_SHOWN]):
        rows.append(("" if number else "errors", f"{error.count} × {one_line(error.text)}"))
    if (more := len(errors) - ERRORS_SHOWN) > 0:
        rows.append(("", f"{more} more kinds"))
    rows += [("warning", text) for text in results.warnings()]
    rows += end.files
    if end.directory:
        rows.append(("run", end.directory))
    return rows + [("" if number else "next", command) for number, command in enumerate(end.then)]


def _pass_at_text(estimates: Mapping[int, tuple[float, int]]) -> str:
    """``pass@1 0.5, pass@2 0.75``; of many the powers of two, and the last. With a note where items are left out."""
    last, items = max(estimates), max(items for _, items in estimates.values())
    shown = [k for k in estimates if len(estimates) <= MOST_PASS_AT or k & (k - 1) == 0 or k == last]
    text = ", ".join(f"pass@{k} {estimates[k][0]:.3f}" for k in shown)
    few = items - estimates[last][1]
    return f"{text} ({counted(few, 'item')} with fewer scored attempts left out)" if few else text


def result_document(results: Results, took_s: float, end: Ending) -> dict[str, Any]:
    """What :func:`result_rows` says, for programs (``--json``)."""
    return {
        **results.document(),
        "took_s": round(took_s, 3),
        "files": dict(end.files),
        "run": end.run or None,
        "directory": end.directory or None,
    }


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stderr`` is at that moment: a line kept up to date on a terminal replaces it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        """Fixed."""


class RunLog(logging.Handler):
    """Warnings and errors of a command for the log of its run, also those that are only counted on the screen. They
    wait in memory until there is a file. A disk that is full costs lines of it, nothing else."""

    MOST_WAITING = 1000

    def __init__(self, secrets: Collection[str]) -> None:
        super().__init__(logging.INFO)
        self._secrets = sorted((each for each in secrets if len(each) >= LEAST_SECRET), key=len, reverse=True)
        self._waiting: list[str] = []
        self._path: Path | None = None
        self._file: TextIO | None = None
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(self)
        self._counted = logging.getLogger(failure_log.__name__)
        self._level_before = self._counted.level
        self._counted.setLevel(min(logging.INFO, self._counted.getEffectiveLevel()))

    def filter(self, record: logging.LogRecord) -> bool:
        """Warnings, and the failures that are only counted elsewhere."""
        return record.levelno >= logging.WARNING or record.name == failure_log.__name__

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or keep it until :meth:`open`."""
        self._write(f"{self.without_secrets(self.format(record))}\n")

    def add(self, message: str, *values: object) -> None:
        """Write an error that is not logged for the screen."""
        self.handle(logging.LogRecord(__name__, logging.ERROR, "", 0, message, values, None))

    def _write(self, text: str) -> None:
        if self._path is None:
            if len(self._waiting) < self.MOST_WAITING:
                self._waiting.append(text)
            return
        with suppress(OSError):
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8", errors="backslashreplace")
            self._file.write(text)
            self._file.flush()

    def open(self, path: Path) -> None:
        """Append to this file from now on; it is made with its first line."""
        self._path = path
        waiting, self._waiting = self._waiting, []
        for text in waiting:
            self._write(text)

    def without_secrets(self, text: str) -> str:
        """The text with stars in place of every secret that the command was given."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def close(self) -> None:
        """Stop. Repeatable."""
        if self in logging.getLogger().handlers:
            logging.getLogger().removeHandler(self)
            self._counted.setLevel(self._level_before)
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()
        super().close()


class _Repetitions(logging.Filter):
    """Of other packages' messages that differ in nothing but numbers the 1st, 10th, 100th, ... is shown: atropos logs
    some for every group."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to show it."""
        if record.name.split(".")[0] == "agentenv":
            return True
        kind = same_kind(record.getMessage())
        if kind in self._seen or len(self._seen) < MOST_KINDS:
            self._seen[kind] += 1
        return is_shown(self._seen[kind])


def silence_atropos() -> None:
    """atropos prints all settings that it starts with, and warns of a server on this machine: not without
    ``AGENTENV_DEBUG``."""
    if not debug():
        atropos.rprint = lambda *_, **__: None
        warnings.filterwarnings("ignore", message="You are using a local Base URL", category=UserWarning)


def set_up_logging() -> None:
    """Warnings and errors to stderr, of atropos too, whose loggers are set to DEBUG each. With ``AGENTENV_DEBUG``
    everything. Handlers that a program has installed already are kept."""
    root = logging.getLogger()
    if debug():
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("agentenv").setLevel(logging.DEBUG)
        return
    if not root.handlers:
        handler = _Stderr()
        handler.setLevel(logging.WARNING)
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        handler.addFilter(_Repetitions())
        root.addHandler(handler)
    for name in list(logging.Logger.manager.loggerDict):
        if name.split(".")[0] == "atroposlib":
            logging.getLogger(name).setLevel(logging.WARNING)
