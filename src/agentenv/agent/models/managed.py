"""A :class:`Model` on a managed server, which keeps the exact tokens, masks and logprobs of a conversation.

Its text is parsed here, by the family's parser. A prompt continues the sequence before it token by token
(:mod:`agentenv.agent.models.chat_template`) if it has the same tools and its messages mean what that sequence has
(:func:`agentenv.agent.assistant_messages.meaning`), the model's answer included. Otherwise a new sequence begins,
and the earlier ones are kept. Does not depend on atroposlib: the server is a protocol.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from agentenv.agent.assistant_messages import LONG_HISTORY, Meanings, as_history, requested_calls, sendable_id
from agentenv.agent.jsonable import DEEPEST_ARGUMENTS, clean_text, deeper_than
from agentenv.agent.models.chat_template import ChatRenderer, ChatTokenizer
from agentenv.agent.models.openai import check_first, ended_by, least_room, request_completion
from agentenv.agent.parsers.base import Parsed, as_json, without_end
from agentenv.agent.protocols import Completion, ContextOverflow, Message, ToolDefinition
from agentenv.agent.token_sequences import IGNORED, NO_LOGPROB, TokenSequence, sequence_of
from agentenv.errors import DoubtfulTurnError, ModelServerError

TEMPLATE_OPTIONS = "chat_template_kwargs"
"""Key of ``extra_body`` that goes to the chat template instead of the server."""
LARGE_PROMPT_CHARS = 64 * 1024
"""A text with more is tokenised in a thread: other rollouts go on meanwhile."""
MOST_CHARS_PER_TOKEN = 32
"""Several times as many as any text has on average. A prompt with more for each token that fits is too long, which
would take minutes to find out otherwise: agent programs may send 64 MB."""


class ManagedServer(Protocol):
    """The part of atropos' ManagedServer that is used."""

    current_nodes: list[Any]
    """The sequences themselves. A prompt that begins with the text of one continues its tokens."""

    async def chat_completion(self, **request: Any) -> Any:
        """One ChatCompletion; the tokens are kept as nodes."""

    def get_state(self) -> dict[str, Any]:
        """``nodes``: every sequence there is."""


OpenServer = Callable[["PromptTokenizer"], AbstractAsyncContextManager[ManagedServer]]


class PromptTokenizer:
    """Tokenizer given to a managed server: the prompt is rendered by us, nothing is skipped in decoding, and
    nothing is added in encoding (templates write special tokens themselves)."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self._encoded: tuple[str, list[int]] = ("", [])
        self.prompt = ""

    def apply_chat_template(self, _: Any, **__: Any) -> str:
        """The prompt of this turn."""
        return self.prompt

    def encode(self, text: str, **_: Any) -> list[int]:
        """Token ids; those of the last text are cached, because they are requested twice."""
        if text != self._encoded[0]:
            self._encoded = (text, list(self.tokenizer.encode(text, add_special_tokens=False)))
        return list(self._encoded[1])

    def know(self, text: str, tokens: Sequence[int]) -> None:
        """Take the token ids of a text, which were found elsewhere, for the cache."""
        self._encoded = (text, list(tokens))

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        """Text, special tokens included."""
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@dataclass(frozen=True)
class _Node:
    """A sequence given to a managed server, as one of its own."""

    full_text: str
    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    metadata: None = None


@dataclass(frozen=True)
class _Turn:
    """Where an answer ended, so that another may follow it."""

    said: list[str]
    """The meanings of the conversation's messages, the answer's included."""
    tools: str
    generated: dict[int, tuple[str, str]]
    """Meaning and text of the messages that the model wrote, by position."""
    sequence: int
    """Which of the sequences, and how much of it."""
    tokens: int
    chars: int


class ManagedModel:
    """One trajectory's model, as an async context manager.

    ``timeout_s`` bounds a turn. ``max_tokens`` bounds the answer if the agent's settings do not. ``context_tokens``
    bounds the length of a sequence including the answer (None: no bound). ``constant`` is sent with every request.
    """

    def __init__(
        self,
        open_server: OpenServer,
        tokenizer: ChatTokenizer,
        renderer: ChatRenderer,
        *,
        timeout_s: float,
        max_tokens: int,
        context_tokens: int | None = None,
        constant: Mapping[str, Any] | None = None,
    ) -> None:
        self._open_server = open_server
        self._tokenizer = PromptTokenizer(tokenizer)
        self._renderer = renderer
        self._timeout_s = timeout_s
        self._limits = (max_tokens, context_tokens)
        self._constant = dict(constant or {})
        self._meanings = Meanings()
        self.turns_before = 0
        """As of :class:`agentenv.agent.models.openai.ServedModel`."""
        self.least_tokens = 1
        """Room for an answer that every turn needs but the first, which needs FIRST_ANSWER_TOKENS."""
        self._stack = AsyncExitStack()
        self._server: ManagedServer | None = None
        self._turns: dict[int, _Turn] = {}
        self._next_turn = 0
        self._sequences: list[TokenSequence] = []
        self._texts: list[str] = []
        self._shared_tokens = 0
        self._written_tokens = 0

    async def __aenter__(self) -> Self:
        self._server = await self._stack.enter_async_context(self._open_server(self._tokenizer))
        for text, one in zip(self._texts, self._sequences, strict=True):  # of a fork
            self._server.current_nodes.append(_Node(text, list(one.tokens), list(one.masks), list(one.logprobs)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def sequences(self) -> list[TokenSequence]:
        """Every sequence of this conversation, in the order they began. What a fork shares with the conversation it
        comes from is a sequence only if this model continued it."""
        return [one for at, one in enumerate(self._sequences) if at or len(one.tokens) > self._shared_tokens]

    def fork(self, turn: int) -> ManagedModel:
        """Another model, to be entered, whose conversation goes on behind this one's answer ``turn`` (0: the first).

        It has the exact tokens up to there and trains none of them, because this model does; turns are counted on.
        Both go their own ways. Raises: ValueError when this model, or the part it shares, has no such turn.
        """
        if (mark := self._turns.get(turn)) is None:
            raise ValueError(f"this conversation has no turn {turn}; it has {sorted(self._turns)}")
        most, limit = self._limits
        made = ManagedModel(
            self._open_server,
            self._tokenizer.tokenizer,
            self._renderer,
            timeout_s=self._timeout_s,
            max_tokens=most,
            context_tokens=limit,
            constant=self._constant,
        )
        same = {n: one for n, one in self._turns.items() if n <= turn and one.sequence == mark.sequence}
        made._turns = {n: replace(one, sequence=0) for n, one in same.items()}
        made._next_turn = turn + 1
        made.least_tokens = self.least_tokens
        made._texts = [self._texts[mark.sequence][: mark.chars]]
        tokens = self._sequences[mark.sequence].tokens[: mark.tokens]
        made._sequences = [TokenSequence(tokens, [IGNORED] * len(tokens), [NO_LOGPROB] * len(tokens), turn + 1)]
        made._shared_tokens = len(tokens)
        return made

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolDefinition], **params: Any) -> Completion:
        """The next assistant message. Raises: ContextOverflow, ModelServerError."""
        assert self._server is not None, "enter the model first"
        self._check_number(messages)
        offered = json.dumps(list(tools))
        if len(messages) > LONG_HISTORY:
            said, prompt, added = await asyncio.to_thread(self._prompt, messages, tools, offered)
        else:
            said, prompt, added = self._prompt(messages, tools, offered)
        await self._tokenised(prompt if added is None else added)
        room = self._room(prompt, added, params.pop("max_tokens", None))
        self._tokenizer.prompt = prompt
        extra = {name: value for name, value in params.pop("extra_body", {}).items() if name != TEMPLATE_OPTIONS}
        request = {**self._constant, **extra, **params, "max_tokens": room, "messages": [], "n": 1}
        turns = self.turns_before + self._next_turn
        reply = await request_completion(self._server.chat_completion, self._timeout_s, request, turns=turns)
        raw, finish_reason = _answer_of(reply)
        sequence = self._keep(prompt + raw)
        completion = self._completion(raw, finish_reason, tools, sequence)
        answer = self._meanings.of(completion.message)
        generated = {**self._still_generated(said), len(said): (answer, raw)}
        tokens = len(self._sequences[sequence].tokens)
        self._turns[self._next_turn] = _Turn([*said, answer], offered, generated, sequence, tokens, len(prompt + raw))
        self._next_turn += 1
        if self._next_turn == 1:
            check_first(completion, room)
        return completion

    def _last(self) -> _Turn | None:
        return self._turns.get(self._next_turn - 1)

    def _prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition], offered: str
    ) -> tuple[list[str], str, str | None]:
        """The meanings of the messages, the prompt, and what it adds to the sequence before it (None: it begins a new
        sequence)."""
        said = [self._meanings.of(message) for message in messages]
        last = self._last()
        if last is not None and last.tools == offered and said[: len(last.said)] == last.said:
            at = len(last.said) - 1
            added = self._renderer.continuation(messages, at, tools, last.generated[at][1])
            if added is not None:
                return said, self._texts[last.sequence][: last.chars] + added, added
        written = self._still_generated(said)
        generated = {at: without_end(raw, self._renderer.end_marks) for at, (_, raw) in written.items()}
        kept = [as_history(one, requested_calls(one, 0)) if one.get("role") == "assistant" else one for one in messages]
        return said, self._renderer.whole(kept, tools, generated), None

    def _check_number(self, messages: Sequence[Message]) -> None:
        """Raises: ContextOverflow. No template writes a message without a token."""
        limit = self._limits[1]
        if limit is not None and len(messages) > limit:
            raise ContextOverflow(f"the conversation has {len(messages)} messages, the limit is {limit} tokens")

    def _still_generated(self, said: list[str]) -> dict[int, tuple[str, str]]:
        """The model's own messages that come back with the meaning they had."""
        last = self._last()
        known = {} if last is None else last.generated
        return {at: one for at, one in known.items() if at < len(said) and said[at] == one[0]}

    async def _tokenised(self, text: str) -> None:
        """Find the tokens of what is sent, which are remembered. Raises: ContextOverflow."""
        limit = self._limits[1]
        if limit is not None and len(text) > limit * MOST_CHARS_PER_TOKEN:
            raise ContextOverflow(f"the conversation has {len(text)} characters, the limit is {limit} tokens")
        if len(text) > LARGE_PROMPT_CHARS:
            self._tokenizer.know(text, await asyncio.to_thread(self._renderer.tokens_apart, text))

    def _room(self, prompt: str, added: str | None, wanted: int | None) -> int:
        """Maximum number of tokens of the answer. Raises: ContextOverflow."""
        most, limit = self._limits
        most = wanted or most
        if limit is None:
            return most
        last = self._last()
        before = last.tokens if last is not None and added is not None else 0
        used = before + len(self._tokenizer.encode(prompt if added is None else added))
        least = min(self.least_tokens, least_room(most)) if self._next_turn else least_room(most)
        if limit - used < least:
            needed = f", and an answer needs room for {least}" if least > 1 else ""
            raise ContextOverflow(f"the conversation has {used} tokens, the limit is {limit}{needed}")
        return min(most, limit - used)

    def _keep(self, text: str) -> int:
        """Take over the server's tokens of a conversation with this text. Returns: which sequence that is.

        Raises: ModelServerError."""
        assert self._server is not None
        nodes = self._server.get_state().get("nodes") or []
        known, texts = self._sequences, [*self._texts, None]
        changed = [at for at, (node, before) in enumerate(zip(nodes, texts, strict=False)) if node.full_text != before]
        if len(nodes) not in (len(known), len(known) + 1) or len(changed) != 1 or nodes[changed[0]].full_text != text:
            raise DoubtfulTurnError("the managed server lost track of the conversation")
        at = changed[0]
        before = known[at] if at < len(known) else None
        newest = sequence_of(nodes[at], before.first_step if before else self._next_turn, before)
        self._sequences = [*known[:at], newest, *known[at + 1 :]]
        self._texts = [*self._texts[:at], text, *self._texts[at + 1 :]]
        self._written_tokens = newest.trained - (before.trained if before else 0)
        return at

    def _completion(self, raw: str, finish_reason: str, tools: Sequence[ToolDefinition], sequence: int) -> Completion:
        parser, step = self._renderer.parser, self._next_turn
        opened = self._renderer.reasoning_open(self._tokenizer.prompt)
        parsed = parser.parse(without_end(raw, self._renderer.end_marks), tools, reasoning_open=opened)
        if any(deeper_than(call.arguments, DEEPEST_ARGUMENTS) for call in parsed.calls):
            problem = f"the arguments of a call nest more than {DEEPEST_ARGUMENTS} levels deep"
            parsed = Parsed(parsed.content, (), parsed.reasoning, problem)
        if finish_reason == "length" and (parsed.problem or (parsed.calls and parsed.open_ended)):
            parsed = Parsed(parsed.content, (), parsed.reasoning, "your message was cut off at its length limit")
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.calls:
            message["tool_calls"] = [
                {
                    "id": sendable_id(call.call_id, parser.call_id(step, number)),
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments if isinstance(call.arguments, str) else as_json(call.arguments),
                    },
                }
                for number, call in enumerate(parsed.calls)
            ]
        total, written = len(self._sequences[sequence].tokens), self._written_tokens
        return Completion(
            message,
            finish_reason,
            {"prompt_tokens": total - written, "completion_tokens": written, "total_tokens": total},
            parsed.reasoning,
            self._problem_message(parsed),
            clean_text(raw),
        )

    def _problem_message(self, parsed: Parsed) -> str:
        if not parsed.problem:
            return ""
        example = self._renderer.parser.example()
        return f"{parsed.problem}. No tool was run. Write a tool call exactly like this:\n{example}"


def _answer_of(reply: Any) -> tuple[str, str]:
    try:
        choice = reply.choices[0]
        raw, finish_reason = str(choice.message.content or ""), choice.finish_reason
    except (AttributeError, IndexError, TypeError) as error:
        raise ModelServerError("the model's server returned no message") from error
    return raw, ended_by(finish_reason)
