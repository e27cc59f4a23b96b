from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from agentenv.errors import SandboxUnavailableError
from agentenv.sandbox.supervisor import disk_layers
from agentenv.sandbox.supervisor.disk_layers import DiskLayers, file_bytes, not_on_disk, refusal
from agentenv.sandbox.supervisor.reaper import Reaper
from agentenv.wire.spec import MIB

MOUNTS = """\
20 1 254:0 / / rw - ext4 /dev/vda rw
21 20 0:30 / /run rw - tmpfs tmpfs rw
22 21 254:1 / /run/data rw - xfs /dev/vdb rw
23 20 0:40 / /home rw - overlay overlay rw
"""


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("/var/x", ""),
        ("/run/data/x", ""),
        ("/run/database", "/run/database is on tmpfs"),
        ("/home/x", "/home/x is on overlay"),
    ],
)
def test_layers_are_kept_on_a_disk_that_reserves_space(place: str, said: str) -> None:
    refused = not_on_disk(MOUNTS, place)
    assert (said in refused) if said else refused == ""
    if said:
        assert refusal(Path(place), MOUNTS) == refused


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk = f"20 1 254:0 / {tmp_path} rw - ext4 /dev/vda rw\n"
    assert "cannot create a file in" in refusal(tmp_path / "not there", on_disk)
    with monkeypatch.context() as patch:
        patch.setattr(disk_layers, "_DEVICES", tmp_path)
        assert "no loop devices (" in refusal(tmp_path, on_disk)
    monkeypatch.setattr(disk_layers, "_PROGRAM", "mkfs.none")
    assert refusal(tmp_path, on_disk).startswith("mkfs.none is not installed")


async def test_more_than_the_disk_has_is_refused_and_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = os.statvfs(tmp_path)
    far_too_much = disk.f_blocks * disk.f_frsize
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("it was tried"))
    layers = DiskLayers(tmp_path)
    assert "cannot be reserved" in layers.lacking(far_too_much, 1000)
    reaper = Reaper(asyncio.get_running_loop())
    try:
        with pytest.raises(SandboxUnavailableError, match=r"cannot be reserved.*: No space left on device"):
            await layers.mount(tmp_path, size_bytes=far_too_much, inodes=1000, uid=0, reaper=reaper)
    finally:
        reaper.close()


def test_what_is_asked_for_is_for_the_slots_own_files() -> None:
    assert file_bytes(1024 * MIB, 1000) > 1024 * MIB + 1000 * 256


def test_a_container_that_can_ask_for_no_device_has_those_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_layers, "_DEVICES", tmp_path)
    layers = DiskLayers(tmp_path)
    for name in ("loop100", "loop64", "loop9", "lp0"):
        (tmp_path / name).touch()
    assert [path.name for path in disk_layers._given_devices()] == ["loop9", "loop64", "loop100"]
    assert layers.lacking(1024, 10) == "all 3 loop devices of this container are in use", "none is one"
    (tmp_path / "loop-control").touch()
    assert disk_layers._given_devices() == []
    assert layers.lacking(1024, 10) == ""
