"""The scripted players, run by a plain shell over a directory: what each leaves of the package."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentenv.testing import Call, Turn
from agentenv.tools.catalog import ToolCatalog
from examples.repair import moves, policy
from examples.repair.moves import Move
from examples.repair.tasks import Task, injected, write_tree
from examples.repair.tracker import Tracker, report
from examples.repair.verify import changes
from tests.unit.examples.repair_sample import PATH, SOURCE, package, task
from tests.unit.sandbox.server.patch_reference import apply as patch_apply
from tests.unit.sandbox.server.patch_reference import parse as patch_parse

GROUPS = 8
"""As many as a demo has by default."""
PLAYERS = (*policy.SOLVERS, policy.half_solver, policy.quitter, *policy.MISBEHAVERS)


def made(script: Sequence[Move], wanted: Task) -> Iterator[Call]:
    """Every call of a player that is shown nothing."""
    player = moves.played(script)
    for step in range(len(script)):
        yield from player(Turn(wanted.id, 0, step, [{"role": "user", "content": ""}])).calls


def left(script: Sequence[Move], wanted: Task, directory: Path) -> str:
    """The source file after a player's edits (what runs tests needs a slot, and is left out)."""
    write_tree(directory, injected(package(), wanted.bugs))
    for call in made(script, wanted):
        assert isinstance(call.arguments, dict)
        change(call.name, call.arguments, directory)
    return (directory / PATH).read_text()


def change(tool: str, arguments: dict[str, Any], directory: Path) -> None:
    command = str(arguments.get("command", "")).removeprefix("cd /workspace\n")
    if "EDIT" in command:
        subprocess.run(["bash", "-ec", command], cwd=directory, check=True)
    elif tool == "write_file":
        write_tree(directory, {arguments["path"]: arguments["text"].encode()})
    elif tool == "patch":
        for part in patch_parse.parse(arguments["patch"].encode(), None):
            target = directory / (part.new or b"").decode()
            target.write_bytes(patch_apply.apply_hunks(target.read_bytes(), part.hunks, 0).content)


@pytest.mark.parametrize("solver", policy.SOLVERS)
def test_a_solver_restores_the_released_text(tmp_path: Path, solver: policy.Casting) -> None:
    wanted = task("clamp", "count", "doubled")
    assert left(solver(wanted, package()), wanted, tmp_path) == SOURCE


def test_the_half_solver_mends_the_first_bug_only(tmp_path: Path) -> None:
    wanted = task("clamp", "count")
    other = injected(package(), wanted.bugs[1:])[PATH].decode()
    assert left(policy.half_solver(wanted, package()), wanted, tmp_path) == other


@pytest.mark.parametrize("player", [policy.quitter, *policy.MISBEHAVERS])
def test_the_others_mend_nothing(tmp_path: Path, player: policy.Casting) -> None:
    wanted = task("clamp")
    assert left(player(wanted, package()), wanted, tmp_path) == injected(package(), wanted.bugs)[PATH].decode()


@pytest.mark.parametrize("player", PLAYERS)
def test_every_player_ends_with_an_answer_and_only_that_has_no_call(player: policy.Casting) -> None:
    wanted = task("clamp", "count")
    script = player(wanted, package())
    for step in range(len(script) + 1):
        turn = Turn(wanted.id, 0, step, [])
        said = moves.played(script)(turn)
        assert bool(said.calls) == (step < len(script) - 1)
        assert bool(said.text) == (step < len(script))


def test_the_cast_of_a_demo_uses_every_tool_as_its_schema_has_it() -> None:
    catalog = ToolCatalog.builtin().extended(*Tracker({}).tool_server().catalog.specs)
    tasks = [task("clamp", "count")] * (GROUPS * 3 // 4) + [task("clamp")] * (GROUPS // 4)
    used = set()
    for number, wanted in enumerate(tasks):
        for player in policy.cast_of(wanted, number):
            for call in made(player(wanted, package()), wanted):
                assert isinstance(call.arguments, dict)
                catalog.validate(call.name, call.arguments)
                used.add(call.name)
    assert used == set(catalog.names)


def test_a_group_always_has_a_spread_and_players_take_turns() -> None:
    for wanted in (task("clamp"), task("clamp", "count")):
        seen = set()
        for number in range(GROUPS):
            cast = policy.cast_of(wanted, number)
            assert len(cast) == 4
            assert cast[0] in policy.SOLVERS
            assert policy.quitter in cast
            seen |= set(cast)
        assert seen >= {*policy.SOLVERS, *policy.MISBEHAVERS}
    assert policy.half_solver not in policy.cast_of(task("clamp"), 0)


def test_the_solver_runs_the_tests_a_report_names_and_without_one_the_broken_files() -> None:
    wanted = task("clamp", "count")

    def second_move(shown: str) -> str:
        turn = Turn(wanted.id, 0, 1, [{"role": "tool", "content": shown}])
        return str(moves.played(policy.solver(wanted, package()))(turn).calls[0].arguments)

    assert " test_sample.py::test_x " in second_move('{"failing": ["test_sample.py::test_x"]}')
    for nothing in ("", "error: no such tool", "[]", '{"text": "?"}'):
        assert " test_sample.py " in second_move(nothing)


def test_a_report_names_some_tests_without_their_parameters_and_counts_the_rest() -> None:
    wanted = task("clamp", "count")
    assert report(wanted)["failing"] == ["test_sample.py::test_clamp", "test_sample.py::test_count"]
    assert report(wanted)["more"] == 0


def test_an_edit_keeps_line_ends_and_what_is_not_ascii(tmp_path: Path) -> None:
    before, after = "a\r\n# é 'quoted' \\n\nlast", "a\r\nb\n# é 'quoted' \\n\nlast\n"
    (tmp_path / "x.py").write_bytes(before.encode())
    subprocess.run(["bash", "-ec", moves.edit("x.py", before, after)], cwd=tmp_path, check=True)
    assert (tmp_path / "x.py").read_bytes() == after.encode()


def test_an_excerpt_is_the_lines_around_one_in_bytes() -> None:
    source = "".join(f"é{number}\n" for number in range(1, 41)).encode()
    place = moves.excerpt(source, 20)
    found = source[place["offset"] :][: place["limit"]].decode().split()
    assert found == [f"é{number}" for number in range(20 - moves.LOOK_LINES, 20 + moves.LOOK_LINES + 1)]
    assert moves.excerpt(source, 1)["offset"] == 0


def test_a_change_too_large_for_a_diff_is_counted() -> None:
    given = {PATH: SOURCE.encode()}
    assert changes(given, given) == ""
    assert changes(given, {PATH: b"x\n" * 500_000}) == f"{PATH}: replaced by 1000000 bytes\n"
    assert "+y" in changes(given, {PATH: SOURCE.encode() + b"y\n"})
