"""``python -m examples.repair`` as people run it: options, a real model's server, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import pytest
from typer.testing import CliRunner

from agentenv.testing import Call, Reply, ScriptedPolicy
from examples.repair.__main__ import app
from tests.integration.repair_tasks import PACKAGE, made
from tests.integration.test_env_local import leftovers
from tests.programs import Forked, program
from tests.waiting import START_S, until

ROOT = Path(__file__).parents[2]
BROKEN = Path(__file__).parent / "broken_demo.py"
SMALL = ("--package", PACKAGE, "--groups", "1", "--group-size", "2", "--slots", "2")


@asynccontextmanager
async def demo(
    directory: Path, *arguments: str, env: Mapping[str, str] = MappingProxyType({}), own_interpreter: bool = False
) -> AsyncIterator[Process | Forked]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    async with program(
        *("-m", "examples.repair", "--out", str(directory / "out"), *arguments),
        cwd=ROOT,
        env={**inherited, "AGENTENV_STATE_DIR": str(directory / "state"), "COLUMNS": "200", **env},
        stdout=directory / "printed.txt",
        stderr=directory / "errors.txt",
        own_interpreter=own_interpreter,
    ) as process:
        yield process


def said_by(directory: Path) -> tuple[str, str]:
    """What the demo printed, and what of it as errors."""
    return (directory / "printed.txt").read_text(), (directory / "errors.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "env", "said"),
    [
        (("--groups", "0"), {}, "--groups"),
        (("--nonsense",), {}, "--nonsense"),
        (("--isolation", "none"), {}, "--isolation"),
        (("--model", "m"), {}, "OPENAI_BASE_URL"),
        (("--package", "nothing-like-it"), {}, "nothing-like-it"),
        ((), {"OPENAI_MODEL": "m"}, "OPENAI_BASE_URL"),
        (("--out", "/proc/nothing"), {}, "out: cannot make /proc/nothing"),
    ],
)
def test_wrong_options_are_named_and_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    for name in ("OPENAI_BASE_URL", "OPENAI_MODEL"):
        monkeypatch.delenv(name, raising=False)
    given = ["--out", str(tmp_path / "out"), *arguments]
    result = CliRunner().invoke(app, given, env={"COLUMNS": "200", **env})
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert isinstance(result.exception, SystemExit)
    assert not (tmp_path / "out" / "rollouts.jsonl").exists()


async def test_a_wrong_option_is_named_before_atropos_is_imported(tmp_path: Path) -> None:
    command = ("-X", "importtime", "-m", "examples.repair", "--package", "nothing-like-it")
    files = {"stdout": tmp_path / "printed.txt", "stderr": tmp_path / "errors.txt"}
    async with program(*command, cwd=ROOT, env=os.environ, **files, own_interpreter=True) as process:
        status = await process.wait()
    _, errors = said_by(tmp_path)
    assert status == 2
    assert "error package: there is no 'nothing-like-it'" in errors
    assert "agentenv.cli.output" in errors, "imports are listed"
    assert "atroposlib" not in errors


async def test_a_model_plays_through_the_same_environment(tmp_path: Path) -> None:
    made()  # so that the demo finds them in the cache
    player = [Reply("", (Call("bash", {"command": "python3 -m pytest -q 2>&1 | tail -n 1"}),)), Reply("I give up")]
    async with ScriptedPolicy({"*": [player]}) as server:
        env = {"OPENAI_BASE_URL": server.base_url, "OPENAI_MODEL": "some-model", "OPENAI_API_KEY": "sk-secret"}
        async with demo(tmp_path, *SMALL, env=env) as process:
            status = await process.wait()
    printed, errors = said_by(tmp_path)
    assert status == 0, errors
    group = json.loads((tmp_path / "out" / "rollouts.jsonl").read_text())
    assert [t["score"] for t in group["trajectories"]] == [0.0, 0.0]
    first = group["trajectories"][0]["steps"][0]["tool_calls"][0]["result"]["stdout"]
    assert "failed" in first
    assert "passed" in first
    page = (tmp_path / "out" / "report.html").read_text()
    assert "some-model" in page
    assert "No model was involved" not in page
    assert "sk-secret" not in page + printed + errors
    assert group["item_id"] in printed
    assert leftovers(tmp_path) == []


async def test_the_tools_that_were_used_are_named_and_screens_are_kept(tmp_path: Path) -> None:
    made()
    old = tmp_path / "out" / "recordings" / "of-an-earlier-demo.cast"
    old.parent.mkdir(parents=True)
    old.touch()
    async with demo(tmp_path, *SMALL, "--groups", "3", "--group-size", "1") as process:
        status = await process.wait()
    printed, errors = said_by(tmp_path)
    assert status == 0, errors
    groups = [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]
    assert [t["score"] for group in groups for t in group["trajectories"]] == [1.0, 1.0, 1.0]
    page = (tmp_path / "out" / "report.html").read_text()
    for tool in ("terminal", "process", "tmux", "patch", "bug_report"):
        assert f"{tool} " in printed.partition("tools ")[2].splitlines()[0]
        assert f'"tool":"{tool}"' in page.replace('": "', '":"')
    [screen] = (tmp_path / "out" / "recordings").iterdir()
    header, *events = (json.loads(line) for line in screen.read_text().splitlines())
    assert header["version"] == 2
    assert any("(Pdb)" in text for _, _, text in events)
    assert str(screen.parent) in printed


async def test_a_task_that_is_dropped_fails_the_demo_whose_last_line_says_why(tmp_path: Path) -> None:
    made()
    options = ("--out", str(tmp_path / "out"), *SMALL, "--groups", "2", "--group-size", "1")
    env = {**os.environ, "AGENTENV_STATE_DIR": str(tmp_path / "state"), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    log = tmp_path / "log.txt"
    async with program(str(BROKEN), *options, cwd=ROOT, env=env, stdout=log) as process:
        status = await process.wait()
    groups = [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]
    [dropped] = {group["item_id"] for group in groups if group["outcome"] == "retry"}
    assert [group["item_id"] == dropped for group in groups if group["outcome"] == "complete"] == [False]
    error = "TaskError: setup_trajectory_workspace raised ValueError: it was garbled"
    assert status == 1, log.read_text()
    assert log.read_text().splitlines()[-1] == f"failed 1 item without a score: {dropped} (1 × {error})"
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_ended_by_a_signal_it_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    made()
    arguments = (*SMALL, "--group-size", "4")
    async with demo(tmp_path, *arguments, own_interpreter=number == signal.SIGINT) as process:
        await until(lambda: leftovers(tmp_path) != [], deadline_s=START_S)
        process.send_signal(number)
        assert await process.wait() == 128 + number
    assert "Traceback" not in said_by(tmp_path)[1]
    await until(lambda: leftovers(tmp_path) == [], deadline_s=START_S)
