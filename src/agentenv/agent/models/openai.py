"""A :class:`Model` behind an OpenAI-style ``chat_completion`` callable, with typed failures.

Depends on neither atroposlib nor the openai package: their results and exceptions are recognised by structure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from agentenv.agent.hooks import genuinely_cancelled
from agentenv.agent.protocols import REASONING_FIELDS, Completion, ContextOverflow, Message, ToolDefinition
from agentenv.errors import DoubtfulTurnError, ModelServerError

OVERFLOW_MARKS = (
    "context_length_exceeded", "maximum context length", "context window", "max_model_len",
    "model's context length", "maximum model length", "maximum allowed length", "context size",
)  # fmt: skip
"""How servers report, in an HTTP 400, that a conversation is too long."""

TOO_LARGE = 413
TOO_SLOW = frozenset({408, 504, 524})
"""HTTP statuses with which servers and gateways report a timeout."""
ABOUT_THE_CLIENT = frozenset({401, 404, 405, 407, 409, 425, 429})
"""HTTP statuses below 500 that are independent of the conversation's content."""

ENDS = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter"})
"""Finish reasons of complete messages. All others mark an incomplete one: servers answer "abort" with half a
message while their weights are updated or their engine restarts, gateways answer "error"."""

LIMITS = ("max_tokens", "max_completion_tokens", "max_new_tokens")
SET_A_LIMIT = "set agent_max_tokens"

FIRST_ANSWER_TOKENS = 256
"""Room that the first turn must have, or its token limit if that is less. A prompt that leaves less fills the
context: the model could not have solved the task, so the settings are wrong and it does not count as an attempt."""

MESSAGE_FIELDS = ("role", "content", "tool_calls", "reasoning_content", "reasoning", "refusal")


class ServedModel:
    """Model of one trajectory. ``timeout_s`` bounds a turn, including the wait in the server's queue."""

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
        self._turns = 0
        self.turns_before = 0
        """Turns of the same policy with other models of its rollout: it may be the cause of what a server refuses."""

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolDefinition], **params: Any) -> Completion:
        """The next assistant message. Raises: ContextOverflow, ModelServerError."""
        request = {**self._constant, **params, "messages": list(messages), "n": 1}
        if tools:
            request["tools"] = list(tools)
        turns = self.turns_before + self._turns
        reply = await request_completion(self._chat_completion, self._timeout_s, request, turns=turns)
        completion = completion_of(reply, turns)
        if not self._turns:
            check_first(completion, limit_of(request))
        self._turns += 1
        return completion


def limit_of(request: dict[str, Any]) -> int | None:
    """Token limit of the answer to this request; None if the request has none."""
    limits = [level[name] for level in _levels(request) for name in LIMITS if isinstance(level.get(name), int)]
    return min(limits, default=None)


def check_first(first: Completion, most: int | None) -> None:
    """Raise ContextOverflow when the first answer was cut by the end of the context right after its beginning:
    after fewer tokens than FIRST_ANSWER_TOKENS and than its limit (``most``). Servers that count no tokens are
    trusted."""
    written = (first.usage or {}).get("completion_tokens")
    if first.finish_reason == "length" and isinstance(written, int) and written < least_room(most):
        raise ContextOverflow(f"it leaves no room for an answer, which was cut after {written} tokens")


def least_room(most: int | None) -> int:
    """Number of tokens that the first answer must have room for when its limit is ``most``."""
    return min(most or FIRST_ANSWER_TOKENS, FIRST_ANSWER_TOKENS)


async def request_completion(
    chat_completion: Callable[..., Awaitable[Any]], timeout_s: float, request: dict[str, Any], *, turns: int = 0
) -> Any:
    """The server's reply, after ``turns`` turns of the model.

    Raises: ContextOverflow, ModelServerError (DoubtfulTurnError if the model may be the cause); nothing else but
    cancellation.
    """
    endless = not any(level.get(name) is not None for level in _levels(request) for name in LIMITS)
    try:
        async with asyncio.timeout(timeout_s):
            return await chat_completion(**request)
    except asyncio.CancelledError as error:
        if genuinely_cancelled():
            raise
        raise ModelServerError("the request to the model's server was cancelled from inside") from error
    except TimeoutError as error:
        slow = TimeoutError(str(error) or f"more than {timeout_s:g} s")
        raise failure_of(slow, turns, endless=endless) from error
    except Exception as error:
        raise failure_of(error, turns, endless=endless) from error


def _levels(request: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return request, request.get("extra_body") or {}


def failure_of(error: BaseException, turns: int = 0, *, endless: bool = False) -> Exception:
    """The failure that a client's exception means: the conversation is too long, the server failed, or the model's
    output may be the cause. ``turns``: number of earlier turns; a server that refuses the conversation then may
    refuse the model's own messages. ``endless``: only time bounded this turn, so the model may simply have kept
    generating."""
    if isinstance(error, (ContextOverflow, ModelServerError)):
        return error
    attempt = getattr(error, "last_attempt", None)  # tenacity.RetryError wraps the original exception
    if attempt is not None and (hidden := attempt.exception()) is not None:
        error = hidden
    status = getattr(error, "status_code", None)
    text = f"{type(error).__name__}: {str(error)[:500]}"
    if status == 400 and any(mark in f"{getattr(error, 'code', '')} {error}" for mark in OVERFLOW_MARKS):
        return ContextOverflow(str(error))
    if status == TOO_LARGE:
        return ContextOverflow(str(error))
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__ or status in TOO_SLOW:
        return _too_slow(text, endless=endless)
    if turns and isinstance(status, int) and 400 <= status < 500 and status not in ABOUT_THE_CLIENT:
        return DoubtfulTurnError(f"the model's server refuses the conversation: {text}")
    cure = "check base_url, api_key and model_name" if status in (401, 403, 404) else ""
    return ModelServerError(text, next_step=cure)


def _too_slow(text: str, *, endless: bool) -> ModelServerError:
    if endless:
        return DoubtfulTurnError(f"a turn without a token limit did not end in time: {text}", next_step=SET_A_LIMIT)
    return ModelServerError(f"the model's server did not answer in time: {text}")


def completion_of(reply: Any, turns: int = 0) -> Completion:
    """Convert an OpenAI ChatCompletion. Raises: ModelServerError when it has no message (a doubtful one after a
    turn, because gateways answer so to content they filter) or an incomplete one."""
    try:
        choice = reply.choices[0]
        message = choice.message.model_dump(exclude_none=True)
    except (AttributeError, IndexError, TypeError) as error:
        kind = DoubtfulTurnError if turns else ModelServerError
        raise kind("the model's server answered without a message") from error
    finish_reason = ended_by(choice.finish_reason)
    kept = {name: message[name] for name in MESSAGE_FIELDS if name in message}
    usage = reply.usage.model_dump(exclude_none=True) if getattr(reply, "usage", None) else None
    reasoning = next((kept[name] for name in REASONING_FIELDS if isinstance(kept.get(name), str)), "")
    return Completion({"role": "assistant", **kept}, finish_reason, usage, reasoning)


def ended_by(finish_reason: Any) -> str:
    """The finish reason. Raises: ModelServerError when it does not belong to a complete message: an incomplete one
    is no answer and must not be scored."""
    if finish_reason not in ENDS:
        raise ModelServerError(f"the model's server aborted the message (finish_reason {finish_reason!r})")
    return str(finish_reason)
