"""Stand-ins for slots and models, so that the agent is tested without either."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from agentenv.agent.hook_slot_gate import HookSlotGate
from agentenv.agent.protocols import Completion, Message, ToolDefinition
from agentenv.agent.rollout import RolloutServices
from agentenv.agent.settings import AgentSettings
from agentenv.errors import CheckpointError, InfraError
from agentenv.executor.session import Checkpoint
from agentenv.sdk.tool_context import ToolContext
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.calls import CallResult
from agentenv.wire.roots import RootSpec


def checkpoint_name(trajectory: str, number: int = 0) -> str:
    """That of the trajectory's checkpoint of this number."""
    return hashlib.md5(f"{trajectory}@{number}".encode(), usedforsecurity=False).hexdigest()


ROOT = RootSpec("sha256:" + "a" * 64)

Behaviour = Callable[[str, str, Any], CallResult]
"""(trajectory, tool, arguments) → result; may raise."""


def ok(stdout: str = "", exit_code: int = 0, **more: Any) -> CallResult:
    return CallResult(id="c", stdout=stdout, exit_code=exit_code, duration_s=0.25, queue_s=0.125, **more)


def echo(trajectory: str, tool: str, arguments: Any) -> CallResult:
    return ok(f"{tool} {arguments}")


@dataclass
class StubSession:
    trajectory: str
    behaviour: Behaviour
    last_batch_wait_s: float = 0.5
    calls: list[tuple[str, Any, float | None]] = field(default_factory=list)
    sealed_after: int | None = None
    root: RootSpec | None = None
    container_id: str = "c0"
    unkept: CheckpointError | None = None
    """What :meth:`checkpoint` raises."""
    checkpoints: list[Checkpoint] = field(default_factory=list)
    dropped: list[Checkpoint] = field(default_factory=list)
    restored: list[Checkpoint] = field(default_factory=list)
    unrestored: InfraError | None = None

    async def call(
        self, tool: str, arguments: Mapping[str, Any] | str, *, timeout_s: float | None = None
    ) -> CallResult:
        self.calls.append((tool, arguments, timeout_s))
        await asyncio.sleep(0)
        return self.behaviour(self.trajectory, tool, arguments)

    async def seal(self) -> None:
        self.sealed_after = len(self.calls)

    async def checkpoint(self) -> Checkpoint:
        await asyncio.sleep(0)
        if self.unkept is not None:
            raise self.unkept
        name = checkpoint_name(self.trajectory, len(self.checkpoints))
        self.checkpoints.append(Checkpoint(self.container_id, replace(self.root or ROOT, checkpoint=name)))
        return self.checkpoints[-1]

    async def restore(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.container == self.container_id
        self.restored.append(checkpoint)
        if self.unrestored is not None:
            raise self.unrestored

    async def drop(self, checkpoint: Checkpoint) -> None:
        self.dropped.append(checkpoint)


class StubSessions:
    """Counts what is leased; ``opened`` keeps every session ever made."""

    def __init__(self, behaviour: Behaviour = echo) -> None:
        self.behaviour = behaviour
        self.leased = 0
        self.roots: list[RootSpec | None] = []
        self.opened: list[StubSession] = []
        self.refuse: Callable[[str], Exception | None] = lambda _: None
        self.refuse_root: Callable[[RootSpec | None], Exception | None] = lambda _: None
        self.container_id = "c0"
        self.unkept: CheckpointError | None = None
        self.unrestored: InfraError | None = None

    def open(
        self,
        trajectory: str,
        *,
        acquire_timeout_s: float | None = None,
        root: RootSpec | None = None,
        container: str = "",
    ) -> AbstractAsyncContextManager[StubSession]:
        self.roots.append(root)
        return self._session(trajectory, root, container)

    @asynccontextmanager
    async def _session(self, trajectory: str, root: RootSpec | None, container: str) -> AsyncIterator[StubSession]:
        await asyncio.sleep(0)
        if (refusal := self.refuse(trajectory) or self.refuse_root(root)) is not None:
            raise refusal
        session = StubSession(trajectory, self.behaviour, root=root, container_id=container or self.container_id)
        session.unkept, session.unrestored = self.unkept, self.unrestored
        self.opened.append(session)
        self.leased += 1
        try:
            yield session
        finally:
            try:
                await asyncio.sleep(0)
            finally:
                self.leased -= 1  # as a real session, whose release goes on when its caller is cancelled


def calling(*calls: tuple[str, Any], text: str = "") -> Completion:
    """An assistant message with tool calls."""
    return Completion(
        {
            "role": "assistant",
            "content": text,
            "tool_calls": [
                {"id": f"id{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for n, (name, arguments) in enumerate(calls)
            ],
        },
        "tool_calls",
        {"total_tokens": 3},
    )


def saying(text: str, finish_reason: str = "stop") -> Completion:
    return Completion({"role": "assistant", "content": text}, finish_reason)


class StubModel:
    """Gives the completions in order (or raises them); the last one again and again."""

    def __init__(self, *replies: Completion | Exception) -> None:
        self.replies = list(replies)
        self.asked: list[list[Message]] = []
        self.params: list[dict[str, Any]] = []
        self.tools: list[str] = []

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolDefinition], **params: Any) -> Completion:
        self.asked.append(list(messages))
        self.params.append(params)
        self.tools = [tool["function"]["name"] for tool in tools]
        await asyncio.sleep(0)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply


TOOLS = tuple(ToolCatalog.builtin().openai_tools())


class StubHooks:
    """An environment: scores 1.0; tests replace what they need."""

    def build_task(self, item: Any) -> str:
        return f"do {item}"

    def agent_program(self, item: Any) -> Any:
        return None

    def trains_conversation(self, conversation: Any) -> bool:
        return bool(conversation.trained)

    def task_image(self, item: Any) -> Any:
        return None

    def build_agent_config(self, item: Any) -> AgentSettings:
        return AgentSettings(max_steps=4)

    def prepare(self, item: Any, *, exec_tool: Any) -> Any:
        return {}

    def prepare_key(self, item: Any) -> str | None:
        return str(item)

    def setup_trajectory_workspace(self, item: Any, *, trajectory_id: str, exec_tool: Any) -> Any:
        return {"prepared": True}

    def continue_task(self, item: Any, **_: Any) -> Any:
        return None

    async def verify_and_score_trajectory(self, item: Any, final_response: str, **_: Any) -> Any:
        return 1.0, {"said": final_response}

    def score_destroyed_slot(self, item: Any, agent_result: Any, **_: Any) -> Any:
        return 0.0


def farm(sessions: StubSessions, model: Callable[[str], Any] | None = None, **more: Any) -> RolloutServices:
    return RolloutServices(
        sessions=sessions,
        tools=TOOLS,
        model_for=model or (lambda _: StubModel(calling(("bash", '{"command": "ls"}')), saying("done"))),
        handle_for=ToolContext,
        slot_gate=HookSlotGate(100),
        **more,
    )
