"""Runs a recipe in a slot against a scripted model that mends a bug: what a new version, or another image, does
to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from agentenv.agent.program import STDOUT
from agentenv.agent.protocols import Completion, Message, ToolDefinition
from agentenv.agent.settings import AgentSettings
from agentenv.agent.timeline import Timeline
from agentenv.agent.transcript import ProgramRecord
from agentenv.agents.facts import OwnLog, Recipe
from agentenv.agents.play import ProgramPlay, ProgramSettings
from agentenv.sdk.slot_tools import SlotTools

TASK: Final = "calc.py has a bug: make `python3 -B test_calc.py` pass."
LIMIT_S: Final = 180.0
_PLACE: Final = "/workspace"
"""Made if an image has none."""
_FILES: Final = {
    f"{_PLACE}/calc.py": "def add(a, b):\n    return a - b\n",
    f"{_PLACE}/test_calc.py": "from calc import add\n\nassert add(2, 3) == 5, add(2, 3)\nprint('ok')\n",
}
_PROVES: Final = "python3 -B test_calc.py"
MENDS: Final = (
    ("I look at the code.", 'cat calc.py; python3 -B test_calc.py; ls "$PWD" # ü <&>'),
    ("Found it:  a minus.  ", "sed -i 's/a - b/a + b  # mended/' calc.py"),
    ("", _PROVES),
)
"""What the model says, and the command that it runs."""


@dataclass(frozen=True)
class Checked:
    """One run of a recipe. ``solved``: the bug is mended. ``turns`` are those at the gateway; ``own_turns`` those that
    the program's own log tells, None where it tells none."""

    solved: bool
    turns: int
    own_turns: int | None
    duration_s: float
    finish_reason: str
    dialects: frozenset[str]
    program: ProgramRecord

    @property
    def faults(self) -> list[str]:
        """What is not as it has to be, in words."""
        record = self.program
        found = {
            "it did not mend the bug": not self.solved,
            f"it ended with {record.exit_code} ({self.finish_reason})": self.finish_reason != "stop",
            f"requests were refused: {'; '.join(record.refused)}": bool(record.refused),
            f"the gateway saw {self.turns} turns, its own log has {self.own_turns}": self.turns != self.own_turns,
        }
        return [text for text, is_so in found.items() if is_so]


async def checked(recipe: Recipe, api: str, slot: SlotTools) -> Checked:
    """Run a recipe by this dialect of its ``programs``, in a slot that has the program and Python. Raises KeyError for
    another dialect; as :meth:`ProgramPlay.run`, a TaskError when the program asks no model."""
    program = replace(recipe.programs[api](), cwd=_PLACE)
    for path, text in _FILES.items():
        await slot.write_file(path, text)
    agent, settings = AgentSettings(max_steps=20, max_s=LIMIT_S), ProgramSettings(output_bytes=4 * 1024 * 1024)
    play = ProgramPlay(program, slot, lambda: Mender(recipe), agent, settings, Timeline())
    result = await play.run(TASK)
    record = result.program
    assert record is not None  # a play has one
    proof = await slot.exec(["sh", "-c", _PROVES], cwd=_PLACE)
    return Checked(
        solved=proof.exit_code == 0,
        turns=len(result.steps),
        own_turns=None if recipe.log is None else await _own_turns(recipe.log, record, slot),
        duration_s=record.duration_s,
        finish_reason=result.finish_reason,
        dialects=frozenset(step.dialect for step in result.steps),
        program=record,
    )


async def _own_turns(log: OwnLog, record: ProgramRecord, slot: SlotTools) -> int | None:
    text = record.stdout
    if log.where != STDOUT:
        text = (await slot.exec(["sh", "-c", f"cat {log.where}"])).stdout
    try:
        return log.turns(text)
    except (ValueError, LookupError, TypeError):
        return None


class Mender:
    """A model that mends the bug of :data:`TASK` by the tool with which a program runs commands. Without that tool it
    answers with a text."""

    def __init__(self, recipe: Recipe) -> None:
        self._tool, self._argument = recipe.command_tool
        last = (("Done.", recipe.last_command),) if recipe.last_command else ()
        self._steps = (*MENDS, *last)

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolDefinition], **_: Any) -> Completion:
        """The next step of the script."""
        offered = next((tool for tool in tools if tool["function"]["name"] == self._tool), None)
        done = sum(bool(message.get("tool_calls")) for message in messages)
        usage = {"prompt_tokens": 100 + 10 * len(messages), "completion_tokens": 10}
        if offered is None or done >= len(self._steps):
            return Completion({"role": "assistant", "content": "calc.py adds now."}, "stop", usage)
        said, command = self._steps[done]
        given = {**required_arguments(offered["function"]), self._argument: command}
        call = {"name": self._tool, "arguments": json.dumps(given, ensure_ascii=False)}
        calls = [{"id": f"call_{done}", "type": "function", "function": call}]
        return Completion({"role": "assistant", "content": said, "tool_calls": calls}, "tool_calls", usage)


def required_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Something for each argument that a tool, by its definition, cannot be called without."""
    parameters = function.get("parameters") or {}
    kinds = parameters.get("properties") or {}
    some: dict[str, Any] = {"boolean": False, "integer": 1, "number": 1}
    found = {name: kinds.get(name, {}) for name in parameters.get("required") or ()}
    return {
        name: kind["enum"][0] if kind.get("enum") else some.get(kind.get("type"), "run") for name, kind in found.items()
    }
