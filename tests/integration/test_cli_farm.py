"""A farm kept by ``agentenv up``, and every verb from another process: on this machine, fake and real."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentenv.metrics.scrape import Samples, parse

DEADLINE_S = 60.0
REAL = ("local", "--isolation", "full" if os.geteuid() == 0 else "user")
"""An ordinary user has to ask for less by name."""


class Farm:
    """The command with a state directory of its own."""

    def __init__(self, state: Path, backend: str, *options: str) -> None:
        self.state = state
        self.backend = backend
        self.options = options

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from agentenv.cli import main; main()", *arguments,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "AGENTENV_STATE_DIR": str(self.state), "AGENTENV_BACKEND": self.backend},
        )  # fmt: skip

    async def run(self, *arguments: str) -> tuple[int | None, str, str]:
        process = await self.start(*arguments)
        stdout, stderr = await asyncio.wait_for(process.communicate(), DEADLINE_S)
        return process.returncode, stdout.decode(), stderr.decode()

    async def told(self, *arguments: str) -> Any:
        code, stdout, stderr = await self.run(*arguments, "--json")
        assert stdout, (code, stderr)
        return json.loads(stdout)

    @asynccontextmanager
    async def up(self, *arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
        """``up --json`` until every container answers: the process that stays, and what it said."""
        process = await self.start("up", *self.options, *arguments, "--json")
        assert process.stdout is not None
        try:
            lines = []
            async with asyncio.timeout(DEADLINE_S):
                while line := await process.stdout.readline():
                    lines.append(line)
                    if line == b"}\n":
                        break
            assert lines, await process.communicate()
            yield process, json.loads(b"".join(lines))
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.terminate()
            await asyncio.wait_for(process.communicate(), DEADLINE_S)

    def left(self) -> list[str]:
        """What is in the state directory but the log."""
        containers = list((self.state / "containers").glob("*"))
        return sorted(p.name for p in (*self.state.glob("farm-*"), *containers) if p.suffix not in (".log", ".1"))


@pytest.fixture(params=[("fake",), REAL], ids=["fake", "local"])
def farm(request: pytest.FixtureRequest, tmp_path: Path) -> Farm:
    return Farm(tmp_path / "state", *request.param)


@pytest.fixture
def fake(tmp_path: Path) -> Farm:
    return Farm(tmp_path / "state", "fake")


async def test_every_verb_finds_the_farm_another_process_keeps(farm: Farm) -> None:
    async with farm.up("--containers", "2", "--slots", "2", "--metrics-port", "0") as (process, said):
        assert (said["answering_containers"], said["slots"]) == (2, {"free": 4})
        status = await farm.told("status")
        assert status["well"] is True
        assert {container["node"] for container in status["containers"]} == {"this machine"}
        assert len(await farm.told("slots")) == 4

        code, stdout, _ = await farm.run("exec", "echo $((6 * 7)); exit 3")
        assert (code, stdout) == (3, "42\n")
        code, text, _ = await farm.run("status")
        assert code == 0
        assert "healthy" in text

        samples = await scraped(status["metrics_url"])
        assert samples.one("agentenv_pool_containers", state="ready") == 2
        assert samples.one("agentenv_pool_slots", state="free") == 4
        if farm.backend == "local":
            assert sum(samples.by("agentenv_sandbox_calls_total", "container").values()) == 1
            first = status["containers"][0]["id"]
            _, log, _ = await farm.run("logs", "0")
            assert first in log
            assert status["containers"][1]["id"] not in log

        code, _, stderr = await farm.run("down")
        assert code == 0
        assert f"ended process {process.pid}" in stderr
        async with asyncio.timeout(DEADLINE_S):
            assert await process.wait() == 0
    assert farm.left() == []
    assert (await farm.run("status"))[0] == 1


async def scraped(url: str) -> Samples:
    async with aiohttp.ClientSession() as http, http.get(url) as reply:
        return parse(await reply.text())


async def test_a_command_in_the_farm_holds_a_slot_and_gives_it_back(fake: Farm) -> None:
    async with fake.up("--slots", "2"):
        running = await fake.start("exec", "--", "sleep", "60")
        async with asyncio.timeout(DEADLINE_S):
            while not (leased := await fake.told("slots", "--state", "leased")):
                assert running.returncode is None
        assert leased[0]["trajectory"] == "agentenv-exec"
        assert leased[0]["in_state_s"] >= 0
        running.send_signal(signal.SIGINT)
        await asyncio.wait_for(running.communicate(), DEADLINE_S)
        assert [slot["state"] for slot in await fake.told("slots")] == ["free", "free"]


async def test_a_full_farm_says_so_instead_of_starting_something_else(fake: Farm) -> None:
    async with fake.up("--slots", "1"):
        first = await fake.start("exec", "--", "sleep", "60")
        async with asyncio.timeout(DEADLINE_S):
            while not await fake.told("slots", "--state", "leased"):
                assert first.returncode is None
        code, stdout, _ = await fake.run("exec", "--own", "echo alone")
        assert (code, stdout) == (0, "alone\n")
        first.send_signal(signal.SIGKILL)
        await asyncio.wait_for(first.communicate(), DEADLINE_S)
        found = await fake.told("gc", "--observe", "4", "--end-leases")
        (orphan,) = found["orphans"]
        assert (orphan["kind"], orphan["removed"]) == ("lease", True)
        code, stdout, _ = await fake.run("exec", "echo mine")
        assert (code, stdout) == (0, "mine\n")


async def test_there_is_one_farm_at_a_time(fake: Farm) -> None:
    async with fake.up() as (process, _):
        code, _, stderr = await fake.run("up")
        assert code == 2
        assert f"process {process.pid}" in stderr
        assert "agentenv down" in stderr


async def test_a_killed_farm_leaves_nothing_gc_does_not_find(farm: Farm) -> None:
    async with farm.up() as (process, _):
        process.kill()
        await asyncio.wait_for(process.wait(), DEADLINE_S)
        assert (await farm.told("status"))["exists"] is False
        dry = await farm.told("gc", "--dry-run")
        assert f"farm-{farm.backend}" in [orphan["name"] for orphan in dry["orphans"]]
        assert f"farm-{farm.backend}" in farm.left()
        async with asyncio.timeout(DEADLINE_S):
            while farm.left():  # the container's last process may still be ending
                found = await farm.told("gc")
                assert found["left"] == []
    async with farm.up():
        assert (await farm.told("status"))["well"] is True


async def test_a_container_that_dies_is_a_fault_and_is_replaced(tmp_path: Path) -> None:
    farm = Farm(tmp_path / "state", *REAL)
    async with farm.up("--slots", "1") as (_, said):
        lost = said["containers"][0]["id"]
        _kill_container(farm.state, lost)
        async with asyncio.timeout(DEADLINE_S):
            while not (status := await farm.told("status"))["well"] or status["containers"][0]["id"] == lost:
                pass
        assert any(lost in fault for fault in status["faults"])


def _kill_container(state: Path, container: str) -> None:
    """SIGKILL to the process that was started with the container's spec file."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                arguments = (entry / "cmdline").read_bytes().decode().split("\0")
                if any(str(state) in one and container in one for one in arguments):
                    os.kill(int(entry.name), signal.SIGKILL)
                    return
    raise AssertionError(f"{container} does not run")


async def test_watching_is_one_document_per_line_until_ctrl_c(fake: Farm) -> None:
    async with fake.up():
        watching = await fake.start("status", "--watch", "--interval", "0.2", "--json")
        assert watching.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            seen = [json.loads(await watching.stdout.readline()) for _ in range(3)]
        assert [one["well"] for one in seen] == [True, True, True]
        watching.send_signal(signal.SIGINT)
        await asyncio.wait_for(watching.communicate(), DEADLINE_S)
        assert watching.returncode == 0
