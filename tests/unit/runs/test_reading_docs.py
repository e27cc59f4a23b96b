"""docs/reading-runs.md: its notebook runs, and its table of columns is that of the rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentenv.runs.frame import ROLLOUTS
from tests import run_directories

PAGE = Path(__file__).resolve().parents[3] / "docs/reading-runs.md"


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("polars")
    run_directories.several(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    cells = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(cells) == 4
    names: dict[str, Any] = {}
    for cell in cells:
        exec(cell, names)
    printed = capsys.readouterr().out
    assert "<160 rows of 2 runs: run, name, model," in printed
    assert "large-2" in printed
    assert "Difference(value=0." in printed


def test_every_column_is_explained() -> None:
    rows = re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(ROLLOUTS)
