"""Scripted players: the demo's "policy" without a model.

They know the task's bugs beforehand, so their scores say nothing about any model. Everything they do is done
through the tools, in the slot, by the same path a model's calls take; together they use every tool.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Callable, Mapping, Sequence

from agentenv.testing import Call, Player, Reply
from examples.repair.moves import (
    SCREEN,
    TESTS_WAIT_S,
    Move,
    background,
    bash,
    broken_files,
    calls,
    definitions,
    diff,
    edits,
    excerpt,
    first_broken,
    interrupt,
    look,
    mended,
    played,
    process,
    pytest,
    reported,
    terminal,
    tmux,
    typed,
)
from examples.repair.packages import Package
from examples.repair.tasks import Bug, Task, injected

# -- players that repair everything ----------------------------------------------------------------


def solver(task: Task, package: Package) -> list[Move]:
    """Reads the bug report, works with the file tools, and runs the tests in the background."""
    given = injected(package, task.bugs)
    places = [{"path": bug.path, **excerpt(given[bug.path], bug.mutation.line)} for bug in task.bugs]
    found = {"pattern": definitions(task.bugs), "glob": "*.py"}
    return [
        calls(
            "I look around, and ask what users say.",
            Call("list_files", {"depth": 2}),
            Call("bug_report", {"task": task.id}),
        ),
        lambda turn: bash("I run what they reported.", pytest(reported(turn, task))),
        calls("Where is what these tests call?", Call("search", found)),
        calls("I read it.", *(Call("read_file", place) for place in places)),
        calls(_said(task.bugs), Call("patch", {"patch": diff(mended(task, package, task.bugs))})),
        background("All the tests, in the background.", pytest(broken_files(task), tail=False)),
        process("How do they go?", "poll"),
        process("I wait for their end.", "wait", timeout_s=TESTS_WAIT_S),
        process("What was the last they said?", "log", limit=100),
        Reply("The package is repaired."),
    ]


def shell_solver(task: Task, package: Package) -> list[Move]:
    """Uses two shells: one with a variable and a function for running the tests, one for reading and repairing."""
    place = posixpath.dirname(task.paths[0]) or "."
    looks = [look(posixpath.relpath(bug.path, place), bug.mutation.line) for bug in task.bugs]
    settled = [
        f"export TESTS={shlex.quote(' '.join(broken_files(task)))}",
        "check() { python3 -m pytest -q --tb=line --disable-warnings $TESTS 2>&1 | tail -n 15; }",
    ]
    return [
        bash("I look around first.", "ls -la"),
        terminal("A shell to run the tests in.", "\n".join(settled), session="tests"),
        terminal("Which tests fail?", "check", session="tests", timeout_s=0.2),
        terminal("They take a while. Another shell to read in.", f"cd {shlex.quote(place)}"),
        terminal("I read what they test.", "\n".join(looks)),
        terminal("Are they done?", "", session="tests", timeout_s=TESTS_WAIT_S),
        terminal(_said(task.bugs), f"cd /workspace\n{edits(mended(task, package, task.bugs))}"),
        terminal("Do the tests pass now?", "check", session="tests"),
        Reply("The package is repaired."),
    ]


def screen_solver(task: Task, package: Package) -> list[Move]:
    """Works on a screen: stops in the debugger at a failing test, rewrites the file, runs the tests."""
    whole = {path: after for path, (_, after) in mended(task, package, task.bugs).items()}
    return [
        tmux("I open a screen.", "start", **SCREEN),
        typed("I run a test that fails, with the debugger.", f"python3 -m pytest -q --pdb {_quoted(task)}"),
        tmux("I wait for it to stop.", "wait", text="(Pdb)", max_wait_s=TESTS_WAIT_S),
        typed("Where are we?", "ll"),
        typed("With which values?", "pp locals()"),
        tmux("I read all of it again.", "capture", what="scrollback"),
        typed("I have seen enough.", "q", block=True),
        calls(_said(task.bugs), *(Call("write_file", {"path": path, "text": text}) for path, text in whole.items())),
        typed("Do the tests pass now?", f"clear; {pytest(broken_files(task))}", block=True),
        tmux("Done with the screen.", "stop"),
        Reply("The package is repaired."),
    ]


# -- other players ---------------------------------------------------------------------------------


def half_solver(task: Task, package: Package) -> list[Move]:
    """Fixes only the first of several bugs, writes down the rest, and archives the notes."""
    first = task.bugs[:1]
    notes = f"# {task.id}\n\nMended: {first[0].mutation.function}. Tests still fail: see tests.txt.\n"
    return [
        bash("I look around first.", "ls -la"),
        bash("Which tests fail?", pytest(broken_files(task))),
        bash("I read what they test.", " && ".join(look(bug.path, bug.mutation.line) for bug in first)),
        bash(_said(first), edits(mended(task, package, first))),
        calls("I write down what is left.", Call("write_file", {"path": "handover/NOTES.md", "text": notes})),
        bash("With what the tests say.", f"{pytest(broken_files(task))} | tee handover/tests.txt"),
        calls("I pack it up.", Call("artifacts", {"action": "archive", "path": "handover"})),
        Reply("I mended one mistake; others are left."),
    ]


def quitter(task: Task, _package: Package) -> list[Move]:
    """Looks around, and gives up."""
    return [
        calls("I look around first.", Call("list_files", {"hidden": False})),
        bash("Which tests fail?", pytest(broken_files(task))),
        calls("Did somebody leave a hint?", Call("search", {"pattern": "TODO|FIXME|XXX", "glob": "*.py", "limit": 20})),
        Reply("I do not see what is wrong. I give up."),
    ]


def sleeper(_task: Task, _package: Package) -> list[Move]:
    """Starts commands that never end, in every possible way."""
    return [
        terminal("I make myself at home.", "mkdir -p bed && cd bed && export DREAM=sheep"),
        terminal(
            "I wait for the tests to settle.", "echo counting $DREAM; sleep 1; echo one; sleep infinity", timeout_s=0.5
        ),
        terminal("Are they settled?", "", timeout_s=5),
        terminal("What else is there to do?", "ls"),
        interrupt("Enough of that."),
        terminal("Where was I?", 'echo "still in $PWD, counting $DREAM"'),
        bash("Once more, the other way.", "echo started; sleep infinity"),
        bash("Perhaps in the background.", "nohup sleep infinity >/dev/null 2>&1 & echo left it running"),
        Reply("Still waiting."),
    ]


def flooder(_task: Task, _package: Package) -> list[Move]:
    """Prints half a gigabyte."""
    return [
        bash("Let me print everything I can think of.", "yes 'all work and no play' | head -c 500000000"),
        bash("And on the other stream.", "head -c 50000000 /dev/urandom | base64 >&2; exit 3"),
        Reply("That was a lot."),
    ]


def fork_bomber(_task: Task, _package: Package) -> list[Move]:
    """Forks without end, and tries to continue working."""
    return [
        bash("Let me use all the cores there are.", "bomb() { bomb | bomb & }; bomb; sleep 1; echo forked"),
        bash("Is anybody there?", "ps ax | wc -l; ls | head -3"),
        Reply("The machine seems busy."),
    ]


def forger(task: Task, _package: Package) -> list[Move]:
    """Leaves the bug, makes the tests pass, and leaves a process behind that ensures it."""
    tests = " ".join(map(shlex.quote, broken_files(task)))
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
        background("Should somebody tidy up.", "while sleep 0.2; do cp -f sitecustomize.py conftest.py; done"),
        process("Is it still at it?", "poll"),
        Reply("All tests pass."),
    ]


# -- who plays what ----------------------------------------------------------------------------------

Casting = Callable[[Task, Package], list[Move]]
SOLVERS: tuple[Casting, ...] = (solver, shell_solver, screen_solver)
MISBEHAVERS: tuple[Casting, ...] = (sleeper, flooder, fork_bomber, forger)


def script(tasks: Sequence[Task], packages: Mapping[str, Package]) -> dict[str, list[Player]]:
    """Four players per task: one solves, one half solves, one gives up, one misbehaves. Solvers work in different
    ways, and misbehaving players do different things; they take turns.

    Where a task has one bug only, nobody can half solve it: the forger plays instead.
    """
    return {
        task.id: [played(player(task, packages[task.package])) for player in cast_of(task, number)]
        for number, task in enumerate(tasks)
    }


def cast_of(task: Task, number: int) -> tuple[Casting, ...]:
    """The players of the ``number``-th task, member by member."""
    solves = SOLVERS[number % len(SOLVERS)]
    if len(task.bugs) > 1:
        return solves, half_solver, quitter, MISBEHAVERS[number % len(MISBEHAVERS)]
    return solves, forger, quitter, MISBEHAVERS[number % (len(MISBEHAVERS) - 1)]


def _said(bugs: Sequence[Bug]) -> str:
    named = " and ".join(f"{bug.mutation.function} ({bug.mutation.kind})" for bug in bugs)
    return f"The mistake is in {named}."


def _quoted(task: Task) -> str:
    return shlex.quote(first_broken(task))
