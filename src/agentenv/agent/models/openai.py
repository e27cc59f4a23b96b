"""A :class:`Model` behind an OpenAI-style ``chat_completion`` callable, with typed failures.

Needs neither atroposlib nor the openai package: it reads what they return and raise by shape.
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
"""How servers say, in an HTTP 400, that a conversation is too long."""

TOO_LARGE = 413
TOO_SLOW = frozenset({408, 504, 524})
"""HTTP statuses of servers and gateways that have waited long enough."""
ABOUT_THE_CLIENT = frozenset({401, 404, 405, 407, 409, 425, 429})
"""HTTP statuses below 500 that are not about what the conversation says."""

ENDS = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter"})
"""The finish reasons of a message that came to its end. All others are of one that did not: servers answer with
"abort" and half a message while their weights are updated or their engine restarts, gateways with "error"."""

LIMITS = ("max_tokens", "max_completion_tokens", "max_new_tokens")
SET_A_LIMIT = "set agent_max_tokens"

FIRST_ANSWER_TOKENS = 256
"""Room the first turn must have, or for as much as it may have if that is less. A prompt that leaves less fills the
context: the model could not have solved the task, so that is a setting and no attempt."""

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
        self._turns = 0

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolDefinition], **params: Any) -> Completion:
        """The next assistant message. Raises: ContextOverflow, ModelServerError."""
        asked = {**self._constant, **params, "messages": list(messages), "n": 1}
        if tools:
            asked["tools"] = list(tools)
        reply = await ask(self._chat_completion, self._timeout_s, asked, turns=self._turns)
        completion = completion_of(reply, self._turns)
        if not self._turns:
            check_first(completion, limit_of(asked))
        self._turns += 1
        return completion


def limit_of(asked: dict[str, Any]) -> int | None:
    """How many tokens the answer to this request may have; None: nothing in it says."""
    said = [given[name] for given in _said(asked) for name in LIMITS if isinstance(given.get(name), int)]
    return min(said, default=None)


def check_first(first: Completion, most: int | None) -> None:
    """Raises ContextOverflow when the first answer was cut by the end of the context, right where it began: after fewer
    tokens than FIRST_ANSWER_TOKENS and than it may have (``most``). Servers that count no tokens are believed."""
    written = (first.usage or {}).get("completion_tokens")
    if first.finish_reason == "length" and isinstance(written, int) and written < least_room(most):
        raise ContextOverflow(f"it leaves no room for an answer, which was cut after {written} tokens")


def least_room(most: int | None) -> int:
    """How many tokens the first answer must have room for when it may have ``most``."""
    return min(most or FIRST_ANSWER_TOKENS, FIRST_ANSWER_TOKENS)


async def ask(
    chat_completion: Callable[..., Awaitable[Any]], timeout_s: float, asked: dict[str, Any], *, turns: int = 0
) -> Any:
    """The server's reply, ``turns`` turns of the model's into the conversation.

    Raises: ContextOverflow, ModelServerError (DoubtfulTurnError where the model may be why); nothing else but
    cancellation.
    """
    endless = not any(given.get(name) is not None for given in _said(asked) for name in LIMITS)
    try:
        async with asyncio.timeout(timeout_s):
            return await chat_completion(**asked)
    except asyncio.CancelledError as error:
        if genuinely_cancelled():
            raise
        raise ModelServerError("the request to the model's server was cancelled from inside") from error
    except TimeoutError as error:
        slow = TimeoutError(str(error) or f"more than {timeout_s:g} s")
        raise failure_of(slow, turns, endless=endless) from error
    except Exception as error:
        raise failure_of(error, turns, endless=endless) from error


def _said(asked: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return asked, asked.get("extra_body") or {}


def failure_of(error: BaseException, turns: int = 0, *, endless: bool = False) -> Exception:
    """What a client's exception means: the conversation is too long, the server failed, or what the model wrote may
    be why. ``turns``: how many it has had; a server that then refuses the conversation may refuse what it said.
    ``endless``: nothing bounded this turn but time, so that the model may simply have gone on."""
    if isinstance(error, (ContextOverflow, ModelServerError)):
        return error
    attempt = getattr(error, "last_attempt", None)  # tenacity.RetryError hides the real one
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
    """An OpenAI ChatCompletion as a Completion. Raises: ModelServerError when it has no message (a doubtful one
    after a turn: gateways answer so to what they will not pass on), or one that did not come to its end."""
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
    """The finish reason. Raises: ModelServerError when it is none of a finished message: what there is of such a
    message is no answer, and must not be scored as one."""
    if finish_reason not in ENDS:
        raise ModelServerError(f"the model's server aborted the message (finish_reason {finish_reason!r})")
    return str(finish_reason)
