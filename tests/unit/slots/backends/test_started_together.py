"""Directories and locks that several starts meet over: what is gone already is no error."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from agentenv import locks, run_files
from agentenv.errors import SandboxUnavailableError
from agentenv.sandbox.supervisor import launch, sweep
from agentenv.sandbox.supervisor.reaper import end_of
from agentenv.slots.backends import local_files
from agentenv.slots.backends.base import StartFailed
from agentenv.slots.backends.local_files import FarmFiles


def _dead(state: Path, count: int) -> None:
    for number in range(count):
        (state / f"launch-dead{number}").mkdir()
        (state / f"launch-dead{number}" / "lock").touch()


def test_a_dead_launch_that_another_start_removes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _dead(tmp_path, 3)
    real = run_files.remove_if_dead

    def raced(path: Path) -> None:
        if path.name == "launch-dead1":
            shutil.rmtree(path)
        real(path)

    opened = os.open

    def open_late(path: Path, flags: int, *args: int, **options: Any) -> int:
        if path == tmp_path / "launch-dead2" / "lock":
            monkeypatch.setattr(os, "open", opened)
            shutil.rmtree(path.parent)  # between the look and the lock
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(local_files, "remove_if_dead", raced)
    monkeypatch.setattr(os, "open", open_late)
    directory = FarmFiles.temporary(tmp_path)
    assert [path.name[:11] for path in tmp_path.glob("launch-*")] == [directory.new(0).path.parent.name[:11]]
    directory.close()


def test_a_directory_just_made_that_another_start_takes_for_a_dead_one_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = locks.try_lock
    taken: list[Path] = []

    def raced(lock: Path, *, create: bool = False) -> int | None:
        if not taken:
            taken.append(lock)
            shutil.rmtree(lock.parent)
        return real(lock, create=create)

    monkeypatch.setattr(run_files, "try_lock", raced)
    directory = FarmFiles.temporary(tmp_path)
    assert taken
    assert directory.new(0).path.parent.exists()
    directory.close()


def test_a_name_that_a_sweep_holds_for_a_moment_can_be_taken(tmp_path: Path) -> None:
    place = tmp_path / "container"
    held = sweep.take_lock(place)
    threading.Timer(0.2, os.close, [held]).start()
    os.close(sweep.take_lock(place))


def test_a_machine_with_all_its_containers_may_have_room_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_UID_BLOCKS", 0)
    with pytest.raises(SandboxUnavailableError) as raised:
        launch.claim_uids()
    failed = StartFailed.from_event({"code": raised.value.code, "message": raised.value.message})
    assert not failed.permanent


def test_real_time_signals_have_no_name_and_are_told_all_the_same() -> None:
    assert end_of(40) == "killed by signal 40"
    assert end_of(signal.SIGKILL) == "killed by SIGKILL"
