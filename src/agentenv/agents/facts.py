"""What is known of each recipe: the version that was run and how that went, and how the program's own log tells the
number of its turns, which has to be the gateway's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from agentenv.agent.program import STDOUT, AgentProgram
from agentenv.agents.recipes import (
    CODEX_HOME,
    STATE,
    claude_code,
    codex,
    gemini_cli,
    mini_swe_agent,
    opencode,
    openhands,
    qwen_code,
)

Status = Literal["proved", "unstable", "unsupported", "not run"]
"""*Proved*: it has solved a task in a slot without network, with each dialect, and its log has the gateway's turns.
*Unstable*: it has run, but nothing tries it again, or not always so. *Unsupported*: it cannot be run in a slot.
*Not run*: written by its documentation."""


@dataclass(frozen=True)
class OwnLog:
    """A program's own record of what it did. ``where``: its stdout, or a file of the slot, whose name may have ``*``.
    ``turns``: the number of answers of a model that such a text tells; raises ValueError or LookupError when it does
    not tell any."""

    where: str
    turns: Callable[[str], int]


@dataclass(frozen=True)
class Recipe:
    """A program, and how it is started for each dialect (``programs``, by the dialect's name). ``needs``: what an image
    has to hold beside the program. ``command_tool``: the tool by which a model runs commands, and the tool's argument.
    ``last_command``: the one by which a model ends it, where no answer without a call does. ``packaged``:
    ``scripts/agent-programs`` makes a tree of it, with node's beside it if ``node``. ``memory_mib``: of a slot in which
    it has been run, at least."""

    name: str
    version: str
    licence: str
    status: Status
    needs: str
    programs: Mapping[str, Callable[..., AgentProgram]]
    command_tool: tuple[str, str]
    log: OwnLog | None = None
    last_command: str = ""
    packaged: bool = True
    node: bool = False
    note: str = ""
    memory_mib: int = 512


def _of_mini(text: str) -> int:
    return int(json.loads(text)["info"]["model_stats"]["api_calls"])


def _of_codex(text: str) -> int:
    return _count(text, lambda line: line["type"] == "token_usage_record")


def _of_opencode(text: str) -> int:
    return _count(text, lambda line: line["type"] == "step_finish")


def _of_qwen(text: str) -> int:
    """Requests but failed ones, of all its agents."""
    models = json.loads(text)[-1]["stats"]["models"].values()
    return sum(model["api"]["totalRequests"] - model["api"]["totalErrors"] for model in models)


def _of_gemini(text: str) -> int:
    models = json.loads(text)["stats"]["models"].values()
    return sum(model["api"]["totalRequests"] - model["api"]["totalErrors"] for model in models)


def _of_openhands(text: str) -> int:
    """Answers in its events, each a line of JSON among others."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    found = {line["llm_response_id"] for line in lines if line.get("llm_response_id")}
    if not found:
        raise LookupError("no turn")
    return len(found)


def _of_claude(text: str) -> int:
    return int(json.loads(text)["num_turns"])


def _count(text: str, is_turn: Callable[[dict[str, Any]], bool]) -> int:
    found = sum(is_turn(json.loads(line)) for line in text.splitlines())
    if not found:
        raise LookupError("no turn")
    return found


_NODE: Final = "glibc, libstdc++"

RECIPES: Final[Mapping[str, Recipe]] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="mini-swe-agent",
            version="2.4.6",
            licence="MIT",
            status="proved",
            needs="Python 3.11",
            programs={"chat": mini_swe_agent},
            command_tool=("bash", "command"),
            log=OwnLog(f"{STATE}/mini.traj.json", _of_mini),
            last_command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
        ),
        Recipe(
            name="codex",
            version="0.169.0",
            licence="Apache-2.0",
            status="proved",
            needs="bash",
            programs={"responses": codex},
            command_tool=("exec_command", "cmd"),
            log=OwnLog(f"{CODEX_HOME}/sessions/*/*/*/*.jsonl", _of_codex),
        ),
        Recipe(
            name="opencode",
            version="1.18.33",
            licence="MIT",
            status="proved",
            needs=_NODE,
            programs={api: partial(opencode, api) for api in ("chat", "messages", "responses")},
            command_tool=("bash", "command"),
            log=OwnLog(STDOUT, _of_opencode),
            memory_mib=1024,
        ),
        Recipe(
            name="qwen-code",
            version="0.15.10",
            licence="Apache-2.0",
            status="proved",
            needs=_NODE,
            programs={"chat": qwen_code},
            command_tool=("run_shell_command", "command"),
            log=OwnLog(STDOUT, _of_qwen),
            node=True,
            memory_mib=1024,
        ),
        Recipe(
            name="gemini-cli",
            version="0.61.0",
            licence="Apache-2.0",
            status="proved",
            needs=_NODE,
            programs={"google": gemini_cli},
            command_tool=("run_shell_command", "command"),
            log=OwnLog(STDOUT, _of_gemini),
            node=True,
        ),
        Recipe(
            name="claude-code",
            version="2.1.197",
            licence="proprietary",
            status="not run",
            needs=_NODE,
            programs={"messages": claude_code},
            command_tool=("Bash", "command"),
            log=OwnLog(STDOUT, _of_claude),
            packaged=False,
            note="whoever has the right to run it installs it",
        ),
        Recipe(
            name="openhands",
            version="1.16.0",
            licence="MIT",
            status="unstable",
            needs="Python 3.12",
            programs={"chat": openhands},
            command_tool=("terminal", "command"),
            log=OwnLog(STDOUT, _of_openhands),
            packaged=False,
            memory_mib=1024,
            note="run by hand only; it looks for skills on the network when it starts, and goes on without",
        ),
    )
}
"""By their names."""
