"""Who uses a farm service: environments, scripts and the command line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentenv.env.environment import AgentEnvConfig
from agentenv.env.farm import expect_in_slots
from agentenv.errors import ConfigError, ForbiddenError, QuotaError, UnauthorizedError
from agentenv.farm_client.access import FarmAccess
from agentenv.farm_client.client import FarmClient
from agentenv.farm_client.pool import FarmPool
from agentenv.sdk.async_sandbox import AsyncSandbox
from agentenv.wire.farm import TokenRequest
from agentenv.wire.leases import RunKind, Tags
from agentenv.wire.spec import Bind
from tests.cli import Command
from tests.farm_process import COMMAND, FarmProcess
from tests.unit.env.env_stubs import IDLE, SOLVE, AnswerEnv, environment
from tests.waiting import START_S, eventually

OF_THE_FARM: dict[str, Any] = {"tool_pool_mode": "farm", "require_sandbox": False}
CAPPED = """
[runs.small]
cap = 1
"""


@pytest.fixture
async def farm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FarmProcess]:
    made = FarmProcess(tmp_path, CAPPED)
    monkeypatch.setenv("AGENTENV_STATE_DIR", made.environment["AGENTENV_STATE_DIR"])
    try:
        await made.start()
        yield made
    finally:
        await made.end()


async def test_an_environment_in_another_terminal_needs_one_setting(farm: FarmProcess, tmp_path: Path) -> None:
    shared = {**OF_THE_FARM, "acquire_timeout_s": START_S}
    async with environment(AnswerEnv, tmp_path, {"*": [SOLVE, IDLE]}, **shared) as env:
        scored, _ = await env.collect_trajectories({"id": "x"})
        assert scored is not None
        assert scored["scores"] == [1.0, 0.0, 1.0, 0.0]


async def test_two_runs_train_on_one_farm_and_neither_is_failed_by_the_other(farm: FarmProcess, tmp_path: Path) -> None:
    """One of them may have one slot only: it waits for its own, not for the farm."""

    async def run(name: str) -> list[float]:
        place = tmp_path / name
        place.mkdir()
        shared: dict[str, Any] = {
            **OF_THE_FARM, "farm_url": farm.url, "farm_token": await farm.token(name), "acquire_timeout_s": START_S,
        }  # fmt: skip
        async with environment(AnswerEnv, place, {"*": [SOLVE, IDLE]}, **shared) as env:
            groups = [await env.collect_trajectories({"id": str(number)}) for number in range(2)]
            return [score for scored, _ in groups if scored is not None for score in scored["scores"]]

    scores = await asyncio.gather(run("large"), run("small"))
    assert [sorted(one) for one in scores] == [[0.0] * 4 + [1.0] * 4] * 2


async def test_what_the_farm_cannot_give_is_refused_at_once(farm: FarmProcess, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="slot_memory_mib: is set by the farm service"):
        AgentEnvConfig(tool_pool_mode="farm", slot_memory_mib=4096)
    wanting = {**OF_THE_FARM, "allow_network": True}
    with pytest.raises(ConfigError, match="gives its slots no network"):
        async with environment(AnswerEnv, tmp_path, {}, **wanting):
            raise AssertionError("it must not open")
    with pytest.raises(UnauthorizedError, match="farm_token"):
        async with FarmClient(farm.url, "nonsense") as client:
            await client.info()
    token = await farm.token("small")
    with pytest.raises(ForbiddenError, match="not for 'large'"):
        async with FarmPool(FarmAccess((farm.url,), token, "large")) as pool:
            await pool.lease("t")
    async with FarmPool(FarmAccess((farm.url,), token)) as pool:
        with pytest.raises(QuotaError, match="2 slots were requested at once, but this token limits run 'small' to 1"):
            await pool.lease_group(["a", "b"])


async def test_an_environment_that_needs_more_in_its_slots_says_what(farm: FarmProcess, tmp_path: Path) -> None:
    shared = {**OF_THE_FARM, "acquire_timeout_s": START_S}
    async with environment(AnswerEnv, tmp_path, {}, **shared) as env:
        sessions = env._opened().sessions
        await expect_in_slots(sessions, [Bind("/elsewhere", "/usr/bin")], {"HOME": "/workspace"})
        with pytest.raises(
            ConfigError, match=r'binds = \["/opt/runner:/no/runner"\] and env = { HOME = "/workspace" }'
        ):
            await expect_in_slots(sessions, [Bind("/opt/runner", "/no/runner")], {"HOME": "/workspace"})
        with pytest.raises(ConfigError, match=r'env = { PYTHONPATH = "/no/runner" }'):
            await expect_in_slots(sessions, [], {"PYTHONPATH": "/no/runner"})


async def test_a_script_uses_it_by_name(farm: FarmProcess) -> None:
    async with AsyncSandbox(backend="farm", start_timeout_s=START_S) as box:
        assert (await box.run("echo hello")).stdout == "hello\n"
        await box.write_file("a", "b")
        assert await box.read_file("a") == "b"


async def test_the_command_line_uses_it(farm: FarmProcess) -> None:
    command = Command({"AGENTENV_STATE_DIR": farm.environment["AGENTENV_STATE_DIR"]})
    code, stdout, stderr = await asyncio.to_thread(run_single, command, "exec", "--farm", "echo hello")
    assert (code, stdout) == (0, "hello\n"), stderr
    code, stdout, stderr = await asyncio.to_thread(run_single, command, "farm", "runs", "--json")
    assert (code, json.loads(stdout)) == (0, {"runs": []}), stderr
    refused = ("farm", "runs", "--token", "file:/nowhere", "--url", farm.url)
    code, stdout, stderr = await asyncio.to_thread(run_single, command, *refused)
    assert code == 2
    assert "cannot be read" in stderr


async def test_an_operator_ends_leases_and_drains_containers(farm: FarmProcess) -> None:
    command = Command({"AGENTENV_STATE_DIR": farm.environment["AGENTENV_STATE_DIR"]})

    async def said(*words: str) -> Any:
        code, stdout, stderr = await asyncio.to_thread(run_single, command, "farm", *words, "--json")
        assert code == 0, stderr
        return json.loads(stdout)

    async with FarmPool(FarmAccess((farm.url,), await farm.token("large"))) as pool:
        ended, stays = [await pool.lease(name, tags=Tags(kind=kind)) for name, kind in NAMES.items()]
        listed = (await said("leases", "--run", "large", "--tag", "kind:eval"))["leases"]
        assert [lease["trajectory"] for lease in listed] == [ended.trajectory]
        assert await said("leases", "--run", "large", "--tag", "kind:eval", "--end") == {"ended": 1}
        assert "ended at the farm" in str(await ended.wait_lost())

        container = stays.container.id
        assert await said("drain", container) == {"container": container, "leases": 1}
        assert stays.lost is None
        await stays.release()
        async with FarmClient(farm.url, await farm.token("*")) as client:

            async def replaced() -> bool:
                return container not in {one.id for one in (await client.containers()).containers}

            await eventually(replaced, START_S)
        async with await pool.lease("elsewhere", timeout_s=START_S) as other:
            assert other.container.id != container
    code, _, stderr = await asyncio.to_thread(run_single, command, "farm", "drain", "nowhere")
    assert (code, "there is no container 'nowhere'" in stderr) == (125, True)


NAMES: dict[str, RunKind] = {"is-ended": "eval", "stays": "train"}


def run_single(command: Command, *arguments: str) -> tuple[int, str, str]:
    """The command as a process of its own."""
    with command.started(*arguments) as process:
        stdout, stderr = process.communicate(timeout=START_S)
        return process.returncode, stdout, stderr


async def test_the_command_prints_the_address_of_the_page_with_a_token(farm: FarmProcess) -> None:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "farm", "page", env=farm.environment, stdout=asyncio.subprocess.PIPE
    )
    address = (await process.communicate())[0].decode().strip()
    page, _, token = address.partition("#token=")
    assert page == f"{farm.url}/"
    with pytest.raises(ForbiddenError):  # it is not this user's own, which may do everything
        async with FarmClient(farm.url, token) as client:
            await client.mint(TokenRequest(run="*", expires_s=60))
    async with aiohttp.ClientSession() as http:
        async with http.get(page) as reply:
            assert reply.status == 200
            assert "page.js" in await reply.text()

        async def shown() -> bool:
            async with http.get(f"{page}v1/sight", headers={"Authorization": f"Bearer {token}"}) as reply:
                return [len(one["slots"]) for one in (await reply.json())["containers"]] == [2]

        await eventually(shown, START_S)
