"""The profile that an ordinary user's processes take where root has loaded it. `make hosts` tries it on a kernel."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from agentenv import apparmor


@pytest.fixture
def attribute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's file, as an ordinary user sees it."""
    path = tmp_path / "current"
    path.touch()
    monkeypatch.setattr(apparmor, "_ATTRIBUTE", str(path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    return path


def test_a_user_takes_the_profile(attribute: Path) -> None:
    assert apparmor.take_profile()
    assert attribute.read_text() == "changeprofile agentenv"


def test_root_needs_none(attribute: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert not apparmor.take_profile()
    assert attribute.read_text() == ""


@pytest.mark.parametrize("refusing", ["missing", "/dev/full"])
def test_where_it_cannot_be_taken_nothing_happens(
    attribute: Path, refusing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no AppArmor, or the profile is not loaded."""
    monkeypatch.setattr(apparmor, "_ATTRIBUTE", refusing if refusing.startswith("/") else str(attribute / refusing))
    assert not apparmor.take_profile()


def test_the_command_for_root_writes_the_profile_and_loads_it(tmp_path: Path) -> None:
    command = apparmor.install_command().replace(apparmor.FILE, shlex.quote(str(tmp_path / "agentenv")))
    parser = tmp_path / "apparmor_parser"
    parser.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/loaded\n')
    parser.chmod(0o755)
    subprocess.run(["sh", "-c", command], check=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert (tmp_path / "agentenv").read_text() == (
        "abi <abi/4.0>,\nprofile agentenv flags=(unconfined) {\n  userns,\n}\n"
    )
    assert (tmp_path / "loaded").read_text() == f"--replace {tmp_path}/agentenv\n"
