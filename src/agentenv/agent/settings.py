"""Settings of one agent: limits and sampling. Frozen; use ``dataclasses.replace`` for variants."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agentenv.agent.protocols import Message

SYSTEM_PROMPT = """\
You solve tasks on a Linux machine by calling tools. Your files are in /workspace, which is the initial \
working directory. Each bash call starts a new shell: files persist, variables and directory changes \
do not. A command that exceeds its time limit is stopped and its partial output is shown. Work step by \
step, verify your result by running it, and when the task is done answer without calling a tool."""


def opening(system_prompt: str, task: str) -> list[Message]:
    """The first messages of a conversation; an empty system prompt is omitted."""
    system: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": task}]


@dataclass(frozen=True)
class AgentSettings:
    """Limits and sampling of one agent.

    ``max_steps``: maximum number of model turns; ``max_calls_per_turn``: tool calls executed per turn; ``max_s``:
    seconds after which no call and no turn but the first begins (None: no limit); ``tool_delay_s``: pause between
    two tool calls; ``tool_timeout_s`` bounds each call (None: the executor's default); ``shown_bytes`` caps each of
    stdout and stderr as the model sees them (head and tail kept, the dropped bytes counted). ``temperature``,
    ``max_tokens`` and ``extra_body`` are sent to the model's server when set. ``tools`` restricts the agent to
    these names (None: all that are enabled). ``context_tokens`` bounds prompt and answer of a turn together; when
    the next turn would exceed it, all tool outputs but the last ``keep_tool_outputs`` are shortened (None: never),
    which the transcript records. ``send_reasoning`` sends a model its earlier reasoning back.
    """

    max_steps: int = 50
    max_calls_per_turn: int = 64
    max_s: float | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)
    tool_delay_s: float = 0.0
    tool_timeout_s: float | None = None
    shown_bytes: int = 32 * 1024
    system_prompt: str = SYSTEM_PROMPT
    tools: tuple[str, ...] | None = None
    context_tokens: int | None = None
    keep_tool_outputs: int | None = None
    send_reasoning: bool = False

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters for ``Model.complete``; only those that are set."""
        chosen = {"temperature": self.temperature, "max_tokens": self.max_tokens, "extra_body": self.extra_body or None}
        return {name: value for name, value in chosen.items() if value is not None}
