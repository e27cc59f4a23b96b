"""Bars: redrawn on a terminal, and lines from time to time where nothing can be redrawn."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from agentenv.cli import progress
from agentenv.cli.progress import Bars


def lines_of(monkeypatch: pytest.MonkeyPatch, *, terminal: bool, still_s: float) -> list[str]:
    file = io.StringIO()
    monkeypatch.setattr(progress, "err", lambda: Console(file=file, width=100, force_terminal=terminal))
    monkeypatch.setattr(progress, "_STILL_S", still_s)
    bars = Bars(transient=True)  # not started: only what is printed beside the bars
    rollouts, tasks = bars.add_task("rollouts", total=3), bars.add_task("tasks", total=None)
    bars.advance(rollouts)
    bars.advance(rollouts)
    bars.update(tasks, description="verifying [1] task")
    return file.getvalue().splitlines()


def test_what_moves_is_a_line_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    said = lines_of(monkeypatch, terminal=False, still_s=0.0)
    assert said == ["  rollouts 1/3", "  rollouts 2/3", "  verifying [1] task"]


def test_an_ended_bar_is_printed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(progress, "err", lambda: Console(file=file, width=100, force_terminal=False))
    monkeypatch.setattr(progress, "_STILL_S", 0.0)
    with Bars() as bars:
        bar = bars.add_task("rollouts", total=2)
        bars.advance(bar)
        bars.advance(bar)
    said = file.getvalue().splitlines()
    assert said[0] == "  rollouts 1/2"
    assert ["2/2" in line for line in said] == [False, True]


def test_only_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_of(monkeypatch, terminal=False, still_s=3600.0) == []


def test_a_terminal_has_the_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_of(monkeypatch, terminal=True, still_s=0.0) == []
