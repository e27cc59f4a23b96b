"""The faster build of bash is taken only when it is the very same version."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from agentenv.sandbox.supervisor import static_bash


def _program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_machines_own_static_build_is_found() -> None:
    found = static_bash.find()
    assert found in static_bash.CANDIDATES
    command = [str(found), "-c", "echo $BASH_VERSION"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == subprocess.run(["bash", *command[1:]], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("body", ["echo 1.14.7", "exit 1", "echo"])
def test_another_version_or_a_broken_program_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str
) -> None:
    monkeypatch.setattr(static_bash, "CANDIDATES", (_program(tmp_path / "bash-static", body),))
    assert static_bash.find() is None


def test_none_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(static_bash, "CANDIDATES", (tmp_path / "nothing",))
    assert static_bash.find() is None
