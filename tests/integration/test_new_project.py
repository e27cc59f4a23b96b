"""``agentenv new``: the project runs at once, as its README says."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentenv.cli.app import app
from tests.programs import program
from tests.waiting import START_S, until

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "docs/environments.md", "docs/recipes.md")]
FEWER_KEYWORDS = """
from typing import Any

from agentenv import AgentEnv, ToolContext


class Plain(AgentEnv):
    def get_next_item(self) -> dict[str, Any]:
        return {}

    def prepare(self, item: Any) -> None:
        pass

    def setup_trajectory_workspace(self, item: Any) -> dict[str, Any]:
        return {}

    def verify_and_score_trajectory(self, item: Any, final_response: str) -> float:
        return 1.0

    def score_destroyed_slot(self, item: Any, agent_result: Any) -> None:
        pass


class Async(AgentEnv):
    async def setup_trajectory_workspace(self, item: Any, *, exec_tool: ToolContext, **_: Any) -> None:
        await exec_tool.remove("x")

    async def verify_and_score_trajectory(self, item: Any, final_response: str, *, workspace_meta: Any) -> float:
        return 1.0
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    done = CliRunner().invoke(app, ["new", str(tmp_path / "two-sums")])
    assert done.exit_code == 0, done.stderr
    return tmp_path / "two-sums"


def test_its_names_are_those_of_its_directory(project: Path) -> None:
    assert {path.name for path in project.iterdir()} >= {
        "two_sums.py",
        "test_two_sums.py",
        "README.md",
        "pyproject.toml",
        ".gitignore",
    }
    for path in project.iterdir():
        assert not re.search(r"my[_-]env|MyEnv", path.read_text()), path
    assert "class TwoSums(AgentEnv)" in (project / "two_sums.py").read_text()
    assert 'name = "two-sums"' in (project / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("name", "said"), [("2x", "is not a valid module name"), ("class", "not a valid module name"), (".", "not empty")]
)
def test_a_directory_that_will_not_do_is_refused(project: Path, name: str, said: str) -> None:
    where = project if name == "." else project.parent / name
    done = CliRunner().invoke(app, ["new", str(where)])
    assert (done.exit_code, said in done.stderr) == (2, True), done.stderr
    assert where == project or not where.exists()


@pytest.mark.parametrize("name", ["agentenv", "os", "pytest", "pytest-asyncio", "atroposlib", "__main__", "wandb"])
def test_a_name_that_would_hide_a_module_is_refused(tmp_path: Path, name: str) -> None:
    done = CliRunner().invoke(app, ["new", str(tmp_path / name)])
    assert done.exit_code == 2, done.output
    assert f"would hide the module '{name.replace('-', '_')}'" in " ".join(done.stderr.split())
    assert not (tmp_path / name).exists()


def test_a_project_in_the_empty_directory_one_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here := tmp_path / "two_sums_here").mkdir()
    monkeypatch.chdir(here)
    done = CliRunner().invoke(app, ["new", "."])
    assert done.exit_code == 0, done.stderr
    assert (here / "two_sums_here.py").exists()


def test_an_empty_directory_on_the_path_is_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sums").mkdir()
    assert CliRunner().invoke(app, ["new", str(tmp_path / "sums")]).exit_code == 0
    assert CliRunner().invoke(app, ["new", str(tmp_path / "elsewhere/sums")]).exit_code == 2


def test_what_its_test_needs_is_named_where_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentenv.cli.new._TEST_NEEDS", ("no_such_module",))
    done = CliRunner().invoke(app, ["new", str(tmp_path / "one")])
    assert "one && pip install 'agentenv[env]' pytest pytest-asyncio && python -m pytest" in done.stderr


def test_its_test_passes(project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"], cwd=project, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr


def test_hooks_as_documented_pass_a_strict_type_checker(project: Path, tmp_path: Path) -> None:
    """The template, the pages' environments, and hooks with fewer keywords than there are, plain and async."""
    blocks = [re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL) for page in PAGES]
    environments = [block for page in blocks for block in page if "(AgentEnv)" in block]
    assert len(environments) == 5
    for number, block in enumerate((*environments, FEWER_KEYWORDS)):
        (project / f"shown_{number}.py").write_text(block)
    (project / "wrong.py").write_text(FEWER_KEYWORDS.replace("-> float", "-> str").replace("1.0", "'1'"))
    options = [f"--cache-dir={tmp_path}", "--follow-imports=silent", "--strict"]
    untyped = ["--allow-untyped-defs", "--allow-untyped-calls"]  # as some pages are written
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *untyped, *(path.name for path in project.glob("*.py"))],
        cwd=project, env={**os.environ, "MYPYPATH": str(ROOT / "src")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    errors = re.findall(r"^(.*?):\d+: error: .*\[(.*)\]$", done.stdout, re.MULTILINE)
    assert errors == [("wrong.py", "override")] * 2, done.stdout + done.stderr


async def test_its_command_runs_with_players_as_its_readme_says(project: Path, tmp_path: Path) -> None:
    readme = (project / "README.md").read_text()
    shown = re.findall(r"^    python (.+[^\\\n])$", readme, re.MULTILINE)
    test, policy, command = map(shlex.split, shown)
    assert test == ["-m", "pytest"]
    policy[policy.index("--port") + 1] = "0"
    env = {**os.environ, "AGENTENV_STATE_DIR": str(tmp_path / "state")}
    said, log = tmp_path / "policy.txt", tmp_path / "log.txt"
    async with program(*policy, cwd=project, env=env, stdout=said), asyncio.timeout(START_S):
        await until(lambda: said.exists() and "base_url" in said.read_text())
        url = json.loads(said.read_text().splitlines()[-1])["base_url"]
        settings = project / "scripted.yaml"
        settings.write_text(settings.read_text().replace("http://127.0.0.1:9004/v1", url))
        async with program(*command, cwd=project, env=env, stdout=log) as process:
            assert await process.wait() == 0, log.read_text()
    [run] = (project / "runs").iterdir()
    groups = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert [[member["score"] for member in group["trajectories"]] for group in groups] == [[1.0, 0.0]] * 3


async def test_without_a_verb_it_says_which_there_are(project: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    async with program("two_sums.py", cwd=project, env=os.environ, stdout=log) as process, asyncio.timeout(START_S):
        assert await process.wait() != 0
    assert "usage: two_sums.py serve|process|evaluate" in log.read_text()
    assert "Traceback" not in log.read_text()
