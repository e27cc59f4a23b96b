"""Settings of one agent: limits and sampling. Frozen; use ``dataclasses.replace`` for variants."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, Final

from agentenv.agent.protocols import Message
from agentenv.errors import ConfigError
from agentenv.wire.sessions import SLOT_TOOLS

SLOT_TOOL_NAMES: Final = frozenset(tool.name for tool in SLOT_TOOLS)

_PROMPT_PARTS: Final = (
    (
        SLOT_TOOL_NAMES,
        "You solve tasks on a Linux machine by calling tools. Your files are in /workspace, which is the initial "
        "working directory.",
    ),
    (
        {"bash"},
        "Each bash call starts a new shell: files persist, variables and directory changes do not. A command that "
        "exceeds its time limit is stopped and its partial output is shown.",
    ),
    (
        {"terminal"},
        "The shell of the terminal tool persists between calls, with its directory and variables. A command that "
        "exceeds its time limit there keeps running.",
    ),
)
"""Sentences of the default system prompt, and the tools they are about."""


def default_system_prompt(tools: Collection[str]) -> str:
    """The system prompt for an agent that is offered these tools: it describes no others."""
    about = [text for named, text in _PROMPT_PARTS if not named.isdisjoint(tools)]
    runs = "verify your result by running it, " if {"bash", "terminal"} & set(tools) else ""
    ending = f"Work step by step, {runs}and when the task is done answer without calling a tool."
    return " ".join([*(about or ["You solve tasks by calling tools."]), ending])


def opening(system_prompt: str, task: str) -> list[Message]:
    """The first messages of a conversation; an empty system prompt is omitted."""
    system: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": task}]


@dataclass(frozen=True)
class AgentSettings:
    """Limits and sampling of one agent.

    ``max_steps``: maximum number of model turns; ``max_calls_per_turn``: tool calls executed per turn; ``max_s``:
    seconds after which no call and no turn but the first begins (None: no limit); ``max_idle_s``: seconds without a
    tool call (of an agent program: without a turn) after which the slot is released and the rollout has no score (None:
    no limit); ``tool_delay_s``: pause between two tool calls; ``tool_timeout_s`` bounds each call (None: the executor's
    default); ``shown_bytes`` caps each of stdout and stderr as the model sees them (head and tail kept, the dropped
    bytes counted). ``temperature``, ``max_tokens`` and ``extra_body`` are sent to the model's server when set.
    ``system_prompt`` None: one that describes the offered tools; an empty one is not sent. ``tools`` restricts the
    agent to these names (None: all that are enabled); ``tool_aliases`` are other names that calls may use for them.
    ``context_tokens`` bounds prompt and answer of a turn together; when the next turn would exceed it, all tool outputs
    but the last ``keep_tool_outputs`` are shortened (None: never), which the transcript records. ``send_reasoning``
    sends a model its earlier reasoning back.

    What a hook's settings leave None or empty is as the environment's config has it.

    Raises: ConfigError for a ``working_dir``, a setting of another harness: slots begin in /workspace.
    """

    max_steps: int = 50
    max_calls_per_turn: int = 64
    max_s: float | None = None
    max_idle_s: float | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)
    tool_delay_s: float = 0.0
    tool_timeout_s: float | None = None
    shown_bytes: int = 32 * 1024
    system_prompt: str | None = None
    tools: tuple[str, ...] | None = None
    tool_aliases: Mapping[str, str] = field(default_factory=dict)
    context_tokens: int | None = None
    keep_tool_outputs: int | None = None
    send_reasoning: bool | None = None
    working_dir: InitVar[str | None] = None

    def __post_init__(self, working_dir: str | None) -> None:
        if working_dir is not None:
            raise ConfigError(
                "working_dir",
                f"{working_dir!r} is not supported: the working directory of a slot is /workspace",
                next_step="give a command its own directory: cwd (bash) or workdir (terminal)",
            )

    def completed(self, defaults: AgentSettings) -> AgentSettings:
        """These settings, with ``defaults`` where they are None or empty (an empty system prompt is one)."""
        unset = [name for name, value in vars(self).items() if value is None or value == {}]
        return replace(self, **{name: getattr(defaults, name) for name in unset})

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters for ``Model.complete``; only those that are set."""
        chosen = {"temperature": self.temperature, "max_tokens": self.max_tokens, "extra_body": self.extra_body or None}
        return {name: value for name, value in chosen.items() if value is not None}
