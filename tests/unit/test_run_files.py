"""How a process says that it lives: a lock that goes with it, and a file."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agentenv.errors import SandboxUnavailableError
from agentenv.run_files import AlreadyRunningError, RunFile, is_held, running
from agentenv.sandbox.supervisor.sweep import sweep

SAY_AND_WAIT = """
import sys
from pathlib import Path
from agentenv.run_files import RunFile
with RunFile.open(Path(sys.argv[1]), "farm", "x") as run_file:
    run_file.write({"hello": 1})
    print("said", flush=True)
    sys.stdin.read()
"""


def test_what_is_said_is_read_until_it_is_closed(tmp_path: Path) -> None:
    with RunFile.open(tmp_path, "farm", "x") as run_file:
        assert running(tmp_path, "farm") == []  # nothing said yet
        run_file.write({"hello": 1})
        run_file.write({"hello": 2})
        assert running(tmp_path, "farm") == [{"hello": 2, "pid": os.getpid()}]
        assert running(tmp_path, "other") == []
        assert (run_file.directory / "said.json").stat().st_mode & 0o777 == 0o600
    run_file.close()
    assert list(tmp_path.iterdir()) == []


def test_a_living_one_is_not_replaced(tmp_path: Path) -> None:
    with RunFile.open(tmp_path, "farm", "x") as run_file:
        run_file.write({"hello": 1})
        with pytest.raises(AlreadyRunningError) as raised:
            RunFile.open(tmp_path, "farm", "x")
        assert raised.value.content["hello"] == 1
        assert sweep(tmp_path) == []
    with RunFile.open(tmp_path, "farm", "x"):
        pass


def test_a_killed_process_says_nothing_more_and_is_swept(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SAY_AND_WAIT, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"said\n"
        assert [said["pid"] for said in running(tmp_path, "farm")] == [child.pid]
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert running(tmp_path, "farm") == []
    assert not is_held(tmp_path / "farm-x")
    assert [swept.container for swept in sweep(tmp_path)] == ["farm-x"]
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_state_directory_names_the_cure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SandboxUnavailableError, match="AGENTENV_STATE_DIR"):
        RunFile.open(tmp_path / "file" / "below", "farm", "x")


def test_a_torn_file_is_no_word(tmp_path: Path) -> None:
    with RunFile.open(tmp_path, "farm", "x") as run_file:
        (run_file.directory / "said.json").write_text('{"hel')
        assert running(tmp_path, "farm") == []


def test_a_directory_swept_while_it_is_taken_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "farm-x").mkdir()
    (tmp_path / "farm-x" / "lock").touch()
    with (tmp_path / "farm-x" / "lock").open() as dead:
        fcntl.flock(dead, fcntl.LOCK_EX)  # as the sweep does before it removes
        taking = threading.Thread(target=lambda: opened.append(RunFile.open(tmp_path, "farm", "x")))
        opened: list[RunFile] = []
        taking.start()
        shutil.rmtree(tmp_path / "farm-x", ignore_errors=True)  # the other may make its lock while this goes on
        taking.join()
    (run_file,) = opened
    run_file.write({"hello": 1})
    assert running(tmp_path, "farm") == [{"hello": 1, "pid": os.getpid()}]
    run_file.close()


def test_a_directory_swept_between_two_looks_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "farm-x"
    directory.mkdir()
    make, swept = os.mkdir, []

    def mkdir(path: Path, mode: int = 0o777) -> None:
        try:
            make(path, mode)
        except FileExistsError:
            swept.append(path)
            directory.rmdir()
            raise

    monkeypatch.setattr(os, "mkdir", mkdir)
    with RunFile.open(tmp_path, "farm", "x") as run_file:
        run_file.write({"hello": 1})
        assert swept == [directory]
        assert running(tmp_path, "farm") == [{"hello": 1, "pid": os.getpid()}]


def test_a_file_where_the_directory_should_be_names_the_cure(tmp_path: Path) -> None:
    (tmp_path / "farm-x").touch()
    with pytest.raises(SandboxUnavailableError, match="AGENTENV_STATE_DIR"):
        RunFile.open(tmp_path, "farm", "x")


def test_many_readers_do_not_keep_a_process_from_speaking(tmp_path: Path) -> None:
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            running(tmp_path, "farm")

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(20):
            with RunFile.open(tmp_path, "farm", "x") as run_file:
                run_file.write({"hello": 1})
    finally:
        done.set()
        for reader in readers:
            reader.join()
