"""The scripted players, run by a plain shell over a directory: what each leaves of the package."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from agentenv.testing import Reply
from examples.repair import policy
from examples.repair.tasks import Task, injected, write_tree
from examples.repair.verify import changes
from tests.unit.repair_sample import PATH, SOURCE, package, task


def played(replies: list[Reply], wanted: Task, directory: Path) -> str:
    """The source file after a player's edits (the commands that run tests need a slot, and are left out)."""
    write_tree(directory, injected(package(), wanted.bugs))
    for reply in replies:
        for call in reply.calls:
            assert isinstance(call.arguments, dict)
            if "EDIT" in call.arguments["command"]:
                command = [shutil.which("bash") or "bash", "-ec", call.arguments["command"]]
                subprocess.run(command, cwd=directory, check=True)
    return (directory / PATH).read_text()


def test_the_solver_restores_the_released_text(tmp_path: Path) -> None:
    wanted = task("clamp", "count", "doubled")
    assert played(policy.solver(wanted, package()), wanted, tmp_path) == SOURCE


def test_the_half_solver_mends_the_first_bug_only(tmp_path: Path) -> None:
    wanted = task("clamp", "count")
    left = injected(package(), wanted.bugs[1:])[PATH].decode()
    assert played(policy.half_solver(wanted, package()), wanted, tmp_path) == left


@pytest.mark.parametrize("player", [policy.quitter, *policy.MISBEHAVERS])
def test_the_others_mend_nothing(tmp_path: Path, player: policy.Casting) -> None:
    wanted = task("clamp")
    assert played(player(wanted, package()), wanted, tmp_path) == injected(package(), wanted.bugs)[PATH].decode()


def test_every_player_ends_with_an_answer_and_only_that_has_no_call() -> None:
    wanted = task("clamp", "count")
    for player in (policy.solver, policy.half_solver, policy.quitter, *policy.MISBEHAVERS):
        *before, last = player(wanted, package())
        assert all(reply.calls for reply in before)
        assert last.text
        assert not last.calls


def test_a_group_always_has_a_spread_and_misbehavers_take_turns() -> None:
    for wanted in (task("clamp"), task("clamp", "count")):
        seen = set()
        for number in range(8):
            cast = policy.cast_of(wanted, number)
            assert len(cast) == 4
            assert policy.solver in cast
            assert policy.quitter in cast
            seen |= set(cast)
        assert seen >= set(policy.MISBEHAVERS)
    assert policy.half_solver not in policy.cast_of(task("clamp"), 0)


def test_an_edit_keeps_line_ends_and_what_is_not_ascii(tmp_path: Path) -> None:
    before, after = "a\r\n# é 'quoted' \\n\nlast", "a\r\nb\n# é 'quoted' \\n\nlast\n"
    (tmp_path / "x.py").write_bytes(before.encode())
    subprocess.run(["bash", "-ec", policy.edit("x.py", before, after)], cwd=tmp_path, check=True)
    assert (tmp_path / "x.py").read_bytes() == after.encode()


def test_a_change_too_large_for_a_diff_is_counted() -> None:
    given = {PATH: SOURCE.encode()}
    assert changes(given, given) == ""
    assert changes(given, {PATH: b"x\n" * 500_000}) == f"{PATH}: replaced by 1000000 bytes\n"
    assert "+y" in changes(given, {PATH: SOURCE.encode() + b"y\n"})
