"""The served model's failures, and the scripted policy asked by the real openai client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import openai
import pytest

from agentenv.agent.models.openai import ENDS, ServedModel, completion_of, failure_of
from agentenv.agent.protocols import ContextOverflow
from agentenv.errors import ConfigError, DoubtfulTurnError, ModelServerError
from agentenv.testing import Call, Failure, Reply, ScriptedPolicy, Turn, load_script
from tests.waiting import DEADLINE_S

ASK = [{"role": "user", "content": "[task:a] go"}]


class Status(Exception):
    def __init__(self, status_code: int, message: str = "", code: str | None = None) -> None:
        super().__init__(message)
        self.status_code, self.code = status_code, code


def test_failures_are_told_apart() -> None:
    assert isinstance(failure_of(Status(400, code="context_length_exceeded")), ContextOverflow)
    assert isinstance(failure_of(Status(400, "This model's maximum context length is 10")), ContextOverflow)
    for error in (Status(400, "bad tools"), Status(500, "maximum context length"), OSError("x")):
        assert isinstance(failure_of(error), ModelServerError)
    assert "base_url" in str(failure_of(Status(404)))
    hidden = SimpleNamespace(last_attempt=SimpleNamespace(exception=lambda: Status(400, code=OVERFLOW)))
    assert isinstance(failure_of(hidden), ContextOverflow)  # type: ignore[arg-type]


OVERFLOW = "context_length_exceeded"


def test_what_the_model_wrote_may_be_why_a_conversation_is_refused() -> None:
    for status in (400, 403, 422):
        assert type(failure_of(Status(status, "bad message"))) is ModelServerError, "the settings are wrong"
        assert type(failure_of(Status(status, "bad message"), turns=1)) is DoubtfulTurnError
    for status in (401, 404, 429, 500, 503):
        assert type(failure_of(Status(status), turns=1)) is ModelServerError, "no conversation can do that"
    assert isinstance(failure_of(Status(413, "body too large"), turns=3), ContextOverflow)


class APITimeoutError(Exception):
    """As the openai client calls it."""


def test_a_turn_that_takes_too_long_is_the_model_s_doing_where_only_time_bounds_it() -> None:
    for slow in (TimeoutError(), APITimeoutError(), Status(504), Status(408), Status(524)):
        assert type(failure_of(slow, endless=True)) is DoubtfulTurnError
        assert type(failure_of(slow, endless=False)) is ModelServerError
    assert type(failure_of(Status(500), endless=True)) is ModelServerError


@pytest.mark.parametrize("limits", [{"max_tokens": 5}, {"extra_body": {"max_completion_tokens": 5}}])
async def test_a_token_limit_may_be_anywhere(limits: dict[str, Any]) -> None:
    async def slow(**_: Any) -> Any:
        raise TimeoutError

    for given, kind in ((limits, ModelServerError), ({}, DoubtfulTurnError)):
        with pytest.raises(ModelServerError) as caught:
            await ServedModel(slow, timeout_s=5).complete(ASK, [], **given)
        assert type(caught.value) is kind


async def test_the_served_model_counts_its_turns() -> None:
    replies: list[Any] = [answered("stop"), Status(400, "invalid message")]

    async def chat(**_: Any) -> Any:
        reply = replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    model = ServedModel(chat, timeout_s=5)
    await model.complete(ASK, [])
    with pytest.raises(DoubtfulTurnError, match="refuses the conversation"):
        await model.complete(ASK, [])


@pytest.mark.parametrize(
    ("tokens", "asked", "overflow"),
    [
        (1, {}, True),
        (255, {}, True),
        (256, {}, False),
        (None, {}, False),
        (1, {"max_tokens": 1}, False),
        (1, {"max_tokens": 2}, True),
        (99, {"extra_body": {"max_completion_tokens": 100}}, True),
        (100, {"extra_body": {"max_completion_tokens": 100}}, False),
    ],
)
async def test_a_first_answer_cut_where_it_began_is_a_prompt_that_does_not_fit(
    tokens: int | None, asked: dict[str, Any], overflow: bool
) -> None:
    async def chat(**_: Any) -> Any:
        return answered("length", tokens)

    model = ServedModel(chat, timeout_s=5)
    if overflow:
        with pytest.raises(ContextOverflow, match=f"cut after {tokens} tokens"):
            await model.complete(ASK, [], **asked)
    else:
        assert (await model.complete(ASK, [], **asked)).finish_reason == "length"
        assert (await model.complete(ASK, [], **asked)).finish_reason == "length", "a later one is the conversation's"


def answered(finish_reason: Any, tokens: int | None = None) -> Any:
    message = SimpleNamespace(model_dump=lambda **_: {"role": "assistant", "content": "half an ans"})
    usage = None if tokens is None else SimpleNamespace(model_dump=lambda **_: {"completion_tokens": tokens})
    return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason=finish_reason)], usage=usage)


@pytest.mark.parametrize("finish_reason", ["abort", "error", "load", "", None])
def test_a_message_broken_off_is_no_answer(finish_reason: Any) -> None:
    with pytest.raises(ModelServerError, match="aborted the message"):
        completion_of(answered(finish_reason))


def test_a_message_that_came_to_its_end_is_one() -> None:
    for finish_reason in sorted(ENDS):
        assert completion_of(answered(finish_reason)).finish_reason == finish_reason


def test_an_answer_without_a_message_is_the_server_s_failure() -> None:
    for reply in (None, SimpleNamespace(choices=[]), SimpleNamespace(choices=[SimpleNamespace(message=None)])):
        with pytest.raises(ModelServerError) as caught:
            completion_of(reply)
        assert type(caught.value) is ModelServerError
        with pytest.raises(DoubtfulTurnError):
            completion_of(reply, turns=1)


async def test_a_silent_server_ends_at_the_timeout_and_cancellation_goes_through() -> None:
    async def hang(**_: Any) -> Any:
        await asyncio.Event().wait()

    with pytest.raises(ModelServerError, match=r"did not answer in time: .* 0\.05 s"):
        await ServedModel(hang, timeout_s=0.05).complete(ASK, [], max_tokens=5)
    with pytest.raises(DoubtfulTurnError, match="agent_max_tokens"):
        await ServedModel(hang, timeout_s=0.05).complete(ASK, [])
    task = asyncio.create_task(ServedModel(hang, timeout_s=60).complete(ASK, []))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    async def stray(**_: Any) -> Any:
        raise asyncio.CancelledError

    with pytest.raises(ModelServerError, match="cancelled from inside"):
        await ServedModel(stray, timeout_s=60).complete(ASK, [])


async def ask(policy: ScriptedPolicy, messages: list[dict[str, Any]], user: str | None = None) -> Any:
    constant = {"model": "scripted", **({"user": user} if user else {})}
    async with openai.AsyncClient(api_key="x", base_url=policy.base_url, max_retries=0) as client:
        return await ServedModel(client.chat.completions.create, timeout_s=DEADLINE_S, constant=constant).complete(
            messages, []
        )


async def test_the_scripted_policy_says_what_it_is(tmp_path: Path) -> None:
    async with ScriptedPolicy({}) as policy, aiohttp.ClientSession() as client:
        async with client.get(policy.base_url + "/models") as reply:
            assert (await reply.json())["data"][0]["id"] == "scripted"
            assert reply.headers["Server"] == "agentenv-scripted-policy"
        async with client.get(policy.base_url.removesuffix("/v1") + "/health") as reply:
            assert (await reply.json())["scripted"] is True
        async with client.post(policy.base_url + "/chat/completions", json={"messages": ASK}) as reply:
            body = await reply.json()
            assert (body["model"], body["system_fingerprint"]) == ("scripted", "agentenv-scripted-policy")
            assert "no player for task 'a'" in body["choices"][0]["message"]["content"]
            assert body["usage"]["total_tokens"] > 2
        for bad in ({}, {"messages": "x"}, {"messages": [1]}):
            async with client.post(policy.base_url + "/chat/completions", json=bad) as reply:
                assert reply.status == 400
        async with client.post(policy.base_url + "/chat/completions", data=b"{") as reply:
            assert reply.status == 400


async def test_members_without_a_user_field_are_told_apart_by_arrival_then_by_their_calls() -> None:
    players = [[Reply(calls=(Call("bash", {"command": name}),)), Reply(f"end {name}")] for name in ("one", "two")]
    async with ScriptedPolicy({"a": players}) as policy:
        first, second = await ask(policy, ASK), await ask(policy, ASK)
        for completion, name in ((second, "two"), (first, "one")):
            call = completion.message["tool_calls"][0]
            assert json.loads(call["function"]["arguments"]) == {"command": name}
            assert completion.finish_reason == "tool_calls"
            history = [*ASK, completion.message, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]
            assert (await ask(policy, history)).message["content"] == f"end {name}"


async def test_members_with_a_user_field_keep_their_player_over_retries() -> None:
    async with ScriptedPolicy({"a": [[Reply("zero")], [Reply("one")]]}) as policy:
        for user, text in (("g-1", "one"), ("g-0", "zero"), ("g-1-try2", "one"), ("g-2", "zero")):
            assert (await ask(policy, ASK, user)).message["content"] == text


async def test_functions_play_too_and_see_the_turn() -> None:
    seen: list[Turn] = []

    def player(turn: Turn) -> Any:
        seen.append(turn)
        return Failure(429, "slow down") if turn.last_output == "stop" else Reply("fine")

    async with ScriptedPolicy({"*": [player]}) as policy:
        assert (await ask(policy, ASK)).message["content"] == "fine"
        with pytest.raises(ModelServerError, match="slow down"):
            await ask(policy, [*ASK, {"role": "tool", "tool_call_id": "scripted-0-0-0", "content": "stop"}])
        overflow = Failure(400, "too long", OVERFLOW)
        policy._script = {"*": [[overflow]]}
        with pytest.raises(ContextOverflow):
            await ask(policy, ASK)
    assert [(turn.task, turn.step) for turn in seen] == [("a", 0), ("a", 0)]


def test_scripts_load_from_json(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    reply = {"text": "hi", "calls": [{"name": "bash", "arguments": {"command": "ls"}}]}
    path.write_text(json.dumps({"tasks": {"a": [[reply, {"status": 503}]]}}))
    assert load_script(path) == {
        "a": [[Reply("hi", (Call("bash", {"command": "ls"}),)), Failure(503)]],
    }
    for bad in ("{", "[]", '{"tasks": {"a": [[{"txt": 1}]]}}', '{"tasks": {"a": [[{"calls": [{}]}]]}}'):
        path.write_text(bad)
        with pytest.raises(ConfigError):
            load_script(path)
