"""Sandboxes with names: they outlast who opened them, over a farm service with containers of each kind; and pauses."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from agentenv import AsyncFarm, AsyncSandbox, Checkpoint, Farm, ImageRoot
from agentenv.deadlines import scaled
from agentenv.errors import CheckpointError, ConfigError, LeaseLostError, QuotaError
from agentenv.slots.backends.local import LocalBackend
from tests.contract.named_farms import POOL, SETTINGS, client, farm, names
from tests.farm_service import Served, served
from tests.small_image import small_image
from tests.waiting import DEADLINE_S, START_S

__all__ = ["farm"]


async def test_another_process_goes_on_with_the_same_files_and_processes(farm: Served) -> None:
    async with client(farm) as first, first.sandbox(name="build", idle_timeout_s=300) as box:
        await box.write_file("note", "kept\n")
        await box.run("sleep 1000 >/dev/null 2>&1 & echo $! > pid")
        await box.terminal("cd /tmp; greeting=hi")
        (listed,) = await first.sandboxes()
        assert (listed.name, listed.idle_timeout_s) == ("build", 300.0)
    async with client(farm) as second, second.connect("build") as box, second.connect("build") as beside:
        assert await box.read_file("note") == "kept\n"
        assert (await box.run("kill -0 $(cat pid) && echo alive")).stdout == "alive\n"
        assert (await beside.terminal("echo $greeting")).stdout == "hi\n"
        (fork,) = await box.fork()
        assert await fork.read_file("note") == "kept\n"
        await fork.close()
        await box.kill()
        with pytest.raises(LeaseLostError, match="'build'"):
            await beside.run("true")
        assert await names(second) == []
        with pytest.raises(ConfigError, match=r"name: there is no sandbox 'build' \(any more\)"):
            await second.connect("build").open()


async def test_a_name_is_one_sandboxs_within_its_run(farm: Served) -> None:
    async with client(farm) as mine, client(farm, "others") as others:
        opened = await asyncio.gather(*(mine.sandbox(name="one").open() for _ in range(3)), return_exceptions=True)
        assert sum(isinstance(one, AsyncSandbox) for one in opened) == 1
        for one in opened:
            assert isinstance(one, AsyncSandbox) or (isinstance(one, ConfigError) and one.field == "name"), one
        (lease,) = await mine._farm_pool().leases_of("named")
        assert 0 < (lease.age_s or 0) < 600, "which one is kept is decided by it"
        with pytest.raises(ConfigError, match=r"already \(use it: farm.connect\('one'\)\)"):
            await mine.sandbox(name="one").open()
        with pytest.raises(ConfigError, match="no sandbox"):
            await others.connect("one").open()
        assert await names(others) == []
        async with others.sandbox(name="one"):
            assert await names(mine) == await names(others) == ["one"]


async def test_one_that_nobody_is_connected_to_ends_after_its_idle_timeout(farm: Served) -> None:
    idle_s, loop = scaled(15.0), asyncio.get_running_loop()
    async with client(farm) as mine:
        async with mine.sandbox(name="kept", idle_timeout_s=idle_s) as box, asyncio.timeout(DEADLINE_S + idle_s):
            began = loop.time()
            async with mine.sandbox(name="left", idle_timeout_s=idle_s):
                pass
            # Longer than that, connected.
            while loop.time() < began + 1.2 * idle_s or await names(mine) != ["kept"]:
                assert (await box.run("true")).exit_code == 0
                await asyncio.sleep(0.5)
        with pytest.raises(QuotaError, match="lease_ttl_s"):
            await mine.sandbox(name="long", idle_timeout_s=80_000).open()
        with pytest.raises(ConfigError, match="idle_timeout_s"):
            await mine.sandbox(name="none", idle_timeout_s=0).open()
        with pytest.raises(ConfigError, match="idle_timeout_s"):
            await mine.sandbox(name="none", idle_timeout_s=1e9).open()


async def test_who_is_cancelled_while_it_connects_ends_nothing(farm: Served) -> None:
    async with client(farm) as first, first.sandbox(name="build") as box:
        await box.write_file("note", "kept\n")
    async with client(farm) as second:
        for turns in range(40):
            opening = asyncio.create_task(second.connect("build").open())
            for _ in range(turns):
                await asyncio.sleep(0.001)
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
    async with client(farm) as third, third.connect("build") as box:
        assert await box.read_file("note") == "kept\n"


async def test_a_paused_one_is_taken_up_by_another_process(farm: Served) -> None:
    async with client(farm) as first:
        box = await first.sandbox().open()
        await box.write_file("note", "kept\n")
        written = (await box.pause()).to_json()
        assert not box.is_open
    async with client(farm) as second:
        kept = Checkpoint.parse(written)
        async with second.sandbox(kept, name="build") as box, second.sandbox(kept) as beside:
            assert await box.read_file("note") == await beside.read_file("note") == "kept\n"
            await box.drop(kept)
            await box.kill()
        with pytest.raises(CheckpointError):
            await second.sandbox(kept).open()
    with pytest.raises(ConfigError, match="checkpoint: got"):
        Checkpoint.parse("{}")


@pytest.mark.skipif(os.geteuid() != 0, reason="image slots need root, or ids of its own")
async def test_one_with_an_image_keeps_its_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(tmp_path / "cache"))
    image = small_image(tmp_path / "layout")
    async with served(LocalBackend(SETTINGS), POOL) as farm:
        async with client(farm) as first, first.sandbox(ImageRoot(image, workdir="/opt/made"), name="image") as box:
            await box.write_file("note", "kept\n")
        async with client(farm) as second, second.connect("image") as box:
            assert (await box.run("pwd; cat note")).stdout == "/opt/made\nkept\n"
            (fork,) = await box.fork()
            assert (await fork.run("pwd; cat note")).stdout == "/opt/made\nkept\n"
            await fork.close()
            kept = await box.pause()
            async with second.sandbox(kept) as copy:
                assert (await copy.run("pwd; cat note")).stdout == "/opt/made\nkept\n"
            async with second.connect("image") as again:
                assert (await again.run("pwd; cat note")).stdout == "/opt/made\nkept\n"
                await again.pause()
            await second.kill("image")


async def test_names_need_a_farm_service_and_pauses_a_farm() -> None:
    async with AsyncFarm("fake", slots=2) as farm:
        with pytest.raises(ConfigError, match=r"name: .* farm service"):
            farm.sandbox(name="x")
        with pytest.raises(ConfigError, match=r"name: .* farm service"):
            farm.sandbox(name="")
        with pytest.raises(ConfigError, match=r"name: .* farm service"):
            farm.connect("x")
        with pytest.raises(ConfigError, match="farm service"):
            await farm.sandboxes()
        async with farm.sandbox() as box:
            await box.write_file("note", "kept\n")
            kept = await box.pause()
        async with farm.sandbox(kept) as box:
            assert await box.read_file("note") == "kept\n"
    async with AsyncSandbox("fake") as lone:
        with pytest.raises(ConfigError, match="pause: the container of a lone sandbox"):
            await lone.pause()


async def test_the_same_without_asyncio(farm: Served) -> None:
    def use() -> str:
        with Farm("farm", farm=farm.access(), start_timeout_s=START_S) as first, first.sandbox(name="build") as box:
            box.write_file("note", "kept\n")
        with Farm("farm", farm=farm.access(), start_timeout_s=START_S) as second, second.connect("build") as box:
            text = box.read_file("note")
            assert [one.name for one in second.sandboxes()] == ["build"]
            box.kill()
            return text

    assert await asyncio.to_thread(use) == "kept\n"
