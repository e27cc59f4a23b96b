"""Services of a slot: what they share with its main root and what they do not; their limits and their end. As root."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentenv import AsyncFarm, AsyncSandbox, ImageRoot
from agentenv.errors import CheckpointError, ConfigError
from agentenv.sdk.roots import Service
from tests.small_image import small_image
from tests.waiting import until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="image slots need root, or ids of its own")
NAMESPACES = "for kind in user net pid mnt ipc uts cgroup; do stat -L -c '%i' /proc/self/ns/$kind; done"


@pytest.fixture
async def farm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[AsyncFarm, ImageRoot]]:
    """Two slots in one container, and a root with a service."""
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(tmp_path / "cache"))
    image = small_image(tmp_path / "layout")
    beside = Service(image, user="app", env={"ROLE": "target"}, volumes={"/shared": "v", "/kept": "v:ro"})
    root = ImageRoot(
        image,
        memory_mib=256,
        storage_mib=64,
        services={"target": beside},
        volumes={"/srv/of/main": "v"},
        hosts=["other.name"],
    )
    async with AsyncFarm(slots=2) as opened:
        yield opened, root


@pytest.fixture
async def box(farm: tuple[AsyncFarm, ImageRoot]) -> AsyncIterator[AsyncSandbox]:
    async with farm[0].sandbox(farm[1]) as opened:
        yield opened


async def said(box: AsyncSandbox, command: str, user: str | None = None) -> str:
    return (await box.run(command, user=user)).stdout.strip()


async def namespaces(box: AsyncSandbox) -> list[str]:
    return (await said(box, NAMESPACES)).split()


async def test_the_network_is_shared_and_nothing_else_is(box: AsyncSandbox) -> None:
    target = await box.service("target")
    mine, its = await namespaces(box), await namespaces(target)
    same = [a == b for a, b in zip(mine, its, strict=True)]
    assert same == [True, True, False, False, False, False, False]
    for one in (box, target):
        hosts = await said(one, "cat /etc/hosts")
        assert "127.0.0.1 target\n127.0.0.1 other.name" in hosts
    assert await said(target, "id -u; echo $ROLE") == "1234\ntarget"
    await target.run("echo secret > /opt/flag", user="root")
    sleeper = await target.start(["sleep", "86399.5"], user="root")
    await until(lambda: running("86399.5"))  # start() returns before the program is executed
    seen = await said(box, "for f in /proc/[0-9]*/cmdline; do cat $f 2>/dev/null; done")
    assert "sleep" not in seen.replace("\0", " ")
    assert "secret" not in await said(box, "cat /opt/flag /proc/[0-9]*/root/opt/flag 2>/dev/null")
    await box.run("kill -9 -1")
    assert (await sleeper.state()).state == "running"


async def test_volumes_are_in_every_root_that_names_them(box: AsyncSandbox) -> None:
    target = await box.service("target")
    await box.run("echo from main > /srv/of/main/file")
    assert await said(target, "cat /shared/file /kept/file") == "from main\nfrom main"
    assert (await target.run("echo x > /kept/file", user="root")).exit_code != 0
    with pytest.raises(CheckpointError, match="services or volumes"):
        await box.commit("name:1")


async def test_a_service_has_no_way_into_another_slot(farm: tuple[AsyncFarm, ImageRoot], box: AsyncSandbox) -> None:
    async with farm[0].sandbox(farm[1]) as neighbour:
        target, other = await box.service("target"), await neighbour.service("target")
        await other.run("echo theirs > /shared/file; echo theirs > /tmp/file", user="root")
        for mine, theirs in zip(await namespaces(target), await namespaces(other), strict=True):
            assert mine != theirs
        assert await said(target, "cat /shared/file /tmp/file 2>/dev/null", user="root") == ""
        await target.run("kill -9 -1", user="root")
        assert (await other.run("cat /shared/file")).stdout == "theirs\n"


async def test_limits_are_those_of_all_roots_together(box: AsyncSandbox) -> None:
    target = await box.service("target")
    fill = "head -c 40M /dev/zero > /tmp/fill && echo room"
    assert await said(target, fill) == "room"
    assert await said(box, fill) == "", "64 MiB are for both"
    await target.run("rm /tmp/fill")
    assert await said(box, fill) == "room"


async def test_everything_ends_with_the_slot_and_when_it_is_sealed(
    farm: tuple[AsyncFarm, ImageRoot],
) -> None:
    mark = "86399.125"
    async with farm[0].sandbox(farm[1]) as box:
        target = await box.service("target")
        process = await target.start(["sleep", mark])
        await target.run("echo kept > /shared/file; echo kept > /tmp/file", user="root")
        await until(lambda: running(mark))  # start() returns before the program is executed
        await box.seal()
        assert not running(mark)
        assert await said(target, "cat /shared/file /opt/../shared/file", user="root") == "kept\nkept"
        await target.start(["sleep", mark])
        await until(lambda: running(mark))
        assert process.exit_code is None
    await until(lambda: not running(mark))
    async with farm[0].sandbox(farm[1]) as box:
        assert await said(await box.service("target"), "ls /shared") == ""


def running(mark: str) -> list[str]:
    """Processes of the machine with this argument."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [str(place)] if mark.encode() in place.read_bytes().split(b"\0") else []
        except OSError:
            continue
    return found


async def test_what_cannot_be_is_refused_by_name(farm: tuple[AsyncFarm, ImageRoot], box: AsyncSandbox) -> None:
    with pytest.raises(ConfigError, match="no service 'web'"):
        await box.service("web")
    target = await box.service("target")
    with pytest.raises(ConfigError, match="a part of its slot"):
        await target.seal()
    image = farm[1].image
    for volumes in ({"/proc/x": "v"}, {"/etc": "v"}, {"relative": "v"}, {"/a/../b": "v"}, {"/a": "../v"}):
        with pytest.raises(ConfigError, match=re.escape("root.volumes")):
            ImageRoot(image, volumes=volumes).spec("sha256:" + 64 * "0")
    async with AsyncFarm(slots=1) as alone:
        with pytest.raises(ConfigError, match="where the image has files"):
            async with alone.sandbox(ImageRoot(image, volumes={"/bin": "v"})):
                pass
