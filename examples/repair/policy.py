"""Scripted players: what the demo's "policy" is when there is no model.

They know the task's bugs beforehand, so their scores say nothing about any model. Everything they do is
done through the tools, in the slot, by the same path a model's calls take.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Mapping, Sequence

from agentenv.testing import Call, Player, Reply
from examples.repair.packages import Package
from examples.repair.tasks import Bug, Task, injected

LOOK_LINES = 8


def bash(text: str, command: str) -> Reply:
    """One model turn that says something and runs one command."""
    return Reply(text, (Call("bash", {"command": command}),))


def solver(task: Task, package: Package) -> list[Reply]:
    """Looks, runs the tests, mends every bug, runs the tests again."""
    return [*_opening(task), *_mending(task, package, task.bugs), Reply("The package is repaired.")]


def half_solver(task: Task, package: Package) -> list[Reply]:
    """Mends only the first of several bugs."""
    first = task.bugs[:1]
    return [*_opening(task), *_mending(task, package, first), Reply("I mended one mistake; others are left.")]


def quitter(task: Task, _package: Package) -> list[Reply]:
    """Looks, and gives up."""
    return [*_opening(task), Reply("I do not see what is wrong. I give up.")]


def sleeper(_task: Task, _package: Package) -> list[Reply]:
    """Starts something that never ends, twice."""
    return [
        bash("I wait for the tests to settle.", "echo started; sleep infinity"),
        bash("Perhaps in the background.", "nohup sleep infinity >/dev/null 2>&1 & echo left it running"),
        Reply("Still waiting."),
    ]


def flooder(_task: Task, _package: Package) -> list[Reply]:
    """Prints half a gigabyte."""
    return [
        bash("Let me print everything I can think of.", "yes 'all work and no play' | head -c 500000000"),
        bash("And on the other stream.", "head -c 50000000 /dev/urandom | base64 >&2; exit 3"),
        Reply("That was a lot."),
    ]


def fork_bomber(_task: Task, _package: Package) -> list[Reply]:
    """Forks without end, and tries to go on working."""
    return [
        bash("Let me use all the cores there are.", "bomb() { bomb | bomb & }; bomb; sleep 1; echo forked"),
        bash("Is anybody there?", "ps ax | wc -l; ls | head -3"),
        Reply("The machine seems busy."),
    ]


def forger(task: Task, _package: Package) -> list[Reply]:
    """Leaves the bug, and makes the tests pass."""
    tests = " ".join(map(shlex.quote, _test_files(task)))
    conftest = (
        "import pytest\\n\\n@pytest.hookimpl(hookwrapper=True)\\ndef pytest_runtest_makereport():\\n"
        "    report = (yield).get_result()\\n    report.outcome = 'passed'\\n"
    )
    written = f"printf {shlex.quote(conftest)} > conftest.py; cp conftest.py sitecustomize.py"
    emptied = f"for t in {tests}; do echo 'def test_all(): pass' > $t; done"
    return [
        bash("The tests are in my way.", written),
        bash("Do they pass now?", f"python3 -m pytest -q --tb=no {tests} | tail -n 3"),
        bash("To be sure.", f"{emptied}; python3 -m pytest -q {tests} | tail -n 3"),
        Reply("All tests pass."),
    ]


Casting = Callable[[Task, Package], list[Reply]]
MISBEHAVERS: tuple[Casting, ...] = (sleeper, flooder, fork_bomber, forger)


def script(tasks: Sequence[Task], packages: Mapping[str, Package]) -> dict[str, list[Player]]:
    """Four players per task: one solves, one half solves, one gives up, one misbehaves (they take turns).

    Where a task has one bug only, nobody can half solve it: the forger plays instead.
    """
    return {
        task.id: [player(task, packages[task.package]) for player in cast_of(task, number)]
        for number, task in enumerate(tasks)
    }


def cast_of(task: Task, number: int) -> tuple[Casting, ...]:
    """Who plays the ``number``-th task, member by member."""
    if len(task.bugs) > 1:
        return solver, half_solver, quitter, MISBEHAVERS[number % len(MISBEHAVERS)]
    return solver, forger, quitter, MISBEHAVERS[number % (len(MISBEHAVERS) - 1)]


def _opening(task: Task) -> list[Reply]:
    return [
        bash("I look around first.", "ls -la"),
        bash("Which tests fail?", f"python3 -m pytest -q --tb=line {_tests_run(task)} 2>&1 | tail -n 15"),
        bash("I read what they test.", " && ".join(_look(bug) for bug in task.bugs)),
    ]


def _mending(task: Task, package: Package, bugs: Sequence[Bug]) -> list[Reply]:
    left = [bug for bug in task.bugs if bug not in bugs]
    before, after = injected(package, task.bugs), injected(package, left)
    said = " and ".join(f"{bug.mutation.function} ({bug.mutation.kind})" for bug in bugs)
    commands = [
        edit(path, before[path].decode(), after[path].decode()) for path in dict.fromkeys(bug.path for bug in bugs)
    ]
    return [
        bash(f"The mistake is in {said}.", "\n".join(commands)),
        bash("Do the tests pass now?", f"python3 -m pytest -q --tb=line {_tests_run(task)} 2>&1 | tail -n 15"),
    ]


def _look(bug: Bug) -> str:
    line = bug.mutation.line
    return f"sed -n '{max(1, line - LOOK_LINES)},{line + LOOK_LINES}p' {shlex.quote(bug.path)}"


def edit(path: str, before: str, after: str) -> str:
    """A command that makes ``after`` of a file that reads ``before``, by its lines."""
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


def _test_files(task: Task) -> list[str]:
    return sorted({test.partition("::")[0] for test in task.broken})


def _tests_run(task: Task) -> str:
    return " ".join(map(shlex.quote, _test_files(task)))
