"""A check of a recipe tells what is wrong with the program that it starts. On fake slots, with a small program."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agentenv import AsyncSandbox
from agentenv.agent.program import STDOUT, AgentProgram
from agentenv.agents import RECIPES
from agentenv.agents.check import Checked, Mender, checked
from agentenv.agents.facts import OwnLog, Recipe
from agentenv.cli.app import app
from agentenv.errors import TaskError

SMALL = Path(__file__).parents[2] / "small_agent.py"


def small(behaviour: str, turns: Callable[[str], int] = lambda _: 4) -> Recipe:
    program = AgentProgram(
        ["python3", "small_agent.py", behaviour, "{task}"],
        env={"OPENAI_BASE_URL": "{url}", "OPENAI_API_KEY": "{key}"},
        plain_files={"/workspace/small_agent.py": SMALL.read_text()},
    )
    return dataclasses.replace(
        RECIPES["mini-swe-agent"],
        name="small",
        programs={"chat": lambda: program},
        last_command="",
        log=OwnLog(STDOUT, turns),
    )


async def check(behaviour: str, turns: Callable[[str], int] = lambda _: 4) -> Checked:
    async with AsyncSandbox("fake") as box:
        return await checked(small(behaviour, turns), "chat", box)


async def test_a_program_that_does_what_it_should_has_no_faults() -> None:
    found = await check("plain")
    assert (found.faults, found.solved, found.turns, found.own_turns) == ([], True, 4, 4)
    assert found.dialects == {"chat"}
    assert found.program.stdout == "calc.py adds now.\n"


async def test_its_own_log_has_to_tell_the_same_turns() -> None:
    assert (await check("plain", lambda _: 3)).faults == ["the gateway saw 4 turns, its own log has 3"]
    assert (await check("plain", json.loads)).faults == ["the gateway saw 4 turns, its own log has None"]


async def test_another_end_and_refusals_are_faults() -> None:
    assert (await check("failing")).faults == ["it ended with 7 (program_failed)"]
    found = await check("endless", lambda _: 20)
    assert not found.solved
    assert [fault.partition(" ")[0] for fault in found.faults][:3] == ["it", "it", "requests"]


async def test_a_program_that_asks_no_model_says_why() -> None:
    with pytest.raises(TaskError, match="ended with 3 before its first turn: no such module"):
        await check("silent")


async def test_the_model_gives_each_tool_what_it_asks_for() -> None:
    kinds = {
        "cmd": {"type": "string"},
        "why": {"type": "string"},
        "behind": {"type": "boolean"},
        "s": {"type": "integer"},
    }
    parameters = {"type": "object", "properties": kinds, "required": ["cmd", "why", "behind", "s"]}
    tool = {"type": "function", "function": {"name": "exec_command", "parameters": parameters}}
    model = Mender(RECIPES["codex"])
    (call,) = (await model.complete([{"role": "user", "content": "go"}], [tool])).message["tool_calls"]
    given = json.loads(call["function"]["arguments"])
    assert given.pop("cmd").startswith("cat calc.py")
    assert given == {"why": "run", "behind": False, "s": 1}
    assert "tool_calls" not in (await model.complete([{"role": "user", "content": "A title?"}], [])).message


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["agents", *words], env={"COLUMNS": "1000"})


def test_recipes_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(tmp_path))
    (tmp_path / f"agents/codex-{RECIPES['codex'].version}").mkdir(parents=True)
    listed = json.loads(run("list", "--json").stdout)
    assert {each["name"]: each["on_this_machine"] for each in listed} == {name: name == "codex" for name in RECIPES}
    assert listed[2]["dialects"] == ["chat", "messages", "responses"]
    lines = run("list").stdout.splitlines()
    assert len(lines) == 1 + len(RECIPES)
    assert lines[1].split()[:3] == ["mini-swe-agent", RECIPES["mini-swe-agent"].version, "MIT"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nobody"], "there are mini-swe-agent, codex"),
        (["codex", "--dialect", "chat"], "use one of responses"),
        (["codex"], "run scripts/agent-programs codex"),
        (["claude-code"], "nothing makes a tree of 'claude-code'"),
    ],
)
def test_what_cannot_be_checked_says_what_can(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(tmp_path))
    result = run("check", *words)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(("behaviour", "code"), [("plain", 0), ("failing", 1), ("silent", 1)])
def test_a_check_shows_what_it_found(behaviour: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.agents.facts.RECIPES", {"small": small(behaviour)})
    monkeypatch.setattr("agentenv.agents.trees.binds", lambda name: ())
    monkeypatch.setattr("agentenv.sdk.async_sandbox.AsyncSandbox", lambda **_: AsyncSandbox("fake"))
    shown, told = run("check", "small"), run("check", "small", "--json")
    assert (shown.exit_code, told.exit_code) == (code, code)
    assert shown.stdout.startswith("bad small" if code else "good small")
    (found,) = json.loads(told.stdout)["checks"]
    assert bool(found["faults"]) == bool(code)
    assert found["dialect"] == "chat"
