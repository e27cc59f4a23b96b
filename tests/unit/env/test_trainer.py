"""What an environment does about a trainer's API that fails, or has forgotten it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentenv.errors import ConfigError, InfraError
from tests.unit.env.env_stubs import AnswerEnv, environment

STATUS = {"current_step": 0, "queue_size": 0, "self_queue_size": 3, "env_weight": 1.0}


class Api:
    """A trainer's API that knows ``known`` environments and answers ``status`` to those."""

    def __init__(self) -> None:
        self.known = 0
        self.status = 200
        self.received: list[Any] = []

    async def register(self, _: web.Request) -> web.Response:
        self.known += 1
        facts = {"wandb_name": "answer_0", "starting_step": 0, "checkpoint_dir": "", "checkpoint_interval": -1}
        return web.json_response({"status": "success", "env_id": self.known - 1, "num_steps": 9, **facts})

    async def ask_status(self, request: web.Request) -> web.Response:
        known = (await request.json())["env_id"] < self.known
        return web.json_response(STATUS, status=self.status) if known else web.Response(status=500)

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response({"batch_size": 8, "max_token_len": 1000})

    async def receive(self, request: web.Request) -> web.Response:
        self.received.append(await request.json())
        return web.json_response({"status": "received"})


@asynccontextmanager
async def registered(directory: Path) -> AsyncIterator[tuple[AnswerEnv, Api]]:
    api, app = Api(), web.Application()
    app.router.add_post("/register-env", api.register)
    app.router.add_get("/status-env", api.ask_status)
    app.router.add_get("/info", api.info)
    app.router.add_post("/scored_data", api.receive)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with environment(AnswerEnv, directory, rollout_server_url=url, trainer_wait_s=0.5) as env:
            await env.register_env()
            await env.get_status()
            yield env, api
    finally:
        await runner.cleanup()


async def test_a_forgotten_environment_registers_again_before_it_sends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with registered(tmp_path) as (env, api):
        api.known = 0
        await env._send_scored_data_to_api({"tokens": []})
        await env.get_status()
        assert (api.known, [data["env_id"] for data in api.received]) == (1, [0])
    said = [text for record in caplog.records if "registered again" in (text := record.getMessage())]
    assert len(said) == 1
    assert "are lost (3 in the API's queue" in said[0]


@pytest.mark.parametrize(
    ("status", "said"),
    [(500, "fails for an environment that has just registered"), (404, "failed: 404"), (503, "failed: 503")],
)
async def test_an_api_that_only_fails_is_an_infrastructure_failure(tmp_path: Path, status: int, said: str) -> None:
    async with registered(tmp_path) as (env, api):
        api.status = status
        with pytest.raises(InfraError, match=said):
            await env.get_status()
        assert api.known <= 2, "it does not register again and again"


async def test_batches_that_are_smaller_than_a_group_are_refused_in_one_line(tmp_path: Path) -> None:
    async with registered(tmp_path) as (env, _):
        env.config.group_size = 9
        with pytest.raises(ConfigError, match=r"group_size: 9 is more than the trainer's batch_size of 8"):
            await env.get_server_info()
