"""What a command checks before its first rollout, on servers that refuse a request as known ones do."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from atroposlib.envs.server_handling.server_baseline import APIServerConfig

from agentenv.env import preflight
from agentenv.env.environment import AgentEnvConfig
from agentenv.env.model_servers import OnceRetryingServer
from agentenv.env.preflight import check_servers, places, probe
from agentenv.errors import ConfigError

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
MODELS = ["Qwen/Qwen3-8B", "llama-3"]
COMPLETION = {
    "id": "x", "object": "chat.completion", "created": 0, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "length"}],
}  # fmt: skip
Answer = Callable[[dict[str, Any]], tuple[int, Any]]


@asynccontextmanager
async def model_server(answer: Answer, *, models: bool = True) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A server below /v1 that answers completions so, and what it was sent."""
    asked: list[dict[str, Any]] = []

    async def complete(request: web.Request) -> web.Response:
        asked.append(await request.json())
        status, body = answer(asked[-1])
        if isinstance(body, str):
            return web.Response(text=body, status=status, content_type="text/html")
        return web.json_response(body, status=status)

    async def listed(_: web.Request) -> web.Response:
        entries = [{"id": name, "object": "model", "created": 0, "owned_by": "x"} for name in MODELS]
        return web.json_response({"object": "list", "data": entries})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    if models:
        app.router.add_get("/v1/models", listed)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


async def probed(url: str, name: str = "llama-3", sampling: Any = None) -> None:
    server = OnceRetryingServer(APIServerConfig(base_url=url, model_name=name, api_key="k", timeout=30))
    server.openai = server.openai.with_options(max_retries=0)
    try:
        await probe([server, server], TOOLS, sampling or {})
    finally:
        await server.openai.close()


def refusing(status: int, message: str) -> Answer:
    return lambda _: (status, {"error": {"message": message, "type": "x"}})


async def test_the_probe_is_one_small_request_with_the_tools_and_sampling_of_rollouts() -> None:
    async with model_server(lambda _: (200, COMPLETION)) as (url, asked):
        await probed(f"{url}/v1", sampling={"temperature": 0.5, "extra_body": {"top_k": 5}, "max_tokens": 900})
    [request] = asked
    assert request["tools"] == TOOLS
    assert (request["max_tokens"], request["temperature"], request["top_k"]) == (1, 0.5, 5)
    assert request["model"] == "llama-3"


@pytest.mark.parametrize(
    ("answer", "name", "said"),
    [
        (
            refusing(401, "Incorrect API key"),
            "llama-3",
            r"openai\.api_key: .* \(HTTP 401: Incorrect API key\) .*set --",
        ),
        (refusing(403, "not yours"), "llama-3", r"openai\.api_key: .* \(HTTP 403: not yours\)"),
        (
            refusing(404, "The model `Qwen/Qwen3-8b` does not exist."),
            "Qwen/Qwen3-8b",
            r"openai\.model_name: .* no model 'Qwen/Qwen3-8b' \(did you mean 'Qwen/Qwen3-8B'\? it has: Qwen",
        ),
        (refusing(400, "Invalid model name: xyz"), "xyz", r"openai\.model_name: .* no model 'xyz' \(it has: Qwen"),
        (
            refusing(400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser'),
            "llama-3",
            r"refuses tools \(HTTP 400: .* \(start it with --enable-auto-tool-choice",
        ),
        (refusing(500, "tools param requires --jinja flag"), "llama-3", r"refuses tools .* or --jinja"),
        (refusing(400, "top_k is not a field"), "llama-3", r"refuses a request for 'llama-3' .*top_k is not a field"),
        (lambda _: (200, "<html>welcome</html>"), "llama-3", r"openai\.base_url: what answers at .* is not a model's"),
    ],
)
async def test_what_would_fail_every_rollout_is_one_line_with_the_next_step(
    answer: Answer, name: str, said: str
) -> None:
    async with model_server(answer) as (url, _):
        with pytest.raises(ConfigError, match=said) as found:
            await probed(f"{url}/v1", name)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("models", "path", "said"),
    [
        (True, "", r"openai\.base_url: there is no {url}/chat/completions .*did you mean {url}/v1\?"),
        (True, "/v1/chat/completions", r"did you mean {url}/v1\?"),
        (False, "/v2", r"there is no {url}/v2/chat/completions .*most often with /v1"),
    ],
)
async def test_a_wrong_path_is_named_with_the_right_one_if_there_is_one(models: bool, path: str, said: str) -> None:
    async with model_server(lambda _: (200, COMPLETION), models=models) as (url, _):
        with pytest.raises(ConfigError, match=said.format(url=url)):
            await probed(url + path)


async def test_a_password_in_the_address_is_not_printed() -> None:
    async with model_server(refusing(401, "who are you?")) as (url, _):
        with pytest.raises(ConfigError, match=re.escape(f"at {url}/v1 refuses it")) as told:
            await probed(f"{url.replace('//', '//ann:hunter2@')}/v1")
    assert "hunter2" not in str(told.value)


async def test_a_server_that_accepts_no_limit_of_one_token_gets_the_request_of_rollouts() -> None:
    def answer(request: dict[str, Any]) -> tuple[int, Any]:
        if request.get("max_tokens") == 1:
            return 400, {"error": {"message": "Unsupported parameter: use 'max_completion_tokens'"}}
        return 200, COMPLETION

    async with model_server(answer) as (url, asked):
        await probed(f"{url}/v1")
    assert [request.get("max_tokens") for request in asked] == [1, None]


@pytest.mark.parametrize("status", [408, 429, 500, 503])
async def test_a_server_that_is_busy_or_broken_is_left_to_the_rollouts(status: int) -> None:
    async with model_server(refusing(status, "later")) as (url, asked):
        await probed(f"{url}/v1")
    assert len(asked) == 1
    await probed("http://127.0.0.1:9/v1")


async def test_a_server_that_does_not_answer_in_time_is_left_to_the_rollouts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Silent:
        config = APIServerConfig(base_url="http://127.0.0.1:9/v1")

        async def chat_completion(self, **_: Any) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(preflight, "PROBE_LIMIT_S", 0.05)
    await probe([Silent()], TOOLS, {})
    assert "has not answered for 0.05 s" in caplog.text


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", r"openai\.base_url: is empty \(set it, such as http"),
        (
            "localhost:9999/v1",
            r"'localhost:9999/v1' is no http\(s\) address \(set it, such as http://localhost:9999/v1",
        ),
        ("ftp://there/v1", r"'ftp://there/v1' is no"),
        ("http://:80/v1", r"is no http"),
        ("http://host:port/v1", r"is no http"),
    ],
)
def test_an_address_that_nothing_can_be_sent_to_is_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_servers([APIServerConfig(base_url=url, api_key="k")])
    check_servers([APIServerConfig(base_url=None, api_key="k"), APIServerConfig(base_url="https://host/v1")])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("group_size", 0, "group_size: got 0 (allowed: 1 or more)"),
        ("group_size", -2, "group_size: got -2 (allowed: 1 or more)"),
        ("total_steps", 0, "total_steps: got 0 (allowed: 1 or more, or -1 (the trainer's))"),
        ("max_num_workers", 0, "max_num_workers: got 0 (allowed: 1 or more, or -1 (of each server))"),
        ("max_num_workers_per_node", 0, "max_num_workers_per_node: got 0"),
        ("max_eval_workers", 0, "max_eval_workers: got 0"),
        ("batch_size", -5, "batch_size: got -5"),
        ("max_token_length", 0, "max_token_length: got 0"),
        ("worker_timeout", 0, "worker_timeout: got 0.0 (allowed: more than 0, or -1 (none))"),
    ],
)
def test_a_setting_of_atropos_with_which_nothing_can_run_is_refused(name: str, value: float, said: str) -> None:
    with pytest.raises(ConfigError) as found:
        AgentEnvConfig(**{name: value})
    assert str(found.value).startswith(said)


def test_minus_one_is_allowed_where_atropos_has_a_meaning_for_it() -> None:
    config = AgentEnvConfig(total_steps=-1, batch_size=-1, max_num_workers=-1, worker_timeout=-1)
    assert AgentEnvConfig(**config.model_dump()) == config


@pytest.mark.parametrize("name", ["num_max_requests_at_once", "num_requests_for_eval", "timeout"])
def test_a_server_that_may_be_sent_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"openai\.{name}: got 0 \(allowed: 1 or more\)"):
        check_servers([APIServerConfig(**{name: 0})])


def config_for(**paths: Path | None) -> SimpleNamespace:
    unset = dict.fromkeys(preflight.PLACES)
    return SimpleNamespace(**{**unset, **{name: path and str(path) for name, path in paths.items()}})


def test_the_places_of_results_are_shown_with_their_room(tmp_path: Path) -> None:
    [(name, text)] = places(config_for(rollouts_path=tmp_path / "new" / "deep" / "r.jsonl"))
    assert name == "records"
    assert text.startswith(f"{tmp_path / 'new' / 'deep' / 'r.jsonl'} (")
    assert text.endswith(" GiB free)")


def test_a_place_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=99 * 2**20))
    with pytest.raises(ConfigError, match=r"data_path_to_save_groups: .* has 99 MiB left \(make room\)"):
        places(config_for(data_path_to_save_groups=tmp_path / "g.jsonl"))


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(ConfigError, match=r"rollouts_path: .* cannot be written"):
        places(config_for(rollouts_path=tmp_path / "r.jsonl"))


def test_a_directory_of_results_that_is_there_must_be_writable_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (there := tmp_path / "runs").mkdir()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != there)  # root may write anywhere
    with pytest.raises(ConfigError, match=r"runs_dir: .*runs cannot be written \(name another place\)"):
        places(config_for(runs_dir=there))
