"""What `make hosts` deletes: directories of its own, and never what is mounted in them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hosts import disk
from tests.small_root import programs
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="make hosts is root's")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Path]:
    """A directory that stands for the machine's own /dev, mounted twice in a tree that a killed run has left."""
    kept = tmp_path / "dev"
    (kept / "shm").mkdir(parents=True)
    (kept / "shm/file").write_text("kept")
    for name in ("dev", "shm"):
        (tmp_path / "tree" / name).mkdir(parents=True)
    subprocess.run(["mount", "--bind", str(kept), str(tmp_path / "tree/dev")], check=True)
    subprocess.run(["mount", "--bind", str(kept / "shm"), str(tmp_path / "tree/dev/shm")], check=True)
    yield tmp_path
    disk._unmount(tmp_path)


def test_what_a_killed_run_left_mounted_is_unmounted_and_kept(machine: Path) -> None:
    disk._remove(machine / "tree")
    assert not (machine / "tree").exists()
    assert (machine / "dev/shm/file").read_text() == "kept"


def test_nothing_is_deleted_while_something_is_mounted(machine: Path) -> None:
    with (machine / "tree/dev/shm/file").open(), pytest.raises(SystemExit, match="cannot be unmounted"):
        disk._remove(machine / "tree")
    assert (machine / "dev/shm/file").read_text() == "kept"
    disk._remove(machine / "tree")
    assert not (machine / "tree").exists()


def test_it_is_found_where_the_cache_is_a_link_and_has_a_space(tmp_path: Path) -> None:
    (tmp_path / "a place/tree/dev").mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/file").write_text("kept")
    (tmp_path / "cache").symlink_to(tmp_path / "a place")
    subprocess.run(["mount", "--bind", str(tmp_path / "dev"), str(tmp_path / "a place/tree/dev")], check=True)
    disk._remove(tmp_path / "cache/tree")
    assert not (tmp_path / "cache/tree").exists()
    assert (tmp_path / "dev/file").read_text() == "kept"


def test_a_directory_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    disk._remove(tmp_path / "tree")


def test_what_a_command_in_the_tree_has_mounted_is_never_left(tmp_path: Path) -> None:
    """Neither beside it, while it runs, nor by a run that is killed."""
    tree = tmp_path / "tree"
    inside = (
        "import sys; from pathlib import Path; from hosts import disk; disk._inside(Path(sys.argv[1]), *sys.argv[2:])"
    )
    for name in ("dev", "proc"):
        (tree / name).mkdir(parents=True)
    subprocess.run(["tar", "-xC", tree], input=programs("bash", "env", "cat", "sleep", python=False), check=True)
    within = "cat /proc/self/mounts /dev/null >/seen; : >/begun; exec sleep 600"
    running = subprocess.Popen([sys.executable, "-c", inside, tree, "bash", "-c", within], start_new_session=True)
    try:
        wait_for((tree / "begun").exists)
        seen = {line.split()[1] for line in (tree / "seen").read_text().splitlines()}
        assert {"/proc", "/dev"} <= seen
        assert disk._mounts(tree) == []
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    disk._remove(tree)
    assert not tree.exists()
