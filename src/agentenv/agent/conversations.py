"""The conversations of a rollout as they are read: each message with the turn that wrote it. Pure.

The built-in loop has one conversation, an agent program as many as it likes (``ProgramRecord.conversations``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agentenv.agent.jsonable import clean_text
from agentenv.agent.transcript import ConversationRecord, Step, Transcript, text_of

__all__ = ["MAIN", "Conversation", "conversations_of", "main_steps"]

MAIN: Final = 0
"""The number of the only conversation of the built-in loop."""


@dataclass(frozen=True)
class Conversation:
    """One conversation. ``steps`` are its own turns; ``said`` is every message in order with the turn that wrote it,
    None for what no turn wrote. Its first ``shared`` messages are those of the conversation behind whose answer it
    began."""

    number: int
    is_main: bool
    record: ConversationRecord
    steps: list[Step]
    said: list[tuple[Mapping[str, Any], Step | None]]

    @property
    def shared(self) -> int:
        """How many messages there were when it began."""
        behind = self.record.behind
        found = [at for at, (_, step) in enumerate(self.said) if step is not None and step.index == behind]
        return found[-1] + 1 if found else 0


def conversations_of(transcript: Transcript) -> list[Conversation]:
    """In the order in which they began. A rollout of the built-in loop has one, which may be empty."""
    program = transcript.program
    if program is None:
        record = ConversationRecord(tools=transcript.tools)
        said = _in_order(transcript.messages, transcript.steps)
        return [Conversation(MAIN, True, record, transcript.steps, said)]
    found = []
    for number, record in enumerate(program.conversations):
        is_main = number == program.main
        steps = [step for step in transcript.steps if step.conversation == number]
        line = _line(transcript.steps, steps[-1] if steps else _step(transcript.steps, record.behind))
        said = _matched(transcript.messages if is_main else record.messages, line)
        found.append(Conversation(number, is_main, record, steps, said))
    return found


def main_steps(transcript: Transcript) -> list[Step]:
    """The turns of the conversation that ``messages`` are."""
    program = transcript.program
    return [step for step in transcript.steps if program is None or step.conversation == program.main]


def _in_order(
    messages: Sequence[Mapping[str, Any]], steps: Sequence[Step]
) -> list[tuple[Mapping[str, Any], Step | None]]:
    """Of the built-in loop, where every answer is a turn. A turn whose answer is not in ``messages`` follows them."""
    left = iter(steps)
    said = [(message, next(left, None) if message.get("role") == "assistant" else None) for message in messages]
    return [*said, *((step.message, step) for step in left)]


def _step(steps: Sequence[Step], index: int | None) -> Step | None:
    return steps[index] if index is not None and 0 <= index < len(steps) else None


def _line(steps: Sequence[Step], last: Step | None) -> list[Step]:
    """The turns that lead to ``last``, each continuing the one before it."""
    line: list[Step] = []
    while last is not None and (not line or last.index < line[-1].index):
        line.append(last)
        last = _step(steps, last.after)
    return line[::-1]


def _matched(
    messages: Sequence[Mapping[str, Any]], line: Sequence[Step]
) -> list[tuple[Mapping[str, Any], Step | None]]:
    """Each message with its turn. Programs put answers of their own beside the model's, so the turns are found from the
    end, where one is the last answer."""
    said: list[tuple[Mapping[str, Any], Step | None]] = []
    left = list(line)
    for message in reversed(messages):
        is_turn = message.get("role") == "assistant" and left and _key(message) == _key_of(left[-1])
        said.append((message, left.pop() if is_turn else None))
    return said[::-1]


def _key(message: Mapping[str, Any]) -> tuple[str, list[str]]:
    calls = message.get("tool_calls") or []
    return text_of(message.get("content")).strip(), [str(call.get("id")) for call in calls if isinstance(call, dict)]


def _key_of(step: Step) -> tuple[str, list[str]]:
    return clean_text(text_of(step.message.get("content"))).strip(), [call.call_id for call in step.tool_calls]
