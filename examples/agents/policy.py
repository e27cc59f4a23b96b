"""A scripted policy that works by an agent program's own tool for commands.

It knows the tasks' bugs beforehand, so its scores say nothing about any model. It sees what a model sees: the tools
that the program offers, or with token ids the prompt's text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from agentenv.agents import Recipe
from agentenv.agents.check import required_arguments
from agentenv.testing import Call, Player, Reply, Turn
from examples.repair.moves import broken_files, edits, look, mended, pytest
from examples.repair.packages import Package
from examples.repair.tasks import Task


def script(recipe: Recipe, tasks: Sequence[Task], packages: Mapping[str, Package]) -> dict[str, list[Player]]:
    """One player per task, which repairs it."""
    return {task.id: [_player(recipe, _steps(recipe, task, packages[task.package]))] for task in tasks}


def _steps(recipe: Recipe, task: Task, package: Package) -> list[tuple[str, str]]:
    """What is said, and the command that is run."""
    read = " && ".join(look(bug.path, bug.mutation.line) for bug in task.bugs)
    steps = [
        ("<think>\nFirst I read it.\n</think>\n\nI read  what fails. ", read),
        ("The mistake is clear.", edits(mended(task, package, task.bugs))),
        ("", pytest(broken_files(task))),
    ]
    return [*steps, ("Done.", recipe.last_command)] if recipe.last_command else steps


def _player(recipe: Recipe, steps: Sequence[tuple[str, str]]) -> Callable[[Turn], Reply]:
    name, argument = recipe.command_tool

    def play(turn: Turn) -> Reply:
        tool = _offered(turn).get(name)
        done = _calls_made(turn)
        if tool is None or done >= len(steps):  # a title, or the end
            return Reply("The package is repaired.")
        said, command = steps[done]
        return Reply(said, (Call(name, {**required_arguments(tool), argument: command}),))

    return play


def _offered(turn: Turn) -> dict[str, Any]:
    """The tools' functions by name."""
    functions = [tool["function"] for tool in turn.tools]
    if not functions and len(turn.messages) == 1:
        functions = list(_in_prompt(str(turn.messages[0]["content"])))
    return {function["name"]: function for function in functions}


def _in_prompt(text: str) -> Iterator[Any]:
    """As the scripted policy's tokenizer writes tools before everything else: one object after the other."""
    rest = text.removeprefix("<|start|>tools").lstrip()
    while rest.startswith("{"):
        found, end = json.JSONDecoder().raw_decode(rest)
        yield found
        rest = rest[end:].lstrip()


def _calls_made(turn: Turn) -> int:
    if len(turn.messages) == 1:
        return str(turn.messages[0]["content"]).count("</tool_call><|end|>")
    return sum(bool(message.get("tool_calls")) for message in turn.messages)
