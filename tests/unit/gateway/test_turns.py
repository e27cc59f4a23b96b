"""Turns of a program: whose fault a request is that no prompt can be made of, and clients that keep no ids of calls."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from agentenv.agent.assistant_messages import LONG_HISTORY, Meanings
from agentenv.agent.models.openai import ServedModel
from agentenv.agent.protocols import Completion, Message, ToolDefinition
from agentenv.agent.settings import AgentSettings
from agentenv.agent.timeline import Timeline
from agentenv.errors import ConfigError, DoubtfulTurnError, ModelServerError
from agentenv.gateway.canonical import ModelRequest, RefusalError, Stamp
from agentenv.gateway.conversations import Conversations
from agentenv.gateway.dialects.google import DIALECT
from agentenv.gateway.turns import ProgramTurns
from tests.waiting import DEADLINE_S


class Strict:
    """A model whose chat template takes one user message."""

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolDefinition], **params: Any) -> Completion:
        if len(messages) > 1:
            raise ConfigError("tokenizer_name", "its chat template failed: roles must alternate")
        return Completion({"role": "assistant", "content": "Done."})


def request(*texts: str) -> ModelRequest:
    return ModelRequest("m", [{"role": "user", "content": text} for text in texts])


def turns_of(conversations: Conversations) -> ProgramTurns:
    return ProgramTurns(conversations, AgentSettings(), Timeline())


async def test_a_template_that_refuses_the_first_request_is_a_wrong_setting() -> None:
    async with Conversations(Strict, 4) as conversations:
        turns = turns_of(conversations)
        with pytest.raises(ConfigError):
            await turns.generate(request("a", "b"), 0)
        assert (turns.reason, type(turns.failure)) == ("fault", ConfigError)


async def test_a_template_that_refuses_a_later_request_does_not_end_the_rollout() -> None:
    """The policy can send requests of its own: none of them may keep its rollout from being scored."""
    async with Conversations(Strict, 4) as conversations:
        turns = turns_of(conversations)
        await turns.generate(request("a"), 0)
        with pytest.raises(RefusalError, match="no prompt can be made") as refused:
            await turns.generate(request("b", "c"), 1)
        assert refused.value.status == 400
        assert (turns.reason, turns.failure, len(turns.refused)) == (None, None, 1)
        assert (await turns.generate(request("d"), 2)).content == "Done."


class Calling:
    """A model that calls a tool twice in each of its turns, with ids by their place, as parsers give them."""

    def __init__(self) -> None:
        self._turn = 0

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolDefinition], **params: Any) -> Completion:
        calls = [
            {
                "id": f"call_{self._turn}_{n}",
                "type": "function",
                "function": {"name": "f", "arguments": f'{{"n": {n}}}'},
            }
            for n in range(2)
        ]
        self._turn += 1
        return Completion({"role": "assistant", "content": "I look.", "tool_calls": calls})


async def test_a_client_that_keeps_no_ids_of_calls_goes_on_in_one_conversation() -> None:
    contents: list[Any] = [{"role": "user", "parts": [{"text": "go"}]}]
    async with Conversations(Calling, 4) as conversations:
        turns = turns_of(conversations)
        for number in range(3):
            asked = DIALECT.parse({"contents": contents})
            answer = DIALECT.whole(asked, await turns.generate(asked, number), Stamp(str(number), 0))
            said = answer["candidates"][0]["content"]
            for part in said["parts"]:
                part.get("functionCall", {}).pop("id", None)
            results = [{"functionResponse": {"name": "f", "response": {"output": f"{n}"}}} for n in range(2)]
            contents += [said, {"role": "user", "parts": results}]
        assert [one.turns for one in conversations.all] == [[0, 1, 2]]
    assert [call.shown for step in turns.result.steps[:2] for call in step.tool_calls] == ["0", "1", "0", "1"]


class RefusedError(Exception):
    status_code = 400


async def test_a_conversation_that_a_server_refuses_after_turns_may_be_the_policys_doing() -> None:
    """It is not played again: a policy would get another attempt for a request of its own."""
    good = SimpleNamespace(
        choices=[
            SimpleNamespace(finish_reason="stop", message=SimpleNamespace(model_dump=lambda **_: {"content": "a"}))
        ]
    )

    async def chat_completion(messages: list[Message], **_: Any) -> Any:
        if messages[0]["content"] == "bad":
            raise RefusedError
        return good

    def model() -> ServedModel:
        return ServedModel(chat_completion, timeout_s=DEADLINE_S)

    async with Conversations(model, 4) as conversations:
        turns = turns_of(conversations)
        await turns.generate(request("good"), 0)
        with pytest.raises(DoubtfulTurnError):
            await turns.generate(request("bad"), 1)
    async with Conversations(model, 4) as conversations:
        turns = turns_of(conversations)
        with pytest.raises(ModelServerError) as failed:
            await turns.generate(request("bad"), 0)
        assert type(failed.value) is ModelServerError


async def test_a_long_history_is_named_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other rollouts of this process go on meanwhile; for a short one a thread would cost more than it saves."""
    of, threads = Meanings.of, set[threading.Thread]()

    def watched(self: Meanings, message: Message) -> str:
        threads.add(threading.current_thread())
        return of(self, message)

    monkeypatch.setattr(Meanings, "of", watched)
    async with Conversations(Calling, 4) as conversations:
        for messages, apart in ((LONG_HISTORY, False), (LONG_HISTORY + 1, True)):
            threads.clear()
            async with conversations.place_of(request(*(f"{n} of {messages}" for n in range(messages)))):
                pass
            assert [one is not threading.main_thread() for one in threads] == [apart]
