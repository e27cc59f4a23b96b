"""atropos' vLLM and SGLang servers as we ask them: retries, refusals with their words, what is sent."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from atroposlib.envs import base as atropos
from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager

from agentenv.agent.models.openai import failure_of
from agentenv.agent.protocols import ContextOverflow
from agentenv.env import model_servers
from agentenv.env.model_servers import SERVERS, Refused, expect_servers, tokenizer_loaded, with_tokenizer
from agentenv.errors import ModelServerError
from agentenv.testing import Call, Reply, ScriptedPolicy, TokenSpeaker, build_tokenizer
from agentenv.testing.generate import logprob_of
from tests.unit.env.env_stubs import AnswerEnv
from tests.unit.env.managed_stubs import managed, tokenizer_of
from tests.waiting import until

VLLM = {"logprobs": [[[{"7": -0.5}], [{"8": -0.25}]]], "finish_reasons": ["stop"]}
SGLANG = {
    "meta_info": {"output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]], "finish_reason": {"type": "stop"}}
}


@asynccontextmanager
async def server(directory: Path, kind: str, *replies: tuple[int, Any]) -> AsyncIterator[tuple[Any, list[Any]]]:
    """atropos' server object on an HTTP stub that gives these (status, body) in order."""
    asked: list[Any] = []

    async def generate(request: web.Request) -> web.Response:
        asked.append((dict(request.headers), await request.json()))
        status, body = replies[min(len(asked), len(replies)) - 1]
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    config = APIServerConfig(
        base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1",
        model_name="m",
        api_key="secret",
        server_type=kind,
        tokenizer_name=str(build_tokenizer(directory)),
    )
    made: Any = SERVERS[kind](config)
    try:
        yield made, asked
    finally:
        await made.openai.close()
        await runner.cleanup()


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_servers, "FIRST_DELAY_S", 0.0)


@pytest.mark.parametrize(("kind", "reply"), [("vllm", VLLM), ("sglang", SGLANG)])
async def test_tokens_and_logprobs_are_read_as_given(tmp_path: Path, kind: str, reply: Any) -> None:
    async with server(tmp_path, kind, (200, reply)) as (made, asked):
        found = await made.tokens_and_logprobs_completion(
            input_ids=[1, 1, 2],
            prompt="ignored",
            max_tokens=9,
            temperature=0.5,
            n=1,
            user="group-3",
            extra_headers={"traceparent": "00-1-2-01"},
        )
        assert len(made.request_timings) == 1
    prompt, tokens, logprobs, reasons = found
    assert (prompt, tokens, logprobs) == ([1, 1, 2], [[7, 8]], [[-0.5, -0.25]]), "two BOS are not ours to remove"
    assert reasons[0] in ("stop", {"type": "stop"})
    ((headers, body),) = asked
    assert (headers["Authorization"], headers["X-Trajectory"]) == ("Bearer secret", "group-3")
    assert headers["traceparent"] == "00-1-2-01"
    if kind == "vllm":
        sampling = {"max_tokens": 9, "temperature": 0.5, "n": 1}
        assert body == {"prompt": {"prompt_token_ids": [1, 1, 2]}, "logprobs": 0, **sampling}
    else:
        sampling = {"max_new_tokens": 9, "temperature": 0.5, "n": 1}
        assert body == {"input_ids": [1, 1, 2], "sampling_params": sampling, "return_logprob": True}


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_a_busy_server_is_asked_again(tmp_path: Path, status: int) -> None:
    async with server(tmp_path, "vllm", (status, {}), (status, {}), (200, VLLM)) as (made, asked):
        assert (await made.tokens_and_logprobs_completion(input_ids=[1], max_tokens=1))[1] == [[7, 8]]
        assert (len(asked), made.attempts_list) == (3, [3])


async def test_a_refusal_is_asked_once_and_keeps_its_words(tmp_path: Path) -> None:
    too_long = {"error": {"message": "The input (9 tokens) is longer than the model's context length (8 tokens)."}}
    async with server(tmp_path, "sglang", (400, too_long)) as (made, asked):
        with pytest.raises(Refused) as caught:
            await made.tokens_and_logprobs_completion(input_ids=[1], max_tokens=1)
        assert len(asked) == 1
    assert isinstance(failure_of(caught.value), ContextOverflow)
    assert isinstance(failure_of(Refused(400, "unknown parameter")), ModelServerError)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_generation_broken_off_is_the_server_s_failure(tmp_path: Path, kind: str) -> None:
    described = {**SGLANG["meta_info"], "finish_reason": {"type": "abort", "message": "weights are updated"}}
    reply = {**VLLM, "finish_reasons": ["abort"]} if kind == "vllm" else {"meta_info": described}
    async with server(tmp_path, kind, (200, reply)) as (made, _):
        with pytest.raises(ModelServerError, match=r"aborted the message.*abort"):
            await made.tokens_and_logprobs_completion(input_ids=[1], max_tokens=1)


async def test_a_server_that_is_not_there_fails_after_three_attempts(tmp_path: Path) -> None:
    async with server(tmp_path, "vllm", (500, {"error": "broken"})) as (made, asked):
        with pytest.raises(Refused, match="broken"):
            await made.tokens_and_logprobs_completion(input_ids=[1], max_tokens=1)
        assert len(asked) == 3
        made.config.base_url = "http://127.0.0.1:9/v1"
        with pytest.raises(ModelServerError, match=r"no model server answers at http://127\.0\.0\.1:9/v1"):
            await made.tokens_and_logprobs_completion(input_ids=[1], max_tokens=1)


async def test_servers_are_expected_until_one_answers_anything(tmp_path: Path) -> None:
    async with server(tmp_path, "vllm", (500, {"error": "broken"})) as (made, _):
        gone = SimpleNamespace(config=APIServerConfig(base_url="http://127.0.0.1:9/v1"))
        await expect_servers([gone, made], wait_s=0)
        with pytest.raises(ModelServerError, match=r"answers at http://127\.0\.0\.1:9/v1: Cannot connect"):
            await expect_servers([gone], wait_s=0)


async def test_a_server_that_comes_up_while_it_is_waited_for_is_enough(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as bound:  # nobody listens, and nobody else can take the port
        bound.bind(("127.0.0.1", 0))
        late = SimpleNamespace(config=APIServerConfig(base_url=f"http://127.0.0.1:{bound.getsockname()[1]}/v1"))
        waiting = asyncio.create_task(expect_servers([late], wait_s=60))
        await until(lambda: "waiting up to 60 s" in caplog.text)
        runner = web.AppRunner(web.Application())
        await runner.setup()
        try:
            await web.SockSite(runner, bound).start()
            await waiting
        finally:
            await runner.cleanup()


async def test_an_openai_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    async with server(tmp_path, "openai", (200, {})) as (made, _):
        made.config.base_url = "http://127.0.0.1:9/v1"
        made.openai = made.openai.with_options(base_url=made.config.base_url, max_retries=0)
        with pytest.raises(ModelServerError, match=r"no model server answers at http://127\.0\.0\.1:9/v1"):
            await made.chat_completion(messages=[{"role": "user", "content": "hi"}])


def test_a_server_without_a_tokenizer_gets_the_environment_s() -> None:
    assert with_tokenizer(APIServerConfig(), "dir").tokenizer_name == "dir"
    assert with_tokenizer(APIServerConfig(tokenizer_name="own"), "dir").tokenizer_name == "own"


async def test_the_trainer_s_longest_sequence_ends_a_rollout_before_its_group_is_skipped(tmp_path: Path) -> None:
    flood = [Reply("", (Call("bash", {"command": "seq 3000"}),)), Reply("never")]
    async with managed(AnswerEnv, tmp_path, {"*": [flood]}, group_size=2, enabled_toolsets=["bash"]) as (env, _):
        assert env._trainer_limit() is None
        env.env_id, env.max_token_len = 0, 6000  # as registering with a trainer does
        group, _again = await env.collect_trajectories({"id": "x"})
        assert group is not None
        assert all(len(tokens) < env.max_token_len for tokens in group["tokens"])
        env.max_token_len = 20
        assert (await env.collect_trajectories({"id": "y"}))[0] is None, "nothing was said, so nothing is scored"
        assert (env.counts["fault_task"], env.counts["rollouts_without_tokens"]) == (2, 0)


async def test_atropos_own_classes_can_talk_to_the_scripted_policy_as_well(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    speaker = TokenSpeaker(tokenizer)
    async with ScriptedPolicy({"*": [[Reply("hello")]]}, speaker=speaker) as policy:
        for kind in ("vllm", "sglang"):
            config = APIServerConfig(
                base_url=policy.base_url, model_name="m", api_key="x", server_type=kind, health_check=False,
                tokenizer_name=str(tmp_path / "tokenizer"),
            )  # fmt: skip
            manager = ServerManager([config])
            async with manager.managed_server(tokenizer=tokenizer) as talking:
                assert type(talking) is ManagedServer
                await talking.chat_completion(messages=[{"role": "user", "content": "hi"}], max_tokens=100)
                (node,) = talking.get_state()["nodes"]
            await manager.servers[0].openai.close()
            said = speaker.said[-1]
            assert node.tokens == said.prompt + said.tokens
            assert said.logprobs == [logprob_of(token, place) for place, token in enumerate(said.tokens)]
            assert node.logprobs[-len(said.tokens) :] == said.logprobs


async def test_the_scripted_policy_refuses_what_the_servers_would(tmp_path: Path) -> None:
    speaker = TokenSpeaker(tokenizer_of(tmp_path))
    bad: list[Any] = [
        {},
        [],
        {"prompt": {"prompt_token_ids": "x"}},
        {"input_ids": [1]},
        {"extra_body": {}, "prompt": {}},
    ]
    async with (
        ScriptedPolicy({}) as mute,
        ScriptedPolicy({}, speaker=speaker) as policy,
        aiohttp.ClientSession() as http,
    ):
        for body in bad:
            async with http.post(policy.base_url.removesuffix("/v1") + "/generate", json=body) as reply:
                assert reply.status == 400, body
        async with http.post(mute.base_url.removesuffix("/v1") + "/generate", json=bad[0]) as reply:
            assert reply.status == 404


async def test_the_scripted_policy_as_a_process_speaks_tokens_too(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"tasks": {"*": [[{"text": "hi", "calls": [{"name": "bash"}]}]]}}))
    arguments = ["-m", "agentenv.testing", str(script), "--tokenizer", str(tmp_path / "tokenizer"), "--parser", "glm47"]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        address = json.loads(await process.stdout.readline())["base_url"].removesuffix("/v1")
        body = {"input_ids": tokenizer.encode("<|start|>assistant"), "sampling_params": {"max_new_tokens": 99}}
        async with aiohttp.ClientSession() as http, http.post(address + "/generate", json=body) as reply:
            assert (await reply.json())["text"] == "hi\n<tool_call>bash</tool_call><|end|>"
    finally:
        process.terminate()
        await process.communicate()


def test_a_tokenizer_that_is_not_there_says_which_setting_is_missing() -> None:
    loader = atropos.AutoTokenizer
    with tokenizer_loaded(False):
        made = atropos.AutoTokenizer.from_pretrained("any/name")
    assert atropos.AutoTokenizer is loader
    assert made.apply_chat_template([{"role": "user"}], tokenize=True) == []
    with pytest.raises(AttributeError, match="no encode: set tokenizer_name"):
        made.encode("text")
    with tokenizer_loaded(True):
        assert atropos.AutoTokenizer is loader
