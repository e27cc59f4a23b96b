"""Sandboxes with names are paused and resumed by them, by any process of the run, or when nobody uses them."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE

import pytest

from agentenv import AsyncSandbox, Farm
from agentenv.deadlines import scaled
from agentenv.errors import ConfigError, LeaseLostError
from tests.contract.named_farms import client, farm, names, states
from tests.farm_service import Served, token
from tests.waiting import START_S, eventually

__all__ = ["farm"]


def busy_slots(farm: Served) -> int:
    return farm.farm.load().slots.get("leased", 0)


async def test_one_that_was_paused_is_resumed_by_its_name(farm: Served) -> None:
    async with client(farm) as first, first.sandbox(name="build", idle_timeout_s=300, on_idle="pause") as box:
        await box.write_file("note", "kept\n")
        await box.run("sleep 1000 >/dev/null 2>&1 & echo $! > pid")
        await box.pause()
        assert not box.is_open
        (listed,) = await first.sandboxes()
        assert (listed.name, listed.state, listed.idle_timeout_s, listed.on_idle) == ("build", "paused", 300.0, "pause")

        async def given_back() -> bool:
            return busy_slots(farm) == 0

        await eventually(given_back)
    async with client(farm) as second:
        with pytest.raises(ConfigError, match=r"already \(use it: farm.connect\('build'\)\)"):
            await second.sandbox(name="build").open()
        async with second.connect("build") as box, second.connect("build") as beside:
            assert await box.read_file("note") == await beside.read_file("note") == "kept\n"
            assert (await box.run("kill -0 $(cat pid) 2>&1")).exit_code != 0  # files, no processes
            (listed,) = await second.sandboxes()
            assert (listed.state, listed.idle_timeout_s, listed.on_idle) == ("running", 300.0, "pause")
            await box.write_file("note", "later\n")
            await second.pause("build")
            await second.pause("build")  # it is already
            with pytest.raises(LeaseLostError, match="'build'"):
                await beside.run("true")
        async with second.connect("build") as box:
            assert await box.read_file("note") == "later\n"
            await box.kill()
        assert await names(second) == []


async def test_the_paused_are_killed_and_hidden_from_other_runs(farm: Served) -> None:
    async with client(farm) as mine, client(farm, "others") as others:
        for one in (mine, others):
            box = await one.sandbox(name="build").open()
            await box.write_file("note", f"{one is mine}\n")
            await box.pause()
        await mine.kill("build")
        assert await names(mine) == []
        with pytest.raises(ConfigError, match="no sandbox 'build'"):
            await mine.kill("build")
        with pytest.raises(ConfigError, match="no sandbox 'build'"):
            await mine.pause("build")
        with pytest.raises(ConfigError, match="no sandbox 'build'"):
            await mine.connect("build").open()
        async with others.connect("build") as box:
            assert await box.read_file("note") == "False\n"
        await others.kill("build")
        assert await names(others) == []
        async with mine.sandbox(name="build") as box:
            assert (await box.run("ls")).stdout == ""


async def test_several_that_resume_at_once_are_connected_to_one(farm: Served) -> None:
    async with client(farm) as mine:
        async with mine.sandbox(name="build") as box:
            await box.write_file("note", "kept\n")
            await box.pause()
        boxes = [mine.connect("build") for _ in range(3)]
        opened = await asyncio.gather(*(box.open() for box in boxes), return_exceptions=True)
        for one in opened:
            assert isinstance(one, AsyncSandbox), one
            assert await one.read_file("note") == "kept\n"
        await boxes[0].write_file("note", "one\n")
        assert [await box.read_file("note") for box in boxes] == ["one\n"] * 3
        await asyncio.gather(*(box.close() for box in boxes))
        assert await states(mine) == {"build": "running"}
        await mine.kill("build")


async def test_one_that_nobody_is_connected_to_is_paused_after_its_idle_timeout(farm: Served) -> None:
    async with client(farm) as mine:
        async with mine.sandbox(name="short", idle_timeout_s=scaled(10.0), on_idle="pause") as box:
            await box.write_file("note", "kept\n")

        async def paused() -> bool:
            return await states(mine) == {"short": "paused"} and busy_slots(farm) == 0

        await eventually(paused)
        async with mine.connect("short") as box:
            assert await box.read_file("note") == "kept\n"
        await eventually(paused)  # again: so it was opened
        await mine.kill("short")
        with pytest.raises(ConfigError, match="on_idle: got 'stop'"):
            await mine.sandbox(name="none", on_idle="stop").open()  # type: ignore[arg-type]


async def test_the_command_lists_pauses_resumes_and_kills(farm: Served) -> None:
    async def command(*words: str) -> tuple[str, str]:
        arguments = [
            sys.executable,
            "-c",
            "from agentenv.cli import main; main()",
            "sandboxes",
            *words,
            "--url",
            farm.url,
            "--token",
            token("tests"),
        ]
        ran = await asyncio.create_subprocess_exec(*arguments, stdout=PIPE, stderr=PIPE)
        stdout, stderr = await ran.communicate()
        assert ran.returncode == 0, stderr
        return stdout.decode(), stderr.decode()

    async def state() -> list[str]:
        return [one["state"] for one in json.loads((await command("list", "--json"))[0])]

    async with client(farm) as mine:
        async with mine.sandbox(name="build"):
            pass
        assert "build is paused" in (await command("pause", "build"))[1]
        assert await state() == ["paused"]
        await command("resume", "build")
        assert await state() == ["running"]
        await command("kill", "build")
        assert await names(mine) == []


async def test_the_same_without_asyncio(farm: Served) -> None:
    def use() -> str:
        with Farm("farm", farm=farm.access(), start_timeout_s=START_S) as mine:
            with mine.sandbox(name="build") as box:
                box.write_file("note", "kept\n")
            mine.pause("build")
            assert [one.state for one in mine.sandboxes()] == ["paused"]
            with mine.connect("build") as box:
                text = box.read_file("note")
            mine.kill("build")
            return text

    assert await asyncio.to_thread(use) == "kept\n"
