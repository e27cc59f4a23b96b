"""The managed model on a stand-in for atropos' server: what it checks, keeps and refuses."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from atroposlib.envs.server_handling.managed_server import DummyManagedServer

from agentenv.agent.assistant_messages import LONG_HISTORY, as_history, requested_calls
from agentenv.agent.models import chat_template
from agentenv.agent.models.chat_template import ChatRenderer
from agentenv.agent.models.managed import ManagedModel, PromptTokenizer
from agentenv.agent.parsers import parser_named
from agentenv.agent.protocols import ContextOverflow, Message
from agentenv.agent.settings import opening
from agentenv.agent.token_sequences import IGNORED, TokenSequence, sequence_of
from agentenv.errors import ModelServerError
from agentenv.tools.catalog import ToolCatalog
from tests.unit.env.managed_stubs import tokenizer_of
from tests.waiting import DEADLINE_S

TOOLS = ToolCatalog.builtin().subset(["bash"]).openai_tools()
START = opening("s", "task")


class StubServer:
    """Says what it is told to, and keeps nodes as atropos' managed server does."""

    def __init__(self, *said: str | tuple[str, str]) -> None:
        self.said = list(said)
        self.tokenizer: Any = None
        self.current_nodes: list[Any] = []
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
        last = next((node for node in self.current_nodes if prompt.startswith(node.full_text)), None)
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
        self.current_nodes = (
            [node if one is last else one for one in self.current_nodes] if last else [*self.current_nodes, node]
        )
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=text), finish_reason=reason)])

    def get_state(self) -> dict[str, Any]:
        return {"nodes": self.current_nodes}


@asynccontextmanager
async def model(
    directory: Path, server: StubServer, parser: str = "hermes", **more: Any
) -> AsyncIterator[ManagedModel]:
    tokenizer = tokenizer_of(directory)
    made = ManagedModel(
        server.open,
        tokenizer,
        ChatRenderer(tokenizer, parser_named(parser)),
        **{"timeout_s": DEADLINE_S, "max_tokens": 50, **more},
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


async def two_turns(talker: ManagedModel, said: Any = None, tools: Any = TOOLS) -> list[dict[str, Any]]:
    """The history that the second of two turns was given. ``said``: what comes back instead of the first answer."""
    first = await talker.complete(START, TOOLS)
    back = first.message if said is None else said(deepcopy(first.message))
    history = [*START, back, {"role": "tool", "tool_call_id": "call_0_0", "content": "out"}]
    await talker.complete(history, tools)
    return history


def other_command(message: dict[str, Any]) -> dict[str, Any]:
    message["tool_calls"][0]["function"]["arguments"] = '{"command": "pwd"}'
    return message


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        (lambda message: {**message, "content": "edited"}, "edited"),
        (other_command, "pwd"),
        (lambda message: {**message, "tool_calls": []}, ""),
    ],
)
async def test_a_changed_last_answer_is_never_replaced_by_the_original(
    tmp_path: Path, changed: Any, shown: str
) -> None:
    server = StubServer("so " + CALL, "end<|end|>")
    async with model(tmp_path, server) as talker:
        await two_turns(talker, changed)
        prompt, sequences = server.tokenizer.prompt, talker.sequences()
    assert shown in prompt
    assert "so " + CALL not in prompt
    assert [one.first_step for one in sequences] == [0, 1], "what was said before is kept"
    assert sequences[1].trained == len("end") + 1, "nothing is trained twice"


async def test_the_last_answer_may_come_back_in_another_form(tmp_path: Path) -> None:
    """Programs serialise arguments anew and strip text; the sampled tokens stay."""

    def again(message: dict[str, Any]) -> dict[str, Any]:
        message["tool_calls"][0]["function"]["arguments"] = '{"timeout_s":1,"command":"l\\u0073"}'
        return {**message, "content": [{"type": "text", "text": " so\n"}], "refusal": None}

    server = StubServer("so " + CALL.replace('"ls"', '"ls", "timeout_s": 1.0'), "end<|end|>")
    async with model(tmp_path, server) as talker:
        await two_turns(talker, again)
        assert len(talker.sequences()) == 1


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "b a/s\u00e9h", "arguments": {"command": "ls"}}',
        '{"name": "bash", "arguments": {"command": "\\ud800", "n": 1.50}}',
        '{"name": "bash", "arguments": [1]}',
        '{"name": "bash", "arguments": "text"}',
        '{"name": "bash", "arguments": {}}',
        '{"name": "' + "n" * 80 + '", "arguments": {}}',
    ],
)
async def test_the_built_in_loop_s_form_of_an_answer_continues_it(tmp_path: Path, call: str) -> None:
    server = StubServer(f" \ud800 so <tool_call>{call}</tool_call><|end|>".replace("\ud800", ""), "end<|end|>")
    async with model(tmp_path, server) as talker:
        await two_turns(talker, lambda message: as_history(message, requested_calls(message, 0)))
        assert len(talker.sequences()) == 1


async def test_ids_are_ones_that_servers_take(tmp_path: Path) -> None:
    text = f"<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:{'9' * 80}<|tool_call_argument_begin|>"
    text += '{"command": "ls"}<|tool_call_end|><|tool_calls_section_end|><|end|>'
    server = StubServer(text, "end<|end|>")
    async with model(tmp_path, server, "kimi_k2") as talker:
        await two_turns(talker, lambda message: as_history(message, requested_calls(message, 0)))
        assert len(talker.sequences()) == 1


async def test_other_tools_are_another_conversation(tmp_path: Path) -> None:
    server = StubServer(CALL, "end<|end|>")
    async with model(tmp_path, server) as talker:
        await two_turns(talker, tools=ToolCatalog.builtin().subset(["bash", "read_file"]).openai_tools())
        assert [one.first_step for one in talker.sequences()] == [0, 1]
    assert "read_file" in server.tokenizer.prompt


async def test_a_caller_may_go_back_to_what_it_left(tmp_path: Path) -> None:
    server = StubServer(CALL, "b<|end|>", "c<|end|>")
    async with model(tmp_path, server) as talker:
        first = await talker.complete(START, TOOLS)
        result = {"role": "tool", "tool_call_id": "call_0_0", "content": "out"}
        await talker.complete([*START, {**first.message, "content": "edited"}, result], TOOLS)
        await talker.complete([*START, first.message, result], TOOLS)
        assert sorted(one.trained for one in talker.sequences())[:1] == [2]
        assert sum(one.trained for one in talker.sequences()) == len(CALL) - len("<|end|>") + 1 + 2 + 2


async def test_a_fork_goes_on_from_an_earlier_turn_with_its_tokens(tmp_path: Path) -> None:
    server = StubServer("so " + CALL, CALL, "end<|end|>")
    async with model(tmp_path, server) as talker:
        history = await two_turns(talker)
        first = talker.sequences()[0]
        other = StubServer("other<|end|>", "more<|end|>")
        talker._open_server = other.open
        fork = talker.fork(0)
        async with fork:
            assert fork.sequences() == []
            changed = [*history[:-1], {**history[-1], "content": "another result"}]
            said = await fork.complete(changed, TOOLS)
            assert said.usage is not None
            assert said.usage["completion_tokens"] == len("other") + 1
            (forked,) = fork.sequences()
            assert len(talker.sequences()) == 1, "the first goes its own way"
            assert talker.sequences() == [first]
            await fork.complete([*changed, said.message, {"role": "user", "content": "go on"}], TOOLS)
            (longer,) = fork.sequences()
            assert longer.trained == len("other") + 1 + len("more") + 1
            with pytest.raises(ValueError, match="turn 7"):
                fork.fork(7)
            assert fork.fork(1).sequences() == []
    shared = next(n for n, pair in enumerate(zip(first.tokens, forked.tokens, strict=False)) if len(set(pair)) > 1)
    assert shared > sum(1 for mask in first.masks[:shared] if mask == IGNORED) > 0, "an answer is among what they share"
    assert set(forked.masks[:shared]) == {IGNORED}, "it is trained once"
    assert forked.trained == len("other") + 1
    assert forked.first_step == 1
    assert "other" not in server.tokenizer.prompt


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


async def test_a_prompt_that_is_far_too_long_is_not_tokenised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptTokenizer, "encode", lambda *_, **__: pytest.fail("tokenised"))
    long = [*START, {"role": "user", "content": "x " * 100_000}]
    async with model(tmp_path, StubServer(), context_tokens=1000) as talker:
        with pytest.raises(ContextOverflow, match="characters, the limit is 1000 tokens"):
            await talker.complete(long, TOOLS)


async def test_a_long_prompt_is_tokenised_once_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apart, encode, threads = ChatRenderer.tokens_apart, PromptTokenizer.encode, list[threading.Thread]()

    def in_a_thread(self: ChatRenderer, text: str) -> list[int]:
        threads.append(threading.current_thread())
        return apart(self, text)

    def watched(self: PromptTokenizer, text: str, **options: Any) -> list[int]:
        assert len(text) < 1000 or text == self._encoded[0], "tokenised again"
        return encode(self, text, **options)

    monkeypatch.setattr(ChatRenderer, "tokens_apart", in_a_thread)
    monkeypatch.setattr(PromptTokenizer, "encode", watched)
    async with model(tmp_path, StubServer("x<|end|>"), context_tokens=1_000_000) as talker:
        await talker.complete([*START, {"role": "user", "content": "x" * 300_000}], TOOLS)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_threads_share_the_copies_of_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two use one at a time, and none is made for every text."""
    tokenizer, copies, in_use = tokenizer_of(tmp_path), list[Any](), list[int]()

    def copied(original: Any) -> Any:
        copies.append(copy := deepcopy(original))
        return copy

    monkeypatch.setattr(chat_template, "deepcopy", copied)
    renderer = ChatRenderer(tokenizer, parser_named("hermes"))
    encode = type(tokenizer).encode

    def watched(self: Any, text: str, **options: Any) -> Any:
        assert self is not tokenizer
        assert id(self) not in in_use
        in_use.append(id(self))
        tokens = encode(self, text, **options)
        in_use.remove(id(self))
        return tokens

    monkeypatch.setattr(type(tokenizer), "encode", watched)
    texts = [f"{n} says hello to everyone. " * 500 for n in range(40)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(renderer.tokens_apart, texts))
    monkeypatch.undo()
    assert found == [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert 1 <= len(copies) <= 4


async def test_the_prompt_of_a_long_history_is_made_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, threads = ChatRenderer.whole, list[threading.Thread]()

    def watched(self: ChatRenderer, *given: Any) -> str:
        threads.append(threading.current_thread())
        return whole(self, *given)

    monkeypatch.setattr(ChatRenderer, "whole", watched)
    short: list[Message] = [{"role": "user", "content": f"{n}"} for n in range(LONG_HISTORY)]
    for messages in (short, [*short, short[0]]):
        async with model(tmp_path, StubServer("x<|end|>"), context_tokens=1_000_000) as talker:
            await talker.complete(messages, TOOLS)
    assert [one is threading.main_thread() for one in threads] == [True, False]


async def test_more_messages_than_tokens_are_too_many_unrendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatRenderer, "whole", lambda *_: pytest.fail("rendered"))
    async with model(tmp_path, StubServer(), context_tokens=1000) as talker:
        with pytest.raises(ContextOverflow, match="1001 messages, the limit is 1000 tokens"):
            await talker.complete([{"role": "user", "content": ""}] * 1001, TOOLS)


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
