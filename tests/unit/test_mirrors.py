"""Mirrors of git repositories: cloned once, fetched when asked for, readable by slots."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentenv.mirrors import RepositoryError, git, has_commit, mirror


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    made = tmp_path / "remote"
    made.mkdir()
    git(["init", "--quiet", "--initial-branch=main"], cwd=made)
    commit(made, "one")
    return made


def commit(repository: Path, message: str) -> str:
    git(["commit", "--quiet", "--allow-empty", "--message", message], cwd=repository)
    return git(["rev-parse", "HEAD"], cwd=repository).decode().strip()


def test_it_is_cloned_once_by_however_many_and_fetched_when_asked_for(tmp_path: Path, remote: Path) -> None:
    places = tmp_path / "mirrors"
    with ThreadPoolExecutor(4) as several:
        found = set(several.map(lambda _: mirror(places, "acme/a", f"file://{remote}"), range(4)))
    assert found == {places / "acme/a.git"}
    assert sorted(path.name for path in (places / "acme").iterdir()) == ["a.git", "a.lock"]
    later = commit(remote, "two")
    (path,) = found
    assert not has_commit(mirror(places, "acme/a", f"file://{remote}"), later)
    assert has_commit(mirror(places, "acme/a", f"file://{remote}", refresh=True), later)
    assert mirror(places, "acme/a", "file:///nowhere", commit=later) == path


def test_a_commit_on_no_branch_is_fetched_too(tmp_path: Path, remote: Path) -> None:
    mirror(tmp_path / "mirrors", "a", f"file://{remote}")
    lone = commit(remote, "two")
    git(["reset", "--quiet", "--hard", "HEAD~1"], cwd=remote)
    found = mirror(tmp_path / "mirrors", "a", f"file://{remote}", commit=lone)
    assert git(["rev-parse", f"refs/agentenv/{lone}"], {"GIT_DIR": str(found)}).decode().strip() == lone
    assert not has_commit(mirror(tmp_path / "mirrors", "a", f"file://{remote}", commit="0" * 40), "0" * 40)


def test_everybody_may_read_it(tmp_path: Path, remote: Path) -> None:
    before = os.umask(0o077)
    try:
        mirror(tmp_path / "mirrors", "acme/a", f"file://{remote}")
    finally:
        os.umask(before)
    found = (tmp_path / "mirrors", *(tmp_path / "mirrors").rglob("*"))
    found = tuple(path for path in found if path.suffix != ".lock")
    closed = [path for path in found if not stat.S_IMODE(path.stat().st_mode) & 0o004]
    assert closed == []


def test_what_cannot_be_cloned_is_an_infrastructure_failure(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="a could not be cloned"):
        mirror(tmp_path / "mirrors", "a", "file:///nowhere")
    assert [path.name for path in (tmp_path / "mirrors").iterdir()] == ["a.lock"]
