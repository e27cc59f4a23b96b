"""A :class:`Model` behind an OpenAI-style ``chat_completion`` callable, with typed failures.

Needs neither atroposlib nor the openai package: it reads what they return and raise by shape.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from agentenv.agent.hooks import genuinely_cancelled
from agentenv.agent.ports import REASONING_FIELDS, Completion, ContextOverflow, Message, ToolDefinition
from agentenv.errors import ModelServerError

OVERFLOW_MARKS = (
    "context_length_exceeded", "maximum context length", "context window", "max_model_len",
    "model's context length", "maximum model length", "maximum allowed length",
)  # fmt: skip
"""How servers say, in an HTTP 400, that a conversation is too long."""

MESSAGE_FIELDS = ("role", "content", "tool_calls", "reasoning_content", "reasoning", "refusal")


class ServedModel:
    """One trajectory's model. ``timeout_s`` bounds a turn, the wait in the server's queue included."""

    def __init__(
        self,
        chat_completion: Callable[..., Awaitable[Any]],
        *,
        timeout_s: float,
        constant: dict[str, Any] | None = None,
    ) -> None:
        self._chat_completion = chat_completion
        self._timeout_s = timeout_s
        self._constant = constant or {}

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolDefinition], **params: Any) -> Completion:
        """The next assistant message. Raises: ContextOverflow, ModelServerError."""
        asked = {**self._constant, **params, "messages": list(messages), "n": 1}
        if tools:
            asked["tools"] = list(tools)
        return completion_of(await ask(self._chat_completion, self._timeout_s, asked))


async def ask(chat_completion: Callable[..., Awaitable[Any]], timeout_s: float, asked: dict[str, Any]) -> Any:
    """The server's reply. Raises: ContextOverflow, ModelServerError; nothing else but cancellation."""
    try:
        async with asyncio.timeout(timeout_s):
            return await chat_completion(**asked)
    except TimeoutError as error:
        raise ModelServerError(f"the model's server did not answer in {timeout_s:g} s") from error
    except asyncio.CancelledError as error:
        if genuinely_cancelled():
            raise
        raise ModelServerError("the request to the model's server was cancelled from inside") from error
    except Exception as error:
        raise failure_of(error) from error


def failure_of(error: BaseException) -> Exception:
    """What a client's exception means: the conversation is too long, or the server failed."""
    if isinstance(error, (ContextOverflow, ModelServerError)):
        return error
    attempt = getattr(error, "last_attempt", None)  # tenacity.RetryError hides the real one
    if attempt is not None and (hidden := attempt.exception()) is not None:
        error = hidden
    status = getattr(error, "status_code", None)
    text = str(error)
    if status == 400 and any(mark in f"{getattr(error, 'code', '')} {text}" for mark in OVERFLOW_MARKS):
        return ContextOverflow(text)
    cure = "check base_url, api_key and model_name" if status in (401, 403, 404) else ""
    return ModelServerError(f"{type(error).__name__}: {text[:500]}", next_step=cure)


def completion_of(reply: Any) -> Completion:
    """An OpenAI ChatCompletion as a Completion. Raises: ModelServerError when it has no message."""
    try:
        choice = reply.choices[0]
        message = choice.message.model_dump(exclude_none=True)
    except (AttributeError, IndexError, TypeError) as error:
        raise ModelServerError("the model's server answered without a message") from error
    kept = {name: message[name] for name in MESSAGE_FIELDS if name in message}
    usage = reply.usage.model_dump(exclude_none=True) if getattr(reply, "usage", None) else None
    reasoning = next((kept[name] for name in REASONING_FIELDS if isinstance(kept.get(name), str)), "")
    return Completion({"role": "assistant", **kept}, choice.finish_reason or "stop", usage, reasoning)
