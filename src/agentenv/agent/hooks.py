"""Calls the code of an environment's author, and keeps its failures apart from all others."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from agentenv.agent.loop import AgentResult
from agentenv.agent.protocols import Handle
from agentenv.agent.settings import AgentSettings
from agentenv.errors import InfraError, SlotDestroyedError, TaskError

T = TypeVar("T")


class Hooks(Protocol):
    """Hooks of an environment that a rollout calls. Every method may be plain or ``async``."""

    def build_task(self, item: Any) -> str | Awaitable[str]:
        """The text of the task."""

    def build_agent_config(self, item: Any) -> AgentSettings | Awaitable[AgentSettings]:
        """Limits and sampling for this item."""

    def setup_trajectory_workspace(
        self, item: Any, *, trajectory_id: str, exec_tool: Any
    ) -> dict[str, Any] | Awaitable[dict[str, Any] | None] | None:
        """Prepare the slot; the return value is passed to the verifier."""

    def verify_and_score_trajectory(
        self,
        item: Any,
        final_response: str,
        *,
        trajectory_id: str,
        exec_tool: Any,
        agent_result: AgentResult,
        workspace_meta: dict[str, Any],
    ) -> tuple[float, dict[str, Any]] | Awaitable[tuple[float, dict[str, Any]]]:
        """The score, and what the verifier wants recorded."""

    def score_destroyed_slot(
        self, item: Any, agent_result: AgentResult, *, trajectory_id: str, workspace_meta: dict[str, Any]
    ) -> float | Awaitable[float | None] | None:
        """The score of a rollout whose slot the policy destroyed, without a slot to inspect; None: no score."""


def genuinely_cancelled() -> bool:
    """Whether the current task was really asked to stop (a stray CancelledError is not such a request)."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def call_hook(name: str, function: Callable[..., T | Awaitable[T]], *args: Any, **kwargs: Any) -> T:
    """Call a plain or async hook.

    Raises: InfraError and SlotDestroyedError that the hook did not catch; TaskError for everything else it raised,
    including SystemExit and stray CancelledErrors. Cancellation of the caller propagates.
    """
    try:
        value = function(*args, **kwargs)
        return await value if inspect.isawaitable(value) else value
    except (InfraError, SlotDestroyedError, TaskError, KeyboardInterrupt):
        raise
    except asyncio.CancelledError as error:
        if genuinely_cancelled():
            raise
        raise TaskError(f"{name} raised CancelledError without being cancelled") from error
    except BaseException as error:
        raise TaskError(f"{name} raised {type(error).__name__}: {error}") from error


def expected(name: str, value: Any, kind: type[T]) -> T:
    """The return value of a hook. Raises: TaskError when it has another type."""
    if not isinstance(value, kind):
        raise TaskError(f"{name} must return {kind.__name__}, got {value!r:.200}")
    return value


async def call_hook_on_slot(
    handle: Handle, name: str, function: Callable[..., T | Awaitable[T]], *args: Any, **kwargs: Any
) -> T:
    """:func:`call_hook` for hooks that use a slot. The first infrastructure failure the hook met (or the
    destruction of the slot) is raised even when the hook caught it and returned or raised something else: a lost
    container must not become a score of 0."""
    try:
        value = await call_hook(name, function, *args, **kwargs)
    except (InfraError, SlotDestroyedError, TaskError) as error:
        if handle.infra_error is not None and handle.infra_error is not error:
            raise handle.infra_error from error
        raise
    finally:
        await handle.cleanup()
    if handle.infra_error is not None:
        raise handle.infra_error
    return value


def checked_score(returned: Any) -> tuple[float, dict[str, Any]]:
    """A verifier's return value as (score, kept). A bare number is a score with nothing kept.

    Raises: TaskError when it is not a finite number (and a dict).
    """
    score, kept = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if isinstance(score, bool):
        score = float(score)
    if not isinstance(score, (int, float)) and hasattr(score, "__float__"):
        score = _as_float(score)
    if not isinstance(score, (int, float)) or not math.isfinite(score):
        raise TaskError(f"the verifier must return a finite number and a dict, got {returned!r:.200}")
    if kept is not None and not isinstance(kept, dict):
        raise TaskError(f"the verifier's second value must be a dict, got {type(kept).__name__}")
    return float(score), kept or {}


def _as_float(score: Any) -> float:
    """A number of another library's type. Raises: TaskError when it is not a number (an array of several, say)."""
    try:
        return float(score)
    except Exception as error:
        raise TaskError(
            f"the verifier must return a finite number, got {score!r:.200} ({type(error).__name__}: {error})"
        ) from error
