"""What the agent needs from outside, as protocols: a model, a tool session, a way to open one.

``ToolExecutor``/``ToolSession`` of :mod:`agentenv.executor` fit these by shape; tests use small stubs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from agentenv.errors import InfraError, SlotDestroyedError
from agentenv.wire.calls import CallResult

Message = dict[str, Any]
ToolDefinition = dict[str, Any]
"""One entry of an OpenAI ``tools`` list."""

REASONING_FIELDS = ("reasoning_content", "reasoning")
"""Where OpenAI-style servers put what the model thought."""


@dataclass(frozen=True)
class Completion:
    """One model turn. ``message`` is the assistant message (content and/or ``tool_calls``).

    ``finish_reason`` ``length`` means that the message was cut. ``reasoning`` is what the model thought
    before it answered. ``problem`` says what in the message was meant as a tool call and could not be
    read as one, worded for the model. ``raw`` is the message exactly as written, where that is known.
    """

    message: Message
    finish_reason: str = "stop"
    usage: dict[str, Any] | None = None
    reasoning: str = ""
    problem: str = ""
    raw: str | None = None


class ContextOverflow(Exception):
    """The conversation does not fit the model (any more). After a turn the rollout ends, and is verified as it is;
    at the first one, which must have room for an answer too, the settings are wrong."""


class Model(Protocol):
    """Something that continues a conversation.

    Raises: ContextOverflow when the conversation is too long; ModelServerError when the server failed (HTTP 5xx,
    timeout, refused request): infra; DoubtfulTurnError, one of those, when what the policy wrote may be why.
    """

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolDefinition], **params: Any) -> Completion:
        """The next assistant message."""


@asynccontextmanager
async def opened(model: Model) -> AsyncIterator[Model]:
    """``model``, entered and left where it has something to open."""
    if isinstance(model, AbstractAsyncContextManager):
        async with model:
            yield model
    else:
        yield model


class Session(Protocol):
    """One trajectory's way to call tools on its own slot."""

    @property
    def trajectory(self) -> str:
        """Whose session this is."""

    @property
    def last_batch_wait_s(self) -> float:
        """How long the last call waited for company before its batch left."""

    async def call(
        self, tool: str, arguments: Mapping[str, Any] | str, *, timeout_s: float | None = None
    ) -> CallResult:
        """Run one tool call. Model and policy faults are results. Raises: InfraError; SlotDestroyedError when the
        commands of this session destroyed its slot."""

    async def seal(self) -> None:
        """End every process of the slot and make its namespaces anew over the same workspace."""


class SessionOpener(Protocol):
    """Opens sessions; entering the returned context leases a slot, leaving it gives it back."""

    def open(self, trajectory: str, *, acquire_timeout_s: float | None = None) -> AbstractAsyncContextManager[Session]:
        """A session for this trajectory, to be entered. Raises on entering: AcquireTimeoutError."""


class Handle(Protocol):
    """What preparation and verifiers are given (``ToolContext``): remembers the first fault that decides."""

    infra_error: InfraError | SlotDestroyedError | None

    async def cleanup(self) -> None:
        """No more calls through this handle. Repeatable."""
