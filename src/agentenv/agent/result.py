"""The outcome of one agent run, as verifiers and ``run_agent`` get it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from agentenv.agent.protocols import Message
from agentenv.agent.tool_call import failure_of
from agentenv.agent.transcript import FinishReason, Phase, ProgramRecord, Shortening, Step, ToolRecord

__all__ = ["AgentResult", "ToolError"]


@dataclass(frozen=True)
class ToolError:
    """A call that did not succeed: in which turn (0 first), what was called, why it failed, what the model saw."""

    turn: int
    tool_name: str
    arguments: str
    error: str
    tool_result: str

    @classmethod
    def of(cls, turn: int, call: ToolRecord) -> ToolError:
        """The error of a call that has one."""
        sent = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False)
        error = failure_of(call.result) if call.result else "has no result"
        return cls(turn, call.tool, sent, error, call.shown)


@dataclass
class AgentResult:
    """Outcome of one agent run. ``messages`` is the whole conversation, valid also when the run was cut short.

    ``model_faults`` counts calls the model got wrong (unreadable, unknown tool, bad arguments, refused path).
    ``shortenings`` records which old tool outputs were removed from ``messages``, and when. It unpacks into the final
    response and a dict of ``success``, ``error`` and ``tool_calls``.
    """

    messages: list[Message]
    steps: list[Step] = field(default_factory=list)
    final_response: str = ""
    finish_reason: FinishReason = "stop"
    model_faults: int = 0
    phases: list[Phase] = field(default_factory=list)
    shortenings: list[Shortening] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    """The tools the model was offered, by name."""
    program: ProgramRecord | None = None
    """Of the agent program that ran in the place of the built-in loop; ``messages`` are its main conversation's."""

    def __iter__(self) -> Iterator[str | dict[str, Any]]:
        yield self.final_response
        yield {"success": self.success, "error": self.error, "tool_calls": self.total_tool_calls}

    @property
    def success(self) -> bool:
        """Whether the model ended with an answer, rather than at a limit."""
        return bool(self.steps) and self.finish_reason == "stop"

    @property
    def error(self) -> str | None:
        """The limit that ended the run; None after a success."""
        return None if self.success else self.finish_reason if self.steps else "no turn"

    @property
    def num_steps(self) -> int:
        """Number of model turns."""
        return len(self.steps)

    turns_used = num_steps
    finished_naturally = success

    @property
    def total_tool_calls(self) -> int:
        """Number of tool calls, including refused ones, but not what could not be read as a call."""
        return sum(bool(call.tool) for step in self.steps for call in step.tool_calls)

    def to_messages(self) -> list[Message]:
        """Every turn's text and, as a user message, its results in the form of ``ToolResult.to_xml``; ``messages`` is
        the conversation as the model had it."""
        conversation: list[Message] = []
        for step in self.steps:
            conversation.append({"role": "assistant", "content": step.assistant_message})
            if results := step.tool_results:
                conversation.append({"role": "user", "content": "\n".join(result.to_xml() for result in results)})
        return conversation

    @property
    def tool_errors(self) -> list[ToolError]:
        """The calls that did not succeed: refused, timed out, or with another exit code than 0. An agent program runs
        its calls itself, so nothing is known of them."""
        if self.program is not None:
            return []
        calls = ((step.index, call) for step in self.steps for call in step.tool_calls)
        return [ToolError.of(turn, call) for turn, call in calls if call.result is None or not call.result.success]

    @property
    def reasoning_per_turn(self) -> list[str | None]:
        """The reasoning of each turn, None where there was none."""
        return [step.reasoning or None for step in self.steps]
