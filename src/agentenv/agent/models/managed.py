"""A :class:`Model` on a managed server, which keeps the exact tokens, masks and logprobs of a conversation.

Its text is parsed here, by the family's parser. Every prompt but the first continues the sequence before it token
by token (:mod:`agentenv.agent.models.chat_template`); where that is not possible, a new sequence begins and the
earlier ones are kept. Does not depend on atroposlib: the server is a protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Protocol, Self

from agentenv.agent.jsonable import DEEPEST_ARGUMENTS, clean_text, deeper_than
from agentenv.agent.models.chat_template import ChatRenderer, ChatTokenizer
from agentenv.agent.models.openai import check_first, ended_by, least_room, request_completion
from agentenv.agent.parsers.base import Parsed, as_json, without_end
from agentenv.agent.protocols import Completion, ContextOverflow, Message, ToolDefinition
from agentenv.agent.token_sequences import TokenSequence, sequence_of
from agentenv.errors import DoubtfulTurnError, ModelServerError

TEMPLATE_OPTIONS = "chat_template_kwargs"
"""Key of ``extra_body`` that goes to the chat template instead of the server."""


class ManagedServer(Protocol):
    """The part of atropos' ManagedServer that is used."""

    async def chat_completion(self, **request: Any) -> Any:
        """One ChatCompletion; the tokens are kept as nodes."""

    def get_state(self) -> dict[str, Any]:
        """``nodes``: every sequence there is."""


OpenServer = Callable[["PromptTokenizer"], AbstractAsyncContextManager[ManagedServer]]


class PromptTokenizer:
    """Tokenizer given to a managed server: the prompt is rendered by us, nothing is skipped in decoding, and
    nothing is added in encoding (templates write special tokens themselves)."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._encoded: tuple[str, list[int]] = ("", [])
        self.prompt = ""

    def apply_chat_template(self, _: Any, **__: Any) -> str:
        """The prompt of this turn."""
        return self.prompt

    def encode(self, text: str, **_: Any) -> list[int]:
        """Token ids; those of the last text are cached, because they are requested twice."""
        if text != self._encoded[0]:
            self._encoded = (text, list(self._tokenizer.encode(text, add_special_tokens=False)))
        return list(self._encoded[1])

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        """Text, special tokens included."""
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


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
        self._stack = AsyncExitStack()
        self._server: ManagedServer | None = None
        self._given: list[Message] = []
        self._generated: dict[int, tuple[Message | None, str]] = {}
        self._text = ""
        self._sequences: list[TokenSequence] = []
        self._turns = 0
        self._written_tokens = 0

    async def __aenter__(self) -> Self:
        self._server = await self._stack.enter_async_context(self._open_server(self._tokenizer))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def sequences(self) -> list[TokenSequence]:
        """Every sequence of this conversation, in the order they began."""
        return list(self._sequences)

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolDefinition], **params: Any) -> Completion:
        """The next assistant message. Raises: ContextOverflow, ModelServerError."""
        assert self._server is not None, "enter the model first"
        prompt, added = self._prompt(messages, tools)
        room = self._room(prompt, added, params.pop("max_tokens", None))
        self._tokenizer.prompt = prompt
        extra = {name: value for name, value in params.pop("extra_body", {}).items() if name != TEMPLATE_OPTIONS}
        request = {**self._constant, **extra, **params, "max_tokens": room, "messages": [], "n": 1}
        reply = await request_completion(self._server.chat_completion, self._timeout_s, request, turns=self._turns)
        raw, finish_reason = _answer_of(reply)
        self._keep(messages, prompt + raw, raw)
        completion = self._completion(raw, finish_reason, tools)
        if self._turns == 1:
            check_first(completion, room)
        return completion

    def _prompt(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> tuple[str, str | None]:
        """The prompt, and what it adds to the sequence before it (None: it begins a new sequence)."""
        at = len(self._given)
        if self._turns and list(messages[:at]) == self._given and _role(messages, at) == "assistant":
            added = self._renderer.continuation(messages, at, tools, self._generated[at][1])
            if added is not None:
                return self._text + added, added
        generated = {at: without_end(raw, self._renderer.end_marks) for at, raw in self._still_generated(messages)}
        return self._renderer.whole(messages, tools, generated), None

    def _still_generated(self, messages: Sequence[Message]) -> list[tuple[int, str]]:
        """The model's own messages that are unchanged."""
        found = []
        for at, (message, raw) in self._generated.items():
            if _role(messages, at) == "assistant" and message in (None, messages[at]):
                self._generated[at] = (messages[at], raw)
                found.append((at, raw))
        return found

    def _room(self, prompt: str, added: str | None, wanted: int | None) -> int:
        """Maximum number of tokens of the answer. Raises: ContextOverflow."""
        most, limit = self._limits
        most = wanted or most
        if limit is None:
            return most
        before = len(self._sequences[-1].tokens) if added is not None else 0
        used = before + len(self._tokenizer.encode(prompt if added is None else added))
        if limit - used < (least := 1 if self._turns else least_room(most)):
            needed = f", and an answer needs room for {least}" if least > 1 else ""
            raise ContextOverflow(f"the conversation has {used} tokens, the limit is {limit}{needed}")
        return min(most, limit - used)

    def _keep(self, messages: Sequence[Message], text: str, raw: str) -> None:
        """Record the message and the server's tokens of it. Raises: ModelServerError."""
        assert self._server is not None
        nodes = self._server.get_state().get("nodes") or []
        before = self._sequences
        if len(nodes) not in (len(before), len(before) + 1) or not nodes or nodes[-1].full_text != text:
            raise DoubtfulTurnError("the managed server lost track of the conversation")
        known = before[-1] if len(nodes) == len(before) else None
        newest = sequence_of(nodes[-1], known.first_step if known else self._turns, known)
        self._sequences = [*(before[:-1] if known else before), newest]
        self._written_tokens = newest.trained - (known.trained if known else 0)
        self._still_generated(messages)
        self._given, self._text = list(messages), text
        self._generated[len(messages)] = (None, raw)
        self._turns += 1

    def _completion(self, raw: str, finish_reason: str, tools: Sequence[ToolDefinition]) -> Completion:
        parser, step = self._renderer.parser, self._turns - 1
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
                    "id": call.call_id or parser.call_id(step, number),
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments if isinstance(call.arguments, str) else as_json(call.arguments),
                    },
                }
                for number, call in enumerate(parsed.calls)
            ]
        total, written = len(self._sequences[-1].tokens), self._written_tokens
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


def _role(messages: Sequence[Message], at: int) -> Any:
    return messages[at].get("role") if at < len(messages) else None


def _answer_of(reply: Any) -> tuple[str, str]:
    try:
        choice = reply.choices[0]
        raw, finish_reason = str(choice.message.content or ""), choice.finish_reason
    except (AttributeError, IndexError, TypeError) as error:
        raise ModelServerError("the model's server returned no message") from error
    return raw, ended_by(finish_reason)
