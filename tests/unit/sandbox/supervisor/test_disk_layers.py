from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentenv.sandbox.supervisor.disk_layers import DiskLayers, delete_all, delete_tree, refusal
from tests.waiting import wait_for

MOUNTS = """\
20 1 254:0 / / rw - ext4 /dev/vda rw
21 20 0:30 / /run rw - tmpfs tmpfs rw
22 21 254:1 / /run/data rw - xfs /dev/vdb rw
23 20 0:40 / /home rw - nfs4 server:/ rw
"""


def make_deep(top: Path, depth: int) -> None:
    here = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("file", os.O_CREAT, dir_fd=here))
    os.close(here)


def test_a_tree_deeper_than_any_path_is_deleted_and_no_link_is_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("stays")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "link").symlink_to(kept)
    os.link(kept / "file", tree / "hard")
    os.mkfifo(tree / "fifo")
    make_deep(tree, 3000)
    delete_tree(tree)
    assert sorted(tmp_path.iterdir()) == [kept]
    assert (kept / "file").read_text() == "stays"


def test_what_is_discarded_is_gone_at_once_and_deleted_soon(tmp_path: Path) -> None:
    layers = DiskLayers(tmp_path / "disk")
    first, second = layers.make(os.geteuid()), layers.make(os.geteuid())
    make_deep(first, 10)
    layers.discard(first)
    assert not first.exists()
    assert second.stat().st_uid == os.geteuid()
    wait_for(lambda: list((tmp_path / "disk/trash").iterdir()) == [])
    with pytest.raises(FileNotFoundError):
        layers.discard(first)


def test_what_a_dead_container_left_is_deleted(tmp_path: Path) -> None:
    delete_all(tmp_path / "disk")
    make_deep(DiskLayers(tmp_path / "disk").make(os.geteuid()), 2000)
    delete_all(tmp_path / "disk")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("data_dir", "isolation", "said"),
    [
        ("/var/x", "auto", ""),
        ("/run/data/x", "auto", ""),
        ("/run/database", "auto", "lies on tmpfs"),
        ("/home/x", "auto", "lies on nfs4"),
        ("/var/x", "full", "nothing bounds what a slot writes"),
    ],
)
def test_where_slots_may_write_to_the_disk(data_dir: str, isolation: str, said: str) -> None:
    refused = refusal(MOUNTS, data_dir, isolation)  # type: ignore[arg-type]
    assert (said in refused) if said else refused == ""
