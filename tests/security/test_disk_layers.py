"""What image slots write to a disk: bounded by the kernel, reserved, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agentenv.containers.control import ContainerControl
from agentenv.errors import CheckpointError, ConfigError
from agentenv.executor.session import ToolSession
from agentenv.sandbox.supervisor import disk_layers
from agentenv.wire.leases import CheckpointSlot, DropCheckpoint, RestoreSlot
from agentenv.wire.spec import MIB
from tests.security.conftest import sh
from tests.security.image_slots import ImageSlots, container, make_images
from tests.waiting import until, wait_for

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can give image slots their ids"),
]
LAYER: dict[str, Any] = {
    "writable": "disk",
    "writable_bytes": 100 * MIB,
    "writable_inodes": 2_000,
    "memory_bytes": 120 * MIB,
}
DISK_BYTES = 1200 * MIB
FILL = "cat /dev/zero > /fill; stat -c %s /fill"


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A disk of its own, with room for little more than one gibibyte."""
    place = tmp_path_factory.mktemp("disk")
    file = place / "file"
    with file.open("w") as made:
        made.truncate(DISK_BYTES)
    subprocess.run(["/usr/sbin/mkfs.ext4", "-q", "-m", "0", str(file)], check=True)
    (place / "disk").mkdir()
    subprocess.run(["mount", "-o", "loop", str(file), str(place / "disk")], check=True)
    (place / "disk/lost+found").rmdir()
    try:
        yield place / "disk"
    finally:
        subprocess.run(["umount", str(place / "disk")], check=True)


@pytest.fixture(scope="module")
def empty_bytes(disk: Path) -> int:
    """What is free of it while it is empty."""
    return free_bytes(disk)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def the_container(tmp_path_factory: pytest.TempPathFactory, disk: Path) -> AsyncIterator[ImageSlots]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentenv.slots.backends.local.local_disk", lambda: str(disk))
        async with container(make_images(tmp_path_factory.mktemp("images"))) as made:
            yield made


@pytest_asyncio.fixture(loop_scope="module")
async def slots(the_container: ImageSlots, disk: Path, empty_bytes: int) -> AsyncIterator[ImageSlots]:
    yield the_container
    await the_container.release_all()
    await until(
        lambda: not files_of(disk) and free_bytes(disk) == empty_bytes,
        explain=lambda: f"left: {files_of(disk)}, and {empty_bytes - free_bytes(disk)} bytes are used",
    )


def files_of(disk: Path) -> list[str]:
    """The files in this directory that loop devices show."""
    found = []
    for shown in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            found.append(shown.read_text().strip())
        except OSError:  # detached by now
            continue
    return [name for name in found if name.startswith(str(disk))]


def free_bytes(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bfree * found.f_frsize


async def filled(session: ToolSession) -> int:
    """Write until it fails; how much it was."""
    result = await session.call("bash", {"command": FILL}, timeout_s=120)
    assert "No space left on device" in result.stderr
    return int(result.stdout)


async def test_a_slot_has_what_it_asked_for_and_no_more_whatever_its_neighbour_writes(slots: ImageSlots) -> None:
    one, two = await slots.open(**LAYER), await slots.open(**LAYER)
    for session in (one, two, one):
        assert 100 * MIB <= await filled(session) <= 130 * MIB
        await sh(session, "rm /fill")
    many = "import os\nfor number in range(9999): open(f'/work/{number}', 'w').close()"
    result = await one.call("bash", {"command": f'python3 -c "{many}"'}, timeout_s=120)
    assert "No space left on device" in result.stderr
    assert 1_950 <= int(await sh(one, "set -- /work/*; echo $#")) <= 2_200
    assert await sh(two, "echo fine > /work/file; cat /work/file") == "fine\n"


async def test_the_space_is_reserved_before_the_slot_is_used(slots: ImageSlots, disk: Path) -> None:
    before = free_bytes(disk)
    await slots.open(**{**LAYER, "writable_bytes": 500 * MIB})
    assert before - free_bytes(disk) >= 500 * MIB
    assert list(disk.iterdir()) == [], "it has no name"
    await slots.release_all()
    await until(lambda: free_bytes(disk) == before)


async def test_a_checkpoint_takes_what_is_in_it(slots: ImageSlots, disk: Path) -> None:
    session = await slots.open(**{**LAYER, "writable_bytes": 500 * MIB})
    with_one = free_bytes(disk)
    await sh(session, "head -c 50M /dev/zero > /kept")
    async with ContainerControl(session.lease.container) as control:
        checkpoint = (await control.act(session.lease.key, CheckpointSlot())).checkpoint
        assert 50 * MIB <= with_one - free_bytes(disk) <= 60 * MIB, "beside what the slot has again"
        assert await sh(session, "stat -c %s /kept") == f"{50 * MIB}\n"
        assert 500 * MIB <= await filled(session) <= 530 * MIB
        await sh(session, "rm /fill")
        await control.act(session.lease.key, RestoreSlot(checkpoint=checkpoint))
        await control.act(session.lease.key, DropCheckpoint(checkpoint=checkpoint))
    assert await sh(session, "stat -c %s /kept") == f"{50 * MIB}\n"


async def test_more_than_the_disk_has_is_refused(slots: ImageSlots) -> None:
    with pytest.raises(ConfigError, match="are more than the disk has"):
        await slots.open(**{**LAYER, "writable_bytes": DISK_BYTES})
    assert await sh(await slots.open(**LAYER), "echo works") == "works\n"


async def test_without_room_for_a_new_layer_the_slot_goes_on_without_a_checkpoint(slots: ImageSlots) -> None:
    session = await slots.open(**{**LAYER, "writable_bytes": DISK_BYTES * 6 // 10})
    await sh(session, "echo here > /file; sleep 1000 & echo $! > /pid")
    async with ContainerControl(session.lease.container) as control:
        with pytest.raises(CheckpointError, match="cannot be reserved"):
            await control.act(session.lease.key, CheckpointSlot())
    assert await sh(session, "cat /file; kill -0 $(cat /pid) && echo runs") == "here\nruns\n"


async def test_a_slots_root_can_neither_give_the_space_back_nor_reach_the_device(slots: ImageSlots) -> None:
    session = await slots.open(**LAYER)
    trim = "import fcntl, os; fcntl.ioctl(os.open('/', 0), 0xC0185879, b'\\0' * 8 + b'\\xff' * 7 + b'\\0' * 9)"
    result = await session.call("bash", {"command": f'python3 -c "{trim}"'})
    assert result.exit_code == 1
    assert "ioctl" in result.stderr or "Operation" in result.stderr
    assert await sh(session, "ls -d /dev/loop* 2>/dev/null; grep -c loop /proc/self/mountinfo || :") == "0\n"


async def test_a_killed_supervisor_leaves_no_device_and_no_file(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentenv.slots.backends.local.local_disk", lambda: str(disk / "made"))
    before = free_bytes(disk)
    async with container(make_images(tmp_path)) as slots:
        session = await slots.open(**{**LAYER, "writable_bytes": 400 * MIB})
        await sh(session, "head -c 20M /dev/zero > /file")
        async with ContainerControl(session.lease.container) as control:
            await control.act(session.lease.key, CheckpointSlot())
        assert len(files_of(disk)) == 2
        assert slots.backend is not None
        for pid in slots.backend.pids.values():
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not files_of(disk))
        wait_for(lambda: before - free_bytes(disk) < MIB, explain=lambda: f"{before - free_bytes(disk)} bytes are used")
        assert list((disk / "made").iterdir()) == []


async def test_trying_leaves_no_device(tmp_path: Path) -> None:
    mounted = Path("/proc/self/mountinfo").read_text()
    assert disk_layers.refusal(tmp_path, mounted) == ""
    wait_for(lambda: not files_of(tmp_path))
