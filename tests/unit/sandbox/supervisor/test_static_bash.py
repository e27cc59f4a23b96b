"""The faster build of bash is taken only when it is the very same version."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.sandbox.supervisor import static_bash
from tests.waiting import START_S


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """A program that starts slowly is not taken for none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static_bash, "_TIMEOUT_S", START_S)
        yield


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


BASH = b"\x7fELF\0x86_64-pc-linux-gnu\0...\0@(#)Bash version 5.2.15(1) release GNU\0..."
BUILD = "Bash version 5.2.15(1) release GNU, x86_64-pc-linux-gnu"


def test_a_build_is_told_by_its_file(tmp_path: Path) -> None:
    found = static_bash.find()
    assert found is not None
    assert static_bash.build_of(found) == static_bash.build_of(Path("/usr/bin/bash").resolve())
    command = ["bash", "-c", 'echo "${BASH_VERSION%-*}" "$MACHTYPE"']
    version, machine = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert static_bash.build_of(found) == f"Bash version {version} release GNU, {machine}"
    (tmp_path / "bash").write_bytes(BASH)
    assert static_bash.build_of(tmp_path / "bash") == BUILD


@pytest.mark.parametrize(
    "content", [b"", b"#!/bin/sh\n", BASH.replace(b"@(#)", b"@#"), BASH.replace(b"linux", b"hurd"), BASH[:-4]]
)
def test_what_is_no_bash_has_no_build(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bash").write_bytes(content)
    assert static_bash.build_of(tmp_path / "bash") == ""


def _root(directory: Path, *paths: str) -> Path:
    for path in paths:
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(BASH)
    directory.mkdir(exist_ok=True)
    return directory


PATH = "/usr/local/bin:/usr/bin:/bin"


def test_the_only_bash_of_a_root_is_found(tmp_path: Path) -> None:
    one = _root(tmp_path / "one", "usr/bin/bash")
    (one / "bin").symlink_to("usr/bin")
    assert static_bash.build_in([one], PATH) == BUILD
    assert static_bash.build_in([_root(tmp_path / "above"), one], PATH) == BUILD
    assert static_bash.bashes_in(one, PATH) == ["usr/bin/bash", "bin/bash"]


def test_a_search_path_never_leads_out_of_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, outside = _root(tmp_path / "layer"), _root(tmp_path / "outside", "bash")
    paths = ["/../outside", "/usr/../../outside", str(outside), "../outside"]
    (layer / "out").symlink_to("../outside")
    (layer / "absolute").symlink_to(outside)
    asked: list[str] = []
    lstat = os.lstat

    def noted(path: str, *, dir_fd: int | None = None) -> os.stat_result:
        asked.append(path)
        return lstat(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "lstat", noted)
    for path in (*paths, "/out", "/absolute"):
        assert static_bash.bashes_in(layer, path) == []
        assert static_bash.build_in([layer], path) == ""
    assert all("/" not in name and name != ".." for name in asked)


def test_links_lead_to_what_is_in_the_layer(tmp_path: Path) -> None:
    layer = _root(tmp_path / "layer", "usr/bin/bash")
    (layer / "bin").symlink_to("/usr/bin")
    assert static_bash.build_in([layer], "/bin:/sbin") == BUILD
    assert static_bash.build_in([layer], "/../../usr/bin") == BUILD


def test_a_long_search_path_is_not_walked(tmp_path: Path) -> None:
    one = _root(tmp_path / "one", "usr/bin/bash")
    assert static_bash.build_in([one], ":".join(["/usr/bin", *(f"/d{n}" for n in range(63))])) == BUILD
    assert static_bash.build_in([one], ":".join(["/usr/bin", *(f"/d{n}" for n in range(64))])) == ""
    assert static_bash.build_in([one], f"/usr/bin:/{'d/' * 16}d") == ""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", [b"@(#)Bash version ", b"-linux-aaaaaaaaaaaaa", b"@(#)Bash version " + b" " * 63])
def test_a_hostile_bash_is_searched_in_small_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, piece: bytes
) -> None:
    """The interpreter's lock is held while one is searched, and its length is the only measure that no load changes."""
    (tmp_path / "bash").write_bytes(piece * (16 * 1024 * 1024 // len(piece)))
    steps: list[tuple[int, int, int]] = []

    class Watched:
        def __init__(self, pattern: re.Pattern[bytes]) -> None:
            self._pattern = pattern

        def search(self, content: bytes, begin: int, end: int) -> re.Match[bytes] | None:
            steps.append((len(content), begin, end))
            return self._pattern.search(content, begin, end)

    for name in ("_VERSION", "_SYSTEM"):
        monkeypatch.setattr(static_bash, name, Watched(getattr(static_bash, name)))
    assert static_bash.build_of(tmp_path / "bash") == ""
    assert {length for length, _, _ in steps} == {4 * 1024 * 1024}
    assert max(end - begin for _, begin, end in steps) <= 129 * 1024


def test_a_build_is_found_wherever_it_is(tmp_path: Path) -> None:
    for size in (0, 128 * 1024 - 20, 128 * 1024, 3 * 1024 * 1024):
        (tmp_path / "bash").write_bytes(b"x" * size + BASH)
        assert static_bash.build_of(tmp_path / "bash") == BUILD


def test_of_several_none_is_taken(tmp_path: Path) -> None:
    one, two = _root(tmp_path / "one", "bin/bash"), _root(tmp_path / "two", "bin/bash")
    assert static_bash.build_in([two, one], PATH) == ""
    assert static_bash.build_in([_root(tmp_path / "both", "usr/local/bin/bash", "bin/bash")], PATH) == ""
    assert static_bash.build_in([_root(tmp_path / "none")], PATH) == ""


def test_no_link_leads_out_of_an_image_and_nothing_is_waited_for(tmp_path: Path) -> None:
    outside = _root(tmp_path / "outside", "bash")
    linked = _root(tmp_path / "linked")
    (linked / "bin").symlink_to(outside)
    assert static_bash.build_in([linked], PATH) == ""
    dangling = _root(tmp_path / "dangling")
    (dangling / "bin").mkdir()
    (dangling / "bin/bash").symlink_to("nothing")
    assert static_bash.build_in([dangling], PATH) == ""
    assert static_bash.build_in([dangling], "/no\0name:/bin") == ""
    os.mkfifo(tmp_path / "fifo")
    assert static_bash.build_of(tmp_path / "fifo") == ""
