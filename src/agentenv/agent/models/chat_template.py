"""Renders conversations as prompts with the tokenizer's chat template, preserving what the model wrote.

A template writes an assistant's message its own way: it reorders JSON, strips spaces, drops reasoning. A prompt
rendered from scratch for each turn would therefore not contain the tokens the policy wrote, and its earlier turns
could not be trained on. So only what *follows* a turn is taken from the template: tool results and the opening of
the next turn are rendered after a placeholder for the message, and the text after the placeholder is used.

The template's abilities are probed once: whether it shows tools, takes a system message, takes tool results, and
whether it needs calls as objects (Mistral's) or accepts text (the others).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal, Protocol

from agentenv.agent.parsers.base import ParsedCall, ToolCallParser, as_json
from agentenv.agent.protocols import Message, ToolDefinition
from agentenv.errors import ConfigError

logger = logging.getLogger(__name__)

STAND_IN = "StandInForWhatTheModelWrote"
PROBE = "agentenv_probe"
PROBE_TOOL: ToolDefinition = {
    "type": "function",
    "function": {
        "name": PROBE,
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "A key."}}},
    },
}

TOOLS_PROMPT = """\
You have these tools, described by one JSON object per line:
<tools>
{definitions}
</tools>
To call a tool, write exactly this, with its name and arguments in place:
{example}"""

CallsAs = Literal["text", "objects", "text, results from the user"]
"""Form in which a template gets an assistant's calls and a tool's results."""


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    eos_token: str | None

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """The text of a conversation, with ``tokenize=False``."""

    def encode(self, text: str, **options: Any) -> list[int]:
        """Token ids."""

    def decode(self, token_ids: Any, **options: Any) -> str:
        """Text."""


class ChatRenderer:
    """Renders conversations for one tokenizer and one parser. Raises: ConfigError (field
    ``tokenizer_name``) when the tokenizer has no chat template that can hold a conversation with tools."""

    def __init__(
        self, tokenizer: ChatTokenizer, parser: ToolCallParser, options: Mapping[str, Any] | None = None
    ) -> None:
        self.parser = parser
        self._tokenizer = tokenizer
        self._idle_copies: list[ChatTokenizer] = []
        self._options = dict(options or {})
        self.end_marks = tuple(dict.fromkeys(filter(None, (*parser.end_marks, tokenizer.eos_token))))
        self.takes_system = self._tried([_message("system"), _message("user", "u")], PROBE) is not None
        self.shows_tools = PROBE in (self._tried([_message("user", "u")], "", tools=[PROBE_TOOL]) or "")
        self.calls_as = self._found_out()

    def _found_out(self) -> CallsAs:
        if self._tried([_message("user", "u")], "u") is None:
            raise ConfigError(
                "tokenizer_name",
                "its chat template cannot render a conversation",
                next_step="use a tokenizer with a chat template (an instruct model's)",
            )
        ways: tuple[CallsAs, ...] = ("text", "objects", "text, results from the user")
        for way in ways:
            self.calls_as = way
            if self._holds_two_rounds():
                logger.info("chat template: tools %s, calls as %s", "shown" if self.shows_tools else "by us", way)
                return way
        raise ConfigError("tokenizer_name", "its chat template does not render tool results", next_step="use another")

    def _holds_two_rounds(self) -> bool:
        """Whether a conversation with two tool calls renders with both results in it, continued twice."""
        messages: list[Message] = [_message("system", "s"), _message("user", "u")]
        for number in range(2):
            call_id = self.parser.call_id(0, number)
            call = {"id": call_id, "type": "function", "function": {"name": PROBE, "arguments": "{}"}}
            messages.append({**_message("assistant", ""), "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": call_id, "content": f"{PROBE}-result-{number}"})
            added = self.continuation(messages, len(messages) - 2, [PROBE_TOOL], "")
            if added is None or f"{PROBE}-result-{number}" not in added:
                return False
        return True

    def whole(self, messages: Sequence[Message], tools: Sequence[ToolDefinition], generated: Mapping[int, str]) -> str:
        """The prompt of a conversation. ``generated``: the text the model wrote, by position of the message.

        Raises: ConfigError when the template refuses these messages.
        """
        prepared = self._prepared(messages, tools, generated)
        try:
            return self._render(prepared, tools, opening=True)
        except Exception as error:  # templates are programs written by their authors and may raise anything
            problem = f"its chat template failed: {type(error).__name__}: {error}"
            raise ConfigError("tokenizer_name", problem) from error

    def continuation(
        self, messages: Sequence[Message], at: int, tools: Sequence[ToolDefinition], written: str
    ) -> str | None:
        """The text that follows the message at position ``at``, which the model wrote as ``written``, up to the
        opening of its next turn. None when the template produces no text that can be appended."""
        try:
            after = self._after_text(messages, at, tools)
            if self.calls_as == "objects":
                after = self._after_objects(messages, at, tools)
        except Exception as error:
            logger.debug("the chat template cannot continue: %s: %s", type(error).__name__, error)
            return None
        return None if after is None else self._joined(written, after)

    def reasoning_open(self, prompt: str) -> bool:
        """Whether the prompt ends inside a reasoning block, which the model has to close."""
        return prompt.rstrip().endswith(tuple(opener for opener, _ in self.parser.reasoning_marks))

    def tokens_apart(self, text: str) -> list[int]:
        """The token ids of a text, from any thread. A copy of the tokenizer finds them, since two threads at once may
        break one; there are as many copies as were in use at once, because copying one takes as long as a long text."""
        try:
            copy = self._idle_copies.pop()
        except IndexError:
            copy = deepcopy(self._tokenizer)
        tokens = list(copy.encode(text, add_special_tokens=False))
        self._idle_copies.append(copy)
        return tokens

    # -- how --------------------------------------------------------------------------------------

    def _joined(self, written: str, after: str) -> str:
        """``after`` without the end-of-turn mark that the model has written itself."""
        if written.endswith(self.end_marks):
            begun = after.lstrip()
            mark = next((mark for mark in self.end_marks if begun.startswith(mark)), None)
            return begun[len(mark) :] if mark is not None else after
        return after

    def _after_text(self, messages: Sequence[Message], at: int, tools: Sequence[ToolDefinition]) -> str | None:
        if self.calls_as == "objects":
            return None
        prepared = self._prepared(messages, tools, {at: STAND_IN})
        _, found, after = self._render(prepared, tools, opening=True).rpartition(STAND_IN)
        return after if found else None

    def _after_objects(self, messages: Sequence[Message], at: int, tools: Sequence[ToolDefinition]) -> str | None:
        until = self._render(self._prepared(messages[: at + 1], tools, {}), tools, opening=False)
        beyond = self._render(self._prepared(messages, tools, {}), tools, opening=True)
        if not beyond.startswith(until):
            return None
        ends = max((until.rfind(mark) for mark in self.end_marks if mark), default=-1)
        mark = next((mark for mark in self.end_marks if ends >= 0 and until.startswith(mark, ends)), "")
        if ends < 0 or until[ends + len(mark) :].strip():
            return beyond[len(until) :]
        return until[ends:] + beyond[len(until) :]

    def _prepared(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition], generated: Mapping[int, str]
    ) -> list[Message]:
        names: dict[str, str] = {}
        prepared = [self._one(message, generated.get(at), names) for at, message in enumerate(messages)]
        if tools and not self.shows_tools:
            prepared = self._with_tools(prepared, tools)
        return prepared if self.takes_system else _without_system(prepared)

    def _one(self, message: Message, generated: str | None, names: dict[str, str]) -> Message:
        content = message.get("content") or ""
        if message.get("role") == "assistant":
            calls = message.get("tool_calls") or []
            names.update({call["id"]: call["function"]["name"] for call in calls})
            if self.calls_as == "objects" and calls:
                return {"role": "assistant", "content": content, "tool_calls": [_as_object(call) for call in calls]}
            return {"role": "assistant", "content": self._text_of(content, calls) if generated is None else generated}
        if message.get("role") != "tool":
            return {"role": message.get("role"), "content": content}
        if self.calls_as == "text, results from the user":
            return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
        call_id = message.get("tool_call_id", "")
        return {"role": "tool", "content": content, "tool_call_id": call_id, "name": names.get(call_id, "tool")}

    def _text_of(self, content: str, calls: Sequence[Mapping[str, Any]]) -> str:
        if not calls:
            return content
        parsed = [
            ParsedCall(call["function"]["name"], json.loads(call["function"]["arguments"]), call["id"])
            for call in calls
        ]
        return "\n".join(filter(None, (content, self.parser.written(parsed))))

    def _with_tools(self, messages: list[Message], tools: Sequence[ToolDefinition]) -> list[Message]:
        definitions = "\n".join(as_json(tool["function"]) for tool in tools)
        text = TOOLS_PROMPT.format(definitions=definitions, example=self.parser.example())
        if messages and messages[0]["role"] == "system":
            return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolDefinition], *, opening: bool) -> str:
        options = {**self._options, "tokenize": False, "add_generation_prompt": opening}
        if tools and self.shows_tools:
            options["tools"] = list(tools)
        return str(self._tokenizer.apply_chat_template(list(messages), **options))

    def _tried(self, messages: list[Message], wanted: str, **more: Any) -> str | None:
        """The rendered text, if rendering succeeds and the text contains ``wanted``."""
        return _attempt(
            lambda: str(
                self._tokenizer.apply_chat_template(
                    messages, **{**self._options, **more, "tokenize": False, "add_generation_prompt": True}
                )
            ),
            wanted,
        )


def _attempt(render: Callable[[], str], wanted: str) -> str | None:
    try:
        text = render()
    except Exception as error:
        logger.debug("the chat template refuses a probe: %s: %s", type(error).__name__, error)
        return None
    return text if wanted in text else None


def _message(role: str, content: str = PROBE) -> Message:
    return {"role": role, "content": content}


def _as_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """Templates expect a call's arguments as an object; on the wire they are text."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """For templates without a system role: the system text is put before the first user message."""
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    system, *rest = messages
    at = next((n for n, message in enumerate(rest) if message["role"] == "user"), None)
    if at is None:
        return [{"role": "user", "content": system["content"]}, *rest]
    rest[at] = {**rest[at], "content": f"{system['content']}\n\n{rest[at]['content']}"}
    return rest
