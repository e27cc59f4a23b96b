"""Checkpoints of slots with services and volumes: the files of every root, in the same slot and in others. As root."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest

from agentenv import AsyncFarm, AsyncSandbox, ImageRoot
from agentenv.errors import CheckpointError
from agentenv.sdk.roots import Service
from agentenv.wire.spec import MIB
from tests.image_sources import oci_layout
from tests.security.image_slots import usual_files
from tests.small_root import PROGRAMS, RUNTIME, files, programs

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="image slots need root, or ids of its own")

VOLUME = """
import os
os.chdir("/srv/of/main")
os.chmod(".", 0o751)
open("file", "w").write("kept")
os.chmod("file", 0o4640)
os.chown("file", 1000, 1234)
os.link("file", "same")
os.symlink("/nowhere", "link")
os.mkfifo("pipe", 0o600)
os.setxattr("file", "user.note", b"x\\0y")
os.mkdir("directory", 0o700)
with open("directory/sparse", "w") as sparse:
    sparse.truncate(40 << 20)
for name in ("file", "directory", "."):
    os.utime(name, ns=(1_000_000_001, 2_000_000_002))
"""
"""More than its 64 MiB of storage hold twice, if a hole became zeros."""
SEEN = """
import os
def seen(path):
    found = os.lstat(path)
    room = found.st_blocks // 2048
    kept = os.getxattr(path, "user.note") if path.endswith("file") else b""
    return oct(found.st_mode), found.st_uid, found.st_gid, found.st_nlink, found.st_mtime_ns, room, kept
os.chdir("/srv/of/main")
names = sorted(["."] + os.listdir(".") + ["directory/sparse"])
print([(name, seen(name)) for name in names if name != "seen"], open("file").read(), os.readlink("link"))
"""


async def python(box: AsyncSandbox, text: str) -> str:
    done = await box.exec(["python3", "-c", text])
    assert done.exit_code == 0, done.stderr
    return done.stdout


async def said(box: AsyncSandbox, command: str) -> str:
    return (await box.run(command, user="root")).stdout.strip()


@pytest.fixture(params=["memory", "disk"])
async def opened(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[AsyncFarm, ImageRoot]]:
    """Three slots in one container, and a root with a service."""
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(tmp_path / "cache"))
    oci_layout(tmp_path / "layout", programs(*PROGRAMS), files(*usual_files()), tag="t", config=RUNTIME)
    image = f"oci:{tmp_path}/layout:t"
    storage: Literal["memory", "disk"] = request.param
    root = ImageRoot(
        image,
        memory_mib=256,
        storage_mib=64,
        storage=storage,
        services={"target": Service(image, user="user", volumes={"/shared": "v", "/kept": "v:ro", "/own": "w"})},
        volumes={"/srv/of/main": "v"},
    )
    async with AsyncFarm(slots=3, checkpoint_bytes=512 * MIB) as farm:
        yield farm, root


async def test_every_roots_files_and_the_volumes_are_kept(opened: tuple[AsyncFarm, ImageRoot]) -> None:
    farm, root = opened
    async with farm.sandbox(root) as box:
        target = await box.service("target")
        await python(box, VOLUME)
        before = await python(box, SEEN)
        await box.run("echo one > /work/mine")
        await target.run("echo one > /work/its; rm /etc/passwd; echo own > /own/file", user="root")
        first = await box.checkpoint()
        target = await box.service("target")
        assert await python(box, SEEN) == before, "it goes on with them"
        await box.run("rm -r /srv/of/main/*; echo two > /work/mine; echo two > /srv/of/main/two")
        await target.run("echo two > /work/its; echo root > /etc/passwd; rm /own/file", user="root")
        second = await box.checkpoint()
        for checkpoint, number in ((first, "one"), (second, "two"), (first, "one")):
            await box.restore(checkpoint)
            target = await box.service("target")
            assert (await said(box, "cat /work/mine"), await said(target, "cat /work/its")) == (number, number)
            assert await said(target, "cat /etc/passwd /own/file /shared/two 2>/dev/null") == (
                "own" if number == "one" else "root\ntwo"
            )
            if number == "one":
                assert await python(box, SEEN) == before
                assert await said(target, "cat /shared/file /kept/file") == "keptkept"
        assert (await target.run("echo x > /kept/x", user="root")).exit_code != 0
        (fork,) = await box.fork(1)
        async with fork:
            assert await python(fork, SEEN) == before, "whatever ids that slot has"
            await fork.run("echo forks > /srv/of/main/file")
            assert await said(await fork.service("target"), "cat /shared/file /work/its /own/file") == "forks\none\nown"
        assert await python(box, SEEN) == before


async def test_it_belongs_to_slots_with_the_same_services_and_volumes(opened: tuple[AsyncFarm, ImageRoot]) -> None:
    farm, root = opened
    async with farm.sandbox(root) as box:
        checkpoint = await box.checkpoint()
        for changed in ({"services": ()}, {"volumes": {"/srv/of/main": "other"}}):
            other = dataclasses.replace(checkpoint.root, **changed)
            with pytest.raises(CheckpointError, match="was made in a slot with target"):
                await farm.sandbox(dataclasses.replace(checkpoint, root=other)).open()
        async with farm.sandbox(dataclasses.replace(root, services={}, volumes={})) as alone:
            with pytest.raises(CheckpointError, match="was made in a slot with target"):
                await alone.restore(checkpoint)
