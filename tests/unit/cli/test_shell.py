"""``agentenv shell`` over the fake farm: what is kept from line to line, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agentenv.cli import shell as shell_verb
from agentenv.cli.app import app
from agentenv.farm import open
from agentenv.slots.backends.fake import FakeBackend


@pytest.fixture(autouse=True)
def fake_farm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(open, "make_backend", lambda _, settings, **__: FakeBackend(settings))
    # the fake's commands share this machine's /tmp; a slot has its own
    for name in ("_RESTORE", "_SAVE"):
        text = getattr(shell_verb, name).replace(shell_verb.STATE, str(tmp_path / "state"))
        monkeypatch.setattr(shell_verb, name, text)


def type_in(*lines: str, arguments: tuple[str, ...] = ("--quiet",)) -> Result:
    return CliRunner().invoke(app, ["shell", *arguments], input="".join(f"{line}\n" for line in lines))


def test_directory_and_exported_variables_are_kept() -> None:
    result = type_in("mkdir -p 'a b' && cd 'a b'", "export X='1  2'", "Y=lost", 'echo "${PWD##*/}|$X|$Y"')
    assert (result.stdout, result.exit_code) == ("a b|1  2|\n", 0)


def test_a_failing_line_does_not_end_it() -> None:
    result = type_in("cd /nowhere", "ls /nowhere", "echo still here")
    assert result.stdout == "still here\n"
    assert "/nowhere" in result.stderr


def test_its_exit_code_is_the_last_lines() -> None:
    assert type_in("true", "(exit 9)").exit_code == 9
    assert type_in("(exit 9)", "true").exit_code == 0


@pytest.mark.parametrize(("line", "code"), [("exit", 3), ("exit 5", 5), (" logout ; ", 3), ("exit 300", 300 & 0xFF)])
def test_exit_leaves(line: str, code: int) -> None:
    result = type_in("(exit 3)", line, "echo not reached")
    assert (result.stdout, result.exit_code) == ("", code)


def test_a_line_that_ends_its_shell_early_still_leaves_its_state() -> None:
    assert type_in("export X=kept; exit 4 # not alone on its line", 'echo "$X"').stdout == "kept\n"


def test_a_deadline_is_said_and_the_next_line_runs() -> None:
    result = type_in("sleep 600", "echo next", arguments=("--quiet", "--timeout", "15"))
    assert result.stdout == "next\n"
    assert "timed out" in result.stderr


def test_the_banner_says_what_is_not_kept() -> None:
    result = type_in(arguments=())
    assert "Not kept" in result.stderr
    assert result.stdout == ""
