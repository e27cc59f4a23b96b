"""Calls the code of an environment's author, and keeps its failures apart from all others."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeVar

from agentenv.agent.protocols import Handle
from agentenv.agent.result import AgentResult
from agentenv.agent.settings import AgentSettings
from agentenv.errors import AgentEnvError, HookError, InfraError, SlotDestroyedError, TaskError

T = TypeVar("T")


class Hooks(Protocol):
    """Hooks of an environment that a rollout calls. Every method may be plain or ``async``."""

    def build_task(self, item: Any) -> str | Awaitable[str]:
        """The text of the task."""

    def build_agent_config(self, item: Any) -> AgentSettings | Awaitable[AgentSettings]:
        """Limits and sampling for this item."""

    def agent_program(self, item: Any) -> Any:
        """The program that runs in the place of the built-in loop; None: that loop."""

    def trains_conversation(self, conversation: Any) -> bool | Awaitable[bool]:
        """Whether a conversation of such a program is trained on."""

    def task_image(self, item: Any) -> Any:
        """The image that is the root of this item's slots; None: plain slots."""

    def prepare(self, item: Any, *, exec_tool: Any) -> dict[str, Any] | Awaitable[dict[str, Any] | None] | None:
        """Prepare what is the same for all rollouts of an item; the return value is passed to the verifier."""

    def prepare_key(self, item: Any) -> str | Awaitable[str | None] | None:
        """Name of what ``prepare`` makes of the item, equal where it makes the same; None: not to be shared."""

    def setup_trajectory_workspace(
        self, item: Any, *, trajectory_id: str, exec_tool: Any
    ) -> dict[str, Any] | Awaitable[dict[str, Any] | None] | None:
        """Prepare the slot; the return value is passed to the verifier."""

    def continue_task(
        self,
        item: Any,
        *,
        trajectory_id: str,
        exec_tool: Any,
        agent_result: AgentResult,
        workspace_meta: dict[str, Any],
    ) -> str | tuple[str, AgentSettings] | Awaitable[str | tuple[str, AgentSettings] | None] | None:
        """A further task in the same conversation and slot, with limits of its own or those of the one before; None:
        there is no more."""

    def verify_and_score_trajectory(
        self,
        item: Any,
        final_response: str,
        *,
        trajectory_id: str,
        exec_tool: Any,
        agent_result: AgentResult,
        workspace_meta: dict[str, Any],
    ) -> float | tuple[float, dict[str, Any]] | Awaitable[float | tuple[float, dict[str, Any]]]:
        """The score, and the verifier's own records."""

    def score_destroyed_slot(
        self, item: Any, agent_result: AgentResult, *, trajectory_id: str, workspace_meta: dict[str, Any]
    ) -> float | Awaitable[float | None] | None:
        """The score of a rollout whose slot the policy destroyed, without a slot to inspect; None: no score."""


HOOK_KEYWORDS: Final[Mapping[str, frozenset[str]]] = {
    "build_task": frozenset(),
    "score_trajectory": frozenset(),
    "build_agent_config": frozenset(),
    "agent_program": frozenset(),
    "trains_conversation": frozenset(),
    "task_image": frozenset(),
    "prepare": frozenset({"exec_tool"}),
    "prepare_key": frozenset(),
    "setup_trajectory_workspace": frozenset({"trajectory_id", "exec_tool"}),
    "continue_task": frozenset({"trajectory_id", "exec_tool", "agent_result", "workspace_meta"}),
    "verify_and_score_trajectory": frozenset({"trajectory_id", "exec_tool", "agent_result", "workspace_meta"}),
    "score_destroyed_slot": frozenset({"trajectory_id", "workspace_meta"}),
}
"""The keywords a hook may declare; it is given those that it does."""
_POSITIONAL: Final = {
    "trains_conversation": ("conversation",),
    "score_trajectory": ("item", "final_response"),
    "verify_and_score_trajectory": ("item", "final_response"),
    "score_destroyed_slot": ("item", "agent_result"),
}
"""Arguments given by position, where there is another than the item."""
WITHOUT_ARGUMENTS: Final = (
    "setup_agent_env",
    "get_next_item",
    "build_tools",
    "build_tool_server",
    "build_backend",
    "evaluate",
)
"""Hooks that are called with nothing, and by no rollout."""
_ALIKE: Final = 0.85
"""How much a method's name resembles that of a hook to be taken for it, from 0 to 1."""


def check_signatures(hooks: object) -> None:
    """:func:`check_signature` of every hook that a rollout calls."""
    for name, keywords in HOOK_KEYWORDS.items():
        check_signature(hooks, name, _POSITIONAL.get(name, ("item",)), keywords)


def check_signature(hooks: object, name: str, positional: Sequence[str], keywords: Collection[str] = ()) -> None:
    """Raises: HookError when a hook could not be called with these arguments, and those of the keywords that it
    declares; names the hook, the parameter and the signature that is expected."""
    function = getattr(hooks, name)
    try:
        given = declared(function, dict.fromkeys(keywords))
        inspect.signature(function).bind(*[None] * len(positional), **given)
    except TypeError as error:
        optional = ["*", *sorted(keywords)] if keywords else []
        expected = f"def {name}({', '.join(['self', *positional, *optional])})"
        leave_out = "; those after * may be left out" if keywords else ""
        raise HookError(
            f"{type(hooks).__name__}.{name}", f"cannot be called: {error}", next_step=f"write {expected}{leave_out}"
        ) from None


def misspelt(kind: type, base: type) -> dict[str, str]:
    """Methods of a class that nothing calls and whose names resemble a hook's that it has not written → that hook.
    ``base``: the class with every hook."""
    hooks = [name for name in (*HOOK_KEYWORDS, *WITHOUT_ARGUMENTS) if getattr(kind, name) is getattr(base, name)]
    own = [
        name
        for each in kind.__mro__[: kind.__mro__.index(base)]
        for name, value in vars(each).items()
        if callable(value)
    ]
    found = {}
    for name in own:
        near = difflib.get_close_matches(name, hooks, n=1, cutoff=_ALIKE)
        if near and not name.startswith("_") and not hasattr(base, name):
            found[name] = near[0]
    return found


def check_not_overridden(kind: type, base: type, name: str, instead: str) -> None:
    """Raises: HookError when a class has a method of its own in place of one of ``base`` that is never called; says
    what to write instead."""
    if getattr(kind, name) is not getattr(base, name):
        raise HookError(f"{kind.__name__}.{name}", "would never be called", next_step=instead)


def declared(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the keywords that a function declares; all of them if it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(given)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in given.items() if name in names}


def genuinely_cancelled() -> bool:
    """Whether the current task was really cancelled (a stray CancelledError is not a request to stop)."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def call_hook(name: str, function: Callable[..., T | Awaitable[T]], *args: Any, **kwargs: Any) -> T:
    """Call a plain or async hook, with those of ``kwargs`` that it declares.

    Raises: InfraError and SlotDestroyedError that the hook did not catch; TaskError for everything else it raised,
    including SystemExit and stray CancelledErrors. Cancellation of the caller propagates.
    """
    try:
        value = function(*args, **declared(function, kwargs))
        return await value if inspect.isawaitable(value) else value
    except (InfraError, SlotDestroyedError, TaskError, KeyboardInterrupt):
        raise
    except asyncio.CancelledError as error:
        if genuinely_cancelled():
            raise
        raise TaskError(f"{name} raised CancelledError without being cancelled") from error
    except BaseException as error:
        raise _bug(name, error) from error


def _bug(name: str, error: BaseException) -> TaskError:
    return TaskError(f"{name} raised {type(error).__name__}: {error}")


@contextmanager
def outside_rollouts(name: str) -> Iterator[None]:
    """For a hook that no rollout calls. Raises: TaskError for whatever it raised, but an AgentEnvError as it is."""
    try:
        yield
    except (AgentEnvError, asyncio.CancelledError):
        raise
    except Exception as error:
        raise _bug(name, error) from error


def watched(name: str, function: Callable[[], Any]) -> Callable[[], Coroutine[Any, Any, Any]]:
    """A plain or async hook as an async function that raises what :func:`outside_rollouts` does."""

    async def called() -> Any:
        with outside_rollouts(name):
            value = function()
            return await value if inspect.isawaitable(value) else value

    return called


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


def checked_score(name: str, returned: Any) -> tuple[float, dict[str, Any]]:
    """The return value of the hook ``name`` as (score, kept). A bare number is a score with nothing kept.

    Raises: TaskError when it is not a finite number (and a dict).
    """
    score, kept = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    number = finite(name, score)
    if kept is not None and not isinstance(kept, dict):
        raise TaskError(f"{name} must return a score and a dict, got {type(kept).__name__} for the dict")
    return number, kept or {}


def finite(name: str, score: Any) -> float:
    """The score that the hook ``name`` returned, also as another library's type. Raises: TaskError when it is no finite
    number (None, text, an array of several)."""
    why = ""
    if not isinstance(score, (int, float)) and hasattr(score, "__float__"):
        try:
            score = float(score)
        except Exception as error:
            why = f" ({type(error).__name__}: {error})"
    if not isinstance(score, (int, float)) or not math.isfinite(score):
        raise TaskError(f"{name} must return a finite number, got {score!r:.200}{why}")
    return float(score)
