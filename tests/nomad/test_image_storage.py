"""What Docker's containers are given of a client beside the image store: loop devices, for slots whose storage is on
the disk; and the store's directory `trees`, where images are unpacked."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from agentenv import shipped
from agentenv.containers.control import ContainerControl
from agentenv.errors import CheckpointError, ConfigError
from agentenv.executor.session import ToolSession
from agentenv.sandbox.supervisor.user_namespace import FIRST_ID, IDS, TREES
from agentenv.wire.leases import CheckpointSlot, DropCheckpoint, RestoreSlot
from agentenv.wire.roots import RootSpec
from agentenv.wire.spec import MIB
from tests.nomad.cluster import Cluster
from tests.nomad.containers import leased
from tests.nomad.farm import docker_name, first_pid
from tests.security.image_slots import ImageSlots, container, make_images
from tests.small_root import use_store
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEVICES: Final = range(64, 69)
LOOP_CTL_ADD, LOOP_CTL_REMOVE = 0x4C80, 0x4C81
LAYER: Final[dict[str, Any]] = {"writable": "disk", "writable_bytes": 100 * MIB, "memory_bytes": 120 * MIB}
ALL_IN_USE: Final = f"all {len(DEVICES)} loop devices of this container are in use"
FILL: Final = "cat /dev/zero > /fill; stat -c %s /fill"


@pytest.fixture(scope="module")
def devices() -> Iterator[str]:
    """Loop devices of this machine, as the job names them."""
    added = []
    with Path("/dev/loop-control").open("rb") as control:
        for number in DEVICES:
            with contextlib.suppress(FileExistsError):
                added.append(fcntl.ioctl(control, LOOP_CTL_ADD, number))
        yield f"{DEVICES[0]}-{DEVICES[-1]}"
        for number in added:
            with contextlib.suppress(OSError):  # somebody else uses it now
                fcntl.ioctl(control, LOOP_CTL_REMOVE, number)


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["nomad"])
async def the_container(
    request: pytest.FixtureRequest, cluster: Cluster, devices: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ImageSlots]:
    images = make_images(tmp_path_factory.mktemp("images"))
    async with container(images, request, slots=4, variables={"loop_devices": json.dumps(devices)}) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def slots(the_container: ImageSlots) -> AsyncIterator[ImageSlots]:
    yield the_container
    await the_container.release_all()
    await until(lambda: not in_use(), explain=lambda: f"left: {in_use()}")


def in_use() -> list[int]:
    """Those of the devices that show a file."""
    return [number for number in DEVICES if Path(f"/sys/block/loop{number}/loop").exists()]


async def run(session: ToolSession, command: str, **more: Any) -> str:
    result = await session.call("bash", {"command": command}, timeout_s=120, **more)
    assert result.fault == "none", result
    return result.stdout


async def filled(session: ToolSession) -> int:
    """Write until it fails; how much it was."""
    result = await session.call("bash", {"command": FILL}, timeout_s=120)
    assert "No space left on device" in result.stderr, result
    return int(result.stdout)


async def test_storage_on_the_disk_is_bounded_and_kept_in_checkpoints(slots: ImageSlots) -> None:
    session = await slots.open(**LAYER)
    assert 100 * MIB <= await filled(session) <= 130 * MIB
    await run(session, "rm /fill; echo kept > /work/f")
    async with ContainerControl(session.lease.container, guest=True) as control:
        checkpoint = (await control.act(session.lease.key, CheckpointSlot())).checkpoint
        await run(session, "echo changed > /work/f")
        fork = await slots.open(**LAYER, checkpoint=checkpoint)
        assert [await run(one, "cat /work/f") for one in (session, fork)] == ["changed\n", "kept\n"]
        await control.act(session.lease.key, RestoreSlot(checkpoint=checkpoint))
        assert await run(session, "cat /work/f; ls -d /dev/loop* 2>&1 | wc -l") == "kept\n1\n"
        assert len(in_use()) == 3
        await control.act(session.lease.key, DropCheckpoint(checkpoint=checkpoint))


async def test_without_a_free_device_a_slot_goes_on_without_a_checkpoint(slots: ImageSlots) -> None:
    sessions = [await slots.open(**LAYER) for _ in range(3)]
    async with ContainerControl(sessions[0].lease.container, guest=True) as control:
        kept = [(await control.act(one.lease.key, CheckpointSlot())).checkpoint for one in sessions[:2]]
        assert len(in_use()) == len(DEVICES)
        with pytest.raises(CheckpointError, match=ALL_IN_USE):
            await control.act(sessions[2].lease.key, CheckpointSlot())
        assert await run(sessions[2], "echo on") == "on\n"
        for one, checkpoint in zip(sessions, kept, strict=False):
            await control.act(one.lease.key, DropCheckpoint(checkpoint=checkpoint))


async def test_a_killed_container_leaves_no_device(slots: ImageSlots) -> None:
    session = await slots.open(**LAYER)
    async with ContainerControl(session.lease.container, guest=True) as control:
        await control.act(session.lease.key, CheckpointSlot())
    assert len(in_use()) == 2
    os.kill(first_pid(session.lease.container.id), signal.SIGKILL)
    await until(lambda: not in_use())


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["nomad"])
async def unpacking(
    request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ImageSlots]:
    images = make_images(tmp_path_factory.mktemp("unpacked"))
    async with container(images, request, image_format="tree", variables={"unpack_images": "true"}) as made:
        yield made


async def test_images_are_unpacked_beside_a_store_that_is_read_only(unpacking: ImageSlots, cluster: Cluster) -> None:
    session, again = await unpacking.open(), await unpacking.open()
    assert await run(session, "rm /attacks.py; echo mine > /work/f; cat /work/f") == "mine\n"
    assert await run(again, "ls /attacks.py; stat -c %u:%g /attacks.py") == "/attacks.py\n0:0\n"
    async with ContainerControl(session.lease.container, guest=True) as control:
        assert (await control.info()).image_format == "tree"
    trees = unpacking.images.store / "trees"
    assert {tree.lstat().st_uid for tree in trees.iterdir()} == {FIRST_ID + IDS * TREES}
    made = cluster.docker.containers.get(docker_name(session.lease.container.id))
    mounts = {mount["Destination"]: mount["RW"] for mount in made.attrs["Mounts"]}
    assert (mounts["/store"], mounts["/store/trees"]) == (False, True)


async def test_what_a_container_was_not_given_is_refused_by_name(unpacking: ImageSlots) -> None:
    with pytest.raises(ConfigError, match=r"loop_devices of the Nomad job"):
        await unpacking.open(**LAYER)


async def test_raw_exec_has_it_in_the_allocations_directory(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = make_images(tmp_path)
    use_store(monkeypatch, images.store)
    image = images.make(images.programs)
    own = {"python": sys.executable, "pythonpath": str(shipped.PACKAGE.parent), "data_dir": str(tmp_path / "data")}
    job_id = cluster.job_id("raw")
    token = cluster.run(job_id, {"slots": 1}, driver="raw_exec", image_store=str(images.store), **own)
    try:
        [(allocation, url)] = cluster.serving(job_id).items()
        root = RootSpec(image, writable="disk", writable_bytes=1024 * MIB, memory_bytes=120 * MIB)
        with leased(url, token, root):
            assert any(f"/{allocation}/alloc/data/" in shown for shown in shown_files())
        await until(lambda: not any(allocation in shown for shown in shown_files()))
    finally:
        cluster.purge(job_id)


def shown_files() -> list[str]:
    """The files that loop devices of this machine show."""
    found = []
    for shown in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # detached by now
            found.append(shown.read_text())
    return found
