from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentenv.cli.app import app
from tests.browser import synthetic


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(group.model_dump_json() + "\n" for group in synthetic.few()[:2]))
    return file


def test_the_page_is_written_beside_the_rollouts(rollouts: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(rollouts), "--title", "Mine"])
    page = rollouts.with_suffix(".html")
    assert (result.exit_code, result.stdout.strip()) == (0, str(page))
    assert "<title>Mine</title>" in page.read_text()


def test_its_place_can_be_named(rollouts: Path, tmp_path: Path) -> None:
    page = tmp_path / "a" / "b.html"
    result = CliRunner().invoke(app, ["report", str(rollouts), "--out", str(page), "--json"])
    assert json.loads(result.stdout) == {"page": str(page), "groups": 2, "rollouts": 7}
    assert page.exists()


@pytest.mark.parametrize(("text", "said"), [(None, "is not a file"), ('{"x": 1}\n', "is not a group record")])
def test_what_holds_no_rollouts_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "other.jsonl"
    if text is not None:
        file.write_text(text)
    result = CliRunner().invoke(app, ["report", str(file)])
    assert result.exit_code == 2
    assert said in result.stderr
    assert not file.with_suffix(".html").exists()
