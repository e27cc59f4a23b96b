"""Protocols of the agent's dependencies: a model, a tool session, a way to open one.

``ToolExecutor``/``ToolSession`` of :mod:`agentenv.executor` satisfy these structurally; tests use small stubs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from agentenv.errors import InfraError, SlotDestroyedError
from agentenv.executor.session import Checkpoint
from agentenv.wire.calls import CallResult
from agentenv.wire.roots import RootSpec

Message = dict[str, Any]
ToolDefinition = dict[str, Any]
"""One entry of an OpenAI ``tools`` list."""

REASONING_FIELDS = ("reasoning_content", "reasoning")
"""Fields in which OpenAI-style servers return the model's reasoning."""


@dataclass(frozen=True)
class Completion:
    """One model turn. ``message`` is the assistant message (content and/or ``tool_calls``).

    ``finish_reason`` ``length`` means that the message was cut. ``reasoning`` is the model's reasoning before its
    answer. ``problem`` describes, for the model, what looked like a tool call but could not be parsed. ``raw`` is
    the message exactly as written, if known.
    """

    message: Message
    finish_reason: str = "stop"
    usage: dict[str, Any] | None = None
    reasoning: str = ""
    problem: str = ""
    raw: str | None = None


class ContextOverflow(Exception):
    """The conversation does not fit the model (any more). After a turn, the rollout ends and is verified as it is.
    At the first turn, which needs room for an answer too, it means that the settings are wrong."""


class Model(Protocol):
    """A model that continues a conversation.

    Raises: ContextOverflow when the conversation is too long; ModelServerError when the server failed (HTTP 5xx,
    timeout, refused request): infra; DoubtfulTurnError, a subclass, when the policy's output may be the cause.
    """

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolDefinition], **params: Any) -> Completion:
        """The next assistant message."""


@asynccontextmanager
async def opened(model: Model) -> AsyncIterator[Model]:
    """``model``, entered and exited if it is a context manager."""
    if isinstance(model, AbstractAsyncContextManager):
        async with model:
            yield model
    else:
        yield model


class Session(Protocol):
    """A trajectory's interface for calling tools on its own slot."""

    @property
    def trajectory(self) -> str:
        """Name of the session's trajectory."""

    @property
    def container_id(self) -> str:
        """The container of its slot."""

    @property
    def last_batch_wait_s(self) -> float:
        """How long the last call waited for its batch to be sent."""

    async def call(
        self, tool: str, arguments: Mapping[str, Any] | str, *, timeout_s: float | None = None
    ) -> CallResult:
        """Run one tool call. Model and policy faults are returned as results. Raises: InfraError;
        SlotDestroyedError when the commands of this session destroyed its slot."""

    async def seal(self) -> None:
        """Kill every process of the slot and recreate its namespaces over the same workspace."""

    async def checkpoint(self) -> Checkpoint:
        """Keep the slot's files, for slots of the same container that begin with them; everything running in it is
        killed. Raises CheckpointError, InfraError."""

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Give the slot the files of a checkpoint of the same container; everything running in it is killed. Raises
        CheckpointError, InfraError."""

    async def drop(self, checkpoint: Checkpoint) -> None:
        """Forget a checkpoint of the same container. Raises InfraError."""


class SessionOpener(Protocol):
    """Opens sessions; entering the returned context leases a slot, leaving it releases the slot."""

    def open(
        self,
        trajectory: str,
        *,
        acquire_timeout_s: float | None = None,
        root: RootSpec | None = None,
        container: str = "",
    ) -> AbstractAsyncContextManager[Session]:
        """A session for this trajectory, to be entered; with ``root`` its slot is an image slot, and ``container`` the
        one that has the checkpoint of that root. Raises on entering: AcquireTimeoutError, CheckpointError."""


class Handle(Protocol):
    """Interface given to preparation and verifiers (``ToolContext``): remembers the first fault that decides."""

    infra_error: InfraError | SlotDestroyedError | None

    async def cleanup(self) -> None:
        """No more calls through this handle. Repeatable."""
