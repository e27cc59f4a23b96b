"""The state directory: nobody else's word is taken for a farm's."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from agentenv.config import state_dir
from agentenv.errors import ConfigError


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where an ordinary user's state would be."""
    monkeypatch.delenv("AGENTENV_STATE_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid or OWN)
    return tmp_path / "agentenv"


OWN = 10_001
"""Root's tests play this user, and give him what is his."""


def given(path: Path, uid: int | None = None) -> None:
    if os.getuid() == 0:
        os.chown(path, OWN if uid is None else uid, -1, follow_symlinks=False)


def test_it_is_made_for_us_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path / "a/b"))
    assert state_dir() == tmp_path / "a/b"
    assert stat.S_IMODE((tmp_path / "a/b").stat().st_mode) == 0o700


def test_ours_is_taken(state: Path) -> None:
    state.mkdir(mode=0o755)
    given(state)
    assert state_dir() == state


def test_a_directory_that_others_may_write_to_is_refused(state: Path) -> None:
    for mode in (0o770, 0o777, 0o1777, 0o702):
        state.mkdir()
        state.chmod(mode)
        given(state)
        with pytest.raises(ConfigError, match="may be written to by others") as refused:
            state_dir()
        assert f"chmod 700 {state}" in refused.value.next_step
        state.rmdir()


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: OWN)
    with pytest.raises(ConfigError, match=f"belongs to user {tmp_path.stat().st_uid}") as refused:
        state_dir()
    assert "a directory of your own" in refused.value.next_step


def test_a_link_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ours").mkdir(mode=0o700)
    given(tmp_path / "ours")
    (tmp_path / "link").symlink_to("ours")
    monkeypatch.setattr(os, "geteuid", lambda: OWN if os.getuid() == 0 else OWN + 1)
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path / "link"))
    with pytest.raises(ConfigError, match="belongs to user"):
        state_dir()


def test_one_that_cannot_be_made_is_for_whoever_writes_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path / "file/below"))
    assert state_dir() == tmp_path / "file/below"
