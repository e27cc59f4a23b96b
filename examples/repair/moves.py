"""A scripted player's turns: it says something and calls tools, or reacts to what it was shown. Pure."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Callable, Sequence

from agentenv.testing import Call, Reply, Turn
from examples.repair import mutate
from examples.repair.packages import Package
from examples.repair.tasks import Bug, Task, injected

LOOK_LINES = 8
SCREEN = {"rows": 24, "columns": 100}
TESTS_WAIT_S = 60
"""Longest time a player waits for tests; less if a call's limit is lower."""

Move = Reply | Callable[[Turn], Reply]
"""A turn known beforehand, or one that depends on the result of the last one."""


def played(moves: Sequence[Move]) -> Callable[[Turn], Reply]:
    """A player that makes these moves one after the other, then gives an empty answer."""

    def player(turn: Turn) -> Reply:
        move = moves[turn.step] if turn.step < len(moves) else Reply("")
        return move if isinstance(move, Reply) else move(turn)

    return player


# -- a turn with one tool ----------------------------------------------------------------------------


def calls(text: str, *made: Call) -> Reply:
    """One model turn that says something and makes these calls."""
    return Reply(text, made)


def bash(text: str, command: str) -> Reply:
    """A command in a new shell."""
    return calls(text, Call("bash", {"command": command}))


def terminal(text: str, command: str, **arguments: object) -> Reply:
    """A command in a persistent shell; an empty one returns more output."""
    return calls(text, Call("terminal", {"command": command, **arguments}))


def interrupt(text: str) -> Reply:
    """Ctrl-C for the program running in that shell."""
    return calls(text, Call("terminal", {"keys": ["C-c"], "timeout_s": 30}))


def background(text: str, command: str) -> Reply:
    """A command in the background. The first of a rollout is ``p1``."""
    return calls(text, Call("process", {"action": "start", "command": command}))


def process(text: str, action: str, /, **arguments: object) -> Reply:
    """Use the first background process."""
    return calls(text, Call("process", {"action": action, "process": "p1", **arguments}))


def typed(text: str, line: str, *, block: bool = False) -> Reply:
    """Type a line on the screen; ``block`` waits for the end of what it starts."""
    waiting = {"block": True, "max_wait_s": TESTS_WAIT_S} if block else {"min_wait_s": 0.3}
    return calls(text, Call("tmux", {"action": "send_keys", "text": line, "keys": ["Enter"], **waiting}))


def tmux(text: str, action: str, /, **arguments: object) -> Reply:
    """Any other use of the screen."""
    return calls(text, Call("tmux", {"action": action, **arguments}))


# -- what the moves are about ------------------------------------------------------------------------


def broken_files(task: Task) -> list[str]:
    """The files with broken tests."""
    return sorted({test.partition("::")[0] for test in task.broken})


def pytest(tests: Sequence[str], *, tail: bool = True) -> str:
    """A command that runs these tests; with ``tail`` it prints only the end of pytest's output."""
    command = f"python3 -m pytest -q --tb=line --disable-warnings {' '.join(map(shlex.quote, tests))}"
    return f"{command} 2>&1 | tail -n 15" if tail else command


def reported(turn: Turn, task: Task) -> list[str]:
    """The tests in the report that the last call returned; the task's, if it returned none."""
    try:
        return [str(test) for test in json.loads(turn.last_output)["failing"]]
    except (ValueError, KeyError, TypeError):
        return broken_files(task)


def first_broken(task: Task) -> str:
    """One broken test, without its parameters."""
    return task.broken[0].partition("[")[0]


def definitions(bugs: Sequence[Bug]) -> str:
    """A regular expression for the functions with bugs in them."""
    names = dict.fromkeys(bug.mutation.function.rpartition(".")[2] for bug in bugs)
    return rf"^\s*def ({'|'.join(names)})\b"


def look(path: str, line: int) -> str:
    """A command that prints the lines around this one."""
    return f"sed -n '{max(1, line - LOOK_LINES)},{line + LOOK_LINES}p' {shlex.quote(path)}"


def excerpt(source: bytes, line: int) -> dict[str, int]:
    """Where those lines are in a file, as ``read_file`` wants it."""
    lines = source.splitlines(keepends=True)
    first = max(0, line - 1 - LOOK_LINES)
    return {"offset": sum(map(len, lines[:first])), "limit": sum(map(len, lines[first : line + LOOK_LINES]))}


def mended(task: Task, package: Package, bugs: Sequence[Bug]) -> dict[str, tuple[str, str]]:
    """By path: a source as given, and without ``bugs`` (other bugs of the task are kept)."""
    left = [bug for bug in task.bugs if bug not in bugs]
    before, after = injected(package, task.bugs), injected(package, left)
    return {path: (before[path].decode(), after[path].decode()) for path in dict.fromkeys(bug.path for bug in bugs)}


def diff(changed: dict[str, tuple[str, str]]) -> str:
    """The same as one unified diff."""
    return "".join(mutate.diff(path, before, after) for path, (before, after) in changed.items())


def edits(changed: dict[str, tuple[str, str]]) -> str:
    """The same as a command."""
    return "\n".join(edit(path, before, after) for path, (before, after) in changed.items())


def edit(path: str, before: str, after: str) -> str:
    """A command that turns a file with the text ``before`` into ``after``, by its lines."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    changed = [
        code for code in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if code[0] != "equal"
    ]
    steps = [f"lines[{i}:{j}] = {new[k:n]!r}" for _, i, j, k, n in reversed(changed)]
    program = [
        "from pathlib import Path",
        f"path = Path({path!r})",
        "lines = path.read_bytes().decode().splitlines(keepends=True)",
        *steps,
        'path.write_bytes("".join(lines).encode())',
    ]
    return "\n".join(["python3 - <<'EDIT'", *program, "EDIT"])
