"""A tmux with all that it needs: which files, and that they suffice."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from agentenv.sandbox.slot_paths import bundled_tmux
from agentenv.sandbox.supervisor import preparation
from tests.waiting import START_S


def test_the_bundle_runs_with_nothing_but_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "_LDD_S", START_S)
    found = preparation.tmux_bundle()
    for name, source in found:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, tmp_path / name)
    (tmp_path / "ld.so").chmod(0o755)
    argv, env = bundled_tmux(str(tmp_path))
    listed = subprocess.run([*argv[:3], "--list", argv[-1]], capture_output=True, text=True, check=True, env=env)
    libraries = [line.split()[2] for line in listed.stdout.splitlines() if "=>" in line and "/" in line.split()[2]]
    assert libraries
    assert all(library.startswith(str(tmp_path)) for library in libraries)
    version = subprocess.run([*argv, "-V"], capture_output=True, text=True, check=True, env=env)
    assert version.stdout.startswith("tmux ")


def test_a_machine_without_tmux_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "PATH", "/nonexistent")
    assert preparation.tmux_bundle() == []


def test_what_ldd_lists() -> None:
    listed = """\
\tlinux-vdso.so.1 (0x00007fdefcb47000)
\tlibtinfo.so.6 => /lib/x86_64-linux-gnu/libtinfo.so.6 (0x00007fdefca00000)
\tlibgone.so => not found
\t/lib64/ld-linux-x86-64.so.2 (0x00007fdefcb49000)
"""
    assert [str(path) for path in preparation._linked_paths(listed)] == [
        "/lib/x86_64-linux-gnu/libtinfo.so.6",
        "/lib64/ld-linux-x86-64.so.2",
    ]
