"""``python -m examples.repair`` as people run it: options, a real model's server, Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentenv.testing import Call, Reply, ScriptedPolicy
from tests.integration.repair_tasks import PACKAGE, made
from tests.integration.test_env_local import leftovers
from tests.waiting import until

ROOT = Path(__file__).parents[2]
SMALL = ("--package", PACKAGE, "--groups", "1", "--group-size", "2", "--slots", "2")


@asynccontextmanager
async def demo(directory: Path, *arguments: str, **env: str) -> AsyncIterator[asyncio.subprocess.Process]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "examples.repair", "--out", str(directory / "out"), *arguments),
        cwd=ROOT,
        env={**inherited, "AGENTENV_STATE_DIR": str(directory / "state"), "COLUMNS": "200", **env},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


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
async def test_wrong_options_are_named_and_run_nothing(
    tmp_path: Path, arguments: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    async with demo(tmp_path, *arguments, **env) as process:
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert said in errors.decode()
    assert "Traceback" not in errors.decode()
    assert not (tmp_path / "out" / "rollouts.jsonl").exists()


@pytest.mark.timeout(300)
async def test_a_model_plays_through_the_same_environment(tmp_path: Path) -> None:
    made()  # so that the demo finds them in the cache
    player = [Reply("", (Call("bash", {"command": "python3 -m pytest -q 2>&1 | tail -n 1"}),)), Reply("I give up")]
    async with ScriptedPolicy({"*": [player]}) as server:
        env = {"OPENAI_BASE_URL": server.base_url, "OPENAI_MODEL": "some-model", "OPENAI_API_KEY": "sk-secret"}
        async with demo(tmp_path, *SMALL, **env) as process:
            printed, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    group = json.loads((tmp_path / "out" / "rollouts.jsonl").read_text())
    assert [t["score"] for t in group["trajectories"]] == [0.0, 0.0]
    first = group["trajectories"][0]["steps"][0]["tool_calls"][0]["result"]["stdout"]
    assert "failed" in first
    assert "passed" in first
    page = (tmp_path / "out" / "report.html").read_text()
    assert "some-model" in page
    assert "No model was involved" not in page
    assert "sk-secret" not in page + printed.decode() + errors.decode()
    assert group["item_id"] in printed.decode()
    assert leftovers(tmp_path) == []


@pytest.mark.timeout(300)
async def test_the_tools_that_were_used_are_named_and_screens_are_kept(tmp_path: Path) -> None:
    made()
    old = tmp_path / "out" / "recordings" / "of-an-earlier-demo.cast"
    old.parent.mkdir(parents=True)
    old.touch()
    async with demo(tmp_path, *SMALL, "--groups", "3", "--group-size", "1") as process:
        printed, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    groups = [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]
    assert [t["score"] for group in groups for t in group["trajectories"]] == [1.0, 1.0, 1.0]
    page = (tmp_path / "out" / "report.html").read_text()
    for tool in ("terminal", "process", "tmux", "patch", "bug_report"):
        assert f"{tool} " in printed.decode().partition("tools ")[2].splitlines()[0]
        assert f'"tool":"{tool}"' in page.replace('": "', '":"')
    [screen] = (tmp_path / "out" / "recordings").iterdir()
    header, *events = (json.loads(line) for line in screen.read_text().splitlines())
    assert header["version"] == 2
    assert any("(Pdb)" in text for _, _, text in events)
    assert str(screen.parent) in printed.decode()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_ended_by_a_signal_it_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    made()
    async with demo(tmp_path, *SMALL, "--group-size", "4") as process:
        await until(lambda: leftovers(tmp_path) != [], deadline_s=90)
        process.send_signal(number)
        _, errors = await process.communicate()
    assert process.returncode == 128 + number
    assert "Traceback" not in errors.decode()
    await until(lambda: leftovers(tmp_path) == [], deadline_s=20)
