"""The managed model on a stand-in for atropos' server: what it checks, keeps and refuses."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from atroposlib.envs.server_handling.managed_server import DummyManagedServer

from agentenv.agent.models.chat_template import ChatRenderer
from agentenv.agent.models.managed import ManagedModel, PromptTokenizer
from agentenv.agent.parsers import parser_named
from agentenv.agent.protocols import ContextOverflow
from agentenv.agent.settings import opening
from agentenv.agent.token_sequences import TokenSequence, sequence_of
from agentenv.errors import ModelServerError
from agentenv.tools.catalog import ToolCatalog
from tests.unit.env.managed_stubs import tokenizer_of

TOOLS = ToolCatalog.builtin().subset(["bash"]).openai_tools()
START = opening("s", "task")


class StubServer:
    """Says what it is told to, and keeps nodes as atropos' managed server does."""

    def __init__(self, *said: str | tuple[str, str]) -> None:
        self.said = list(said)
        self.tokenizer: Any = None
        self.nodes: list[Any] = []
        self.asked: list[dict[str, Any]] = []
        self.spoil: Any = lambda node: None
        self.closed = False

    @asynccontextmanager
    async def open(self, tokenizer: PromptTokenizer) -> AsyncIterator[StubServer]:
        self.tokenizer = tokenizer
        yield self
        self.closed = True

    async def chat_completion(self, **asked: Any) -> Any:
        self.asked.append(asked)
        text, reason = said if isinstance(said := self.said.pop(0), tuple) else (said, "stop")
        prompt = self.tokenizer.apply_chat_template([])
        last = self.nodes[-1] if self.nodes and prompt.startswith(self.nodes[-1].full_text) else None
        suffix = self.tokenizer.encode(prompt[len(last.full_text) :] if last else prompt)
        written = self.tokenizer.encode(text)
        node = SimpleNamespace(
            full_text=prompt + text,
            tokens=(last.tokens if last else []) + suffix + written,
            masked_tokens=(last.masked_tokens if last else []) + [-100] * len(suffix) + written,
            logprobs=(last.logprobs if last else []) + [1.0] * len(suffix) + [-0.5] * len(written),
            metadata={"finish_reason": reason},
        )
        self.spoil(node)
        self.nodes = [*(self.nodes[:-1] if last else self.nodes), node]
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=text), finish_reason=reason)])

    def get_state(self) -> dict[str, Any]:
        return {"nodes": self.nodes}


@asynccontextmanager
async def model(
    directory: Path, server: StubServer, parser: str = "hermes", **more: Any
) -> AsyncIterator[ManagedModel]:
    tokenizer = tokenizer_of(directory)
    made = ManagedModel(
        server.open,
        tokenizer,
        ChatRenderer(tokenizer, parser_named(parser)),
        **{"timeout_s": 10, "max_tokens": 50, **more},
    )
    async with made as entered:
        yield entered
    assert server.closed


CALL = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call><|end|>'


@pytest.mark.parametrize("reason", ["abort", "error", "", None])
async def test_a_message_broken_off_is_no_answer(tmp_path: Path, reason: Any) -> None:
    async with model(tmp_path, StubServer(("half an", reason))) as talker:
        with pytest.raises(ModelServerError, match="aborted the message"):
            await talker.complete(START, TOOLS)


@pytest.mark.parametrize("levels", [101, 500, 950])
async def test_arguments_nested_too_deeply_are_told_to_the_model(tmp_path: Path, levels: int) -> None:
    deep = '{"a":' * levels + "1" + "}" * levels
    text = f'<tool_call>{{"name": "bash", "arguments": {deep}}}</tool_call><|end|>'
    async with model(tmp_path, StubServer(text)) as talker:
        first = await talker.complete(START, TOOLS)
    assert "tool_calls" not in first.message
    assert "nest" in first.problem


async def test_a_conversation_continues_one_sequence(tmp_path: Path) -> None:
    server = StubServer("<think>hm</think>so " + CALL, "fine<|end|>")
    async with model(tmp_path, server, constant={"user": "t-1"}) as talker:
        first = await talker.complete(
            START, TOOLS, temperature=0.5, extra_body={"top_p": 0.9, "chat_template_kwargs": {}}
        )
        assert (first.reasoning, first.message["content"], first.finish_reason) == ("hm", "so", "stop")
        (call,) = first.message["tool_calls"]
        assert call["function"] == {"name": "bash", "arguments": '{"command": "ls"}'}
        history = [*START, first.message, {"role": "tool", "tool_call_id": call["id"], "content": "out"}]
        second = await talker.complete(history, TOOLS)
        (sequence,) = talker.sequences()
    assert server.asked[0] == {
        "user": "t-1", "top_p": 0.9, "temperature": 0.5, "max_tokens": 50, "messages": [], "n": 1,
    }  # fmt: skip
    assert second.message == {"role": "assistant", "content": "fine"}
    assert second.raw == "fine<|end|>"
    assert second.usage is not None
    assert second.usage["total_tokens"] == len(sequence.tokens)
    assert second.usage["completion_tokens"] == len("fine") + 1
    assert sequence.first_step == 0


async def test_a_changed_history_begins_a_new_sequence_with_the_model_s_own_words(tmp_path: Path) -> None:
    server = StubServer(CALL, CALL, "end<|end|>")
    async with model(tmp_path, server) as talker:
        history = list(START)
        for text in ("one", "two"):
            said = await talker.complete(history, TOOLS)
            history += [said.message, {"role": "tool", "tool_call_id": "call_0_0", "content": text}]
        changed = [*history[:3], {**history[3], "content": "shortened"}, *history[4:]]
        await talker.complete(changed, TOOLS)
        sequences = talker.sequences()
        prompt = server.tokenizer.prompt
    assert [sequence.first_step for sequence in sequences] == [0, 2]
    assert prompt.count('<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>') == 2
    assert "shortened" in prompt


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        (('<tool_call>{"name": "bash", "arguments": {"comm', "length"), "cut off"),
        (("<think>I run <tool_call>" + CALL[11:], "length"), "cut off"),
        ("<tool_call>{oops}</tool_call><|end|>", "not valid JSON"),
    ],
)
async def test_what_cannot_be_believed_is_a_problem_and_no_call(tmp_path: Path, said: Any, outcome: str) -> None:
    async with model(tmp_path, StubServer(said), max_tokens=10) as talker:
        completion = await talker.complete(START, TOOLS)
    assert outcome in completion.problem
    assert "<tool_call>" in completion.problem, "an example of a right one"
    assert "tool_calls" not in completion.message


async def test_the_budget_is_exact(tmp_path: Path) -> None:
    server = StubServer("x" * 5 + "<|end|>", "never")
    async with model(tmp_path, server) as talker:
        await talker.complete(START, TOOLS)
        length = len(talker.sequences()[0].tokens)
    prompt = length - 6
    server = StubServer("x" * 5 + "<|end|>", "never")
    async with model(tmp_path, server, context_tokens=length) as talker:
        said = await talker.complete(START, TOOLS, max_tokens=6)
        assert server.asked[0]["max_tokens"] == 6
        with pytest.raises(ContextOverflow, match=f"the limit is {length}"):
            await talker.complete([*START, said.message, {"role": "user", "content": "more"}], TOOLS)
        assert len(talker.sequences()) == 1
    async with model(tmp_path, server, context_tokens=prompt) as talker:
        with pytest.raises(ContextOverflow):
            await talker.complete(START, TOOLS)


async def test_a_first_prompt_leaves_room_for_an_answer(tmp_path: Path) -> None:
    """One that leaves a token's room would be answered by one, and that be scored."""
    async with model(tmp_path, StubServer("x<|end|>")) as talker:
        await talker.complete(START, TOOLS)
        prompt = len(talker.sequences()[0].tokens) - 2
    for room, most, needed in ((1, 1000, 256), (255, 1000, 256), (9, 10, 10)):
        async with model(tmp_path, StubServer(), context_tokens=prompt + room) as talker:
            with pytest.raises(ContextOverflow, match=f"{prompt} tokens.*needs room for {needed}"):
                await talker.complete(START, TOOLS, max_tokens=most)
    for room, most in ((256, 1000), (10, 10)):
        server = StubServer("x<|end|>")
        async with model(tmp_path, server, context_tokens=prompt + room) as talker:
            await talker.complete(START, TOOLS, max_tokens=most)
            assert server.asked[-1]["max_tokens"] == room


async def test_a_first_answer_that_the_server_s_context_cuts_is_none(tmp_path: Path) -> None:
    """Its own limit is not ours to know; that an answer ended sooner than it had to tells."""
    for text, most in (("x" * 49, 50), ("x", 1000), ("x" * 255, 1000)):
        async with model(tmp_path, StubServer((text, "length")), max_tokens=most) as talker:
            with pytest.raises(ContextOverflow, match=f"cut after {len(text)} tokens"):
                await talker.complete(START, TOOLS)
    for text, most in (("x" * 50, 50), ("x", 1), ("x" * 256, 1000)):
        async with model(tmp_path, StubServer((text, "length")), max_tokens=most) as talker:
            assert (await talker.complete(START, TOOLS)).finish_reason == "length"
    async with model(tmp_path, StubServer(CALL, ("x", "length")), max_tokens=1000) as talker:
        said = await talker.complete(START, TOOLS)
        later = [*START, said.message, {"role": "tool", "tool_call_id": "call_0_0", "content": "out"}]
        assert (await talker.complete(later, TOOLS)).finish_reason == "length"


def node(**changed: Any) -> Any:
    fine = {"tokens": [1, 2, 3], "masked_tokens": [-100, 2, 3], "logprobs": [1.0, -0.1, 0.0], "metadata": {}}
    return SimpleNamespace(**{**fine, **changed})


def test_a_node_that_fits_becomes_a_sequence() -> None:
    sequence = sequence_of(node(), 4)
    assert (sequence.tokens, sequence.masks, sequence.logprobs) == ([1, 2, 3], [-100, 2, 3], [1.0, -0.1, 0.0])
    assert (sequence.first_step, sequence.trained) == (4, 2)
    assert sequence_of(node(), 0, sequence).tokens == [1, 2, 3]


@pytest.mark.parametrize(
    "changed",
    [
        {"logprobs": [1.0, -0.1]},
        {"masked_tokens": [-100, 2]},
        {"logprobs": [1.0, -0.1, 1.0]},  # atropos' padding for a logprob that is missing
        {"logprobs": [0.0, -0.1, -0.1]},
        {"logprobs": [1.0, float("nan"), -0.1]},
        {"logprobs": [1.0, float("-inf"), -0.1]},
        {"masked_tokens": [-100, 2, 4]},
        {"metadata": {"dummy_tokens": True}},
    ],
)
async def test_what_does_not_fit_is_our_failure_and_never_trained_on(tmp_path: Path, changed: dict[str, Any]) -> None:
    with pytest.raises(ModelServerError):
        sequence_of(node(**changed))
    server = StubServer("hi<|end|>")
    server.spoil = lambda made: setattr(made, "metadata", {"dummy_tokens": True})
    async with model(tmp_path, server) as talker:
        with pytest.raises(ModelServerError, match="placeholder"):
            await talker.complete(START, TOOLS)


def test_an_earlier_turn_must_stay_what_it_was() -> None:
    for known in (
        TokenSequence([1, 5], [-100, 5], [1.0, -0.1]),
        TokenSequence([1, 2], [-100, -100], [1.0, 1.0]),
        TokenSequence([1, 2], [-100, 2], [1.0, -0.2]),
    ):
        with pytest.raises(ModelServerError, match="earlier turn"):
            sequence_of(node(), 0, known)


async def test_atropos_dummy_nodes_are_refused() -> None:
    class Answers:
        async def chat_completion(self, **_: Any) -> Any:
            return SimpleNamespace(
                choices=[SimpleNamespace(message=SimpleNamespace(content="x"), finish_reason="stop")]
            )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dummy = DummyManagedServer(Answers())
    await dummy.chat_completion(messages=[])
    (made,) = dummy.get_state()["nodes"]
    with pytest.raises(ModelServerError, match="placeholder"):
        sequence_of(made)


async def test_a_server_that_loses_track_or_says_nothing_is_our_failure(tmp_path: Path) -> None:
    server = StubServer("hi<|end|>")
    server.spoil = lambda made: setattr(made, "full_text", "something else")
    async with model(tmp_path, server) as talker:
        with pytest.raises(ModelServerError, match="lost track"):
            await talker.complete(START, TOOLS)

    class Mute(StubServer):
        async def chat_completion(self, **_: Any) -> Any:
            return SimpleNamespace(choices=[])

    async with model(tmp_path, Mute()) as talker:
        with pytest.raises(ModelServerError, match="returned no message"):
            await talker.complete(START, TOOLS)

    class Silent(StubServer):
        async def chat_completion(self, **_: Any) -> Any:
            await asyncio.Event().wait()

    async with model(tmp_path, Silent(), timeout_s=0.05) as talker:
        with pytest.raises(ModelServerError, match="did not answer"):
            await talker.complete(START, TOOLS)
