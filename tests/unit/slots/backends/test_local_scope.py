"""When a container gets a scope of systemd's, and what happens where systemd makes none."""

from __future__ import annotations

import logging
from pathlib import Path, PurePosixPath

import pytest

from agentenv.slots.backends import local_scope
from agentenv.slots.backends.local_scope import Place, make_scope
from tests.waiting import START_S

_SESSION = "/user.slice/user-1000.slice/session-3.scope"
_APP = "/user.slice/user-1000.slice/user@1000.service/app.slice/vte-spawn-1.scope"
_OWN_SERVICE = "/user.slice/user-1000.slice/user@1000.service/app.slice/farm.service"
_SERVICE = "/system.slice/trainer.service"
_JOB = "/system.slice/slurmstepd.scope/job_7/step_0/user/task_0"


@pytest.mark.parametrize(
    ("uid", "unit", "able", "detached", "expected"),
    [
        # An ordinary user's login session and programs get one where their own cgroup is not enough,
        (1000, _SESSION, False, False, True),
        (1000, _SESSION, False, True, True),
        (1000, _APP, False, False, True),
        (1000, _APP, True, False, False),
        # a service's detached containers always, whatever its cgroup could do,
        (1000, _OWN_SERVICE, True, True, True),
        (1000, _OWN_SERVICE, True, False, False),
        (1000, _SERVICE, False, True, True),
        (0, _SERVICE, True, True, True),
        # and nothing that may have limits of its own leaves them otherwise.
        (1000, _SERVICE, False, False, False),
        (0, _SERVICE, False, False, False),
        (1000, _JOB, False, False, False),
        (1000, _JOB, False, True, False),
        (0, "/user.slice/user-0.slice/session-1.scope", True, True, False),
        (0, "/init.scope", True, False, False),
    ],
)
def test_who_wants_a_scope(uid: int, unit: str, able: bool, detached: bool, expected: bool) -> None:
    place = Place(uid, PurePosixPath(unit), able=able, lingers=True)
    assert place.wants_scope(detached=detached) is expected


@pytest.mark.parametrize(
    ("unit", "lingers", "lasts"),
    [(_SESSION, False, False), (_SESSION, True, True), (_OWN_SERVICE, False, True), (_SERVICE, False, False)],
)
def test_how_long_a_scope_of_a_user_lasts(unit: str, lingers: bool, lasts: bool) -> None:
    assert Place(1000, PurePosixPath(unit), able=False, lingers=lingers).lasts is lasts


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Place:
    """An ordinary user's login session, which does not outlive him."""
    place = Place(1000, PurePosixPath(_SESSION), able=False, lingers=False)
    monkeypatch.setattr(local_scope, "find_place", lambda: place)
    return place


def _systemd_run(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    program, said = directory / "systemd-run", directory / "said"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{said}\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    return said


def test_a_scope_is_tried_before_a_container_is_started_in_it(
    session: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert session.uid == 1000
    said = _systemd_run(tmp_path, monkeypatch, "echo cpuset cpu io memory pids")
    scope = make_scope("local-0", detached=False)
    assert scope is not None
    assert scope.controllers == {"cpu", "memory", "pids"}
    tried = said.read_text().splitlines()
    assert {"--user", "--scope", "Delegate=yes"} <= set(tried)
    assert "XDG_RUNTIME_DIR=/run/user/1000" in scope.words
    assert any(word.startswith("--unit=agentenv-local-0-") and "trial" not in word for word in scope.words)
    assert scope.words[-1] == "--"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo Failed to connect to bus: No medium found >&2; exit 1", "No medium found"),
        ("echo", "no controllers"),
        ("exec sleep 60", "timed out"),
    ],
)
def test_where_systemd_makes_none_the_container_starts_without_and_it_is_logged(
    session: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    script: str,
    reason: str,
) -> None:
    assert not session.able
    monkeypatch.setattr(local_scope, "_TRIAL_S", 2.0 if reason == "timed out" else START_S)
    _systemd_run(tmp_path, monkeypatch, script)
    with caplog.at_level(logging.WARNING):
        assert make_scope("local-0", detached=False) is None
    assert reason in caplog.text


def test_a_kept_container_gets_none_that_would_end_before_it(
    session: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not session.lasts
    said = _systemd_run(tmp_path, monkeypatch, "echo cpu memory pids")
    with caplog.at_level(logging.WARNING):
        assert make_scope("farm-0", detached=True) is None
    assert "loginctl enable-linger" in caplog.text
    assert not said.exists()


def test_without_systemd_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local_scope, "_SYSTEMD", tmp_path)
    assert make_scope("local-0", detached=False) is None
