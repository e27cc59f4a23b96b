"""Recordings of a rollout's tmux sessions: completed at its end, and read back from its transcript."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentenv.agent.protocols import Session
from agentenv.agent.transcript import Step, ToolRecord, Transcript
from agentenv.sessions.asciicast import recordings

__all__ = ["recordings_of"]

TMUX = "tmux"
_KEPT = ("session", "recording")
_LONGEST_S = 30.0


async def last_recordings(session: Session, steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Recorded output of tmux sessions since the model's last call to each, in the form its results have. Sends no
    request if nothing was recorded. Raises: InfraError."""
    found = []
    for name in _still_recorded(steps):
        result = await session.call(TMUX, {"action": "capture", "session": name}, timeout_s=_LONGEST_S)
        result.raise_failure()
        if isinstance(result.content, dict) and result.content.get("recording"):
            found.append({key: result.content[key] for key in _KEPT})
    return found


def recordings_of(transcript: Transcript) -> dict[str, str]:
    """Each recorded tmux session of a rollout as a complete asciicast v2 file, by name; sessions restarted under
    the same name are numbered."""
    return recordings([*(content for _, content in _contents(transcript.steps)), *transcript.last_recordings])


def _still_recorded(steps: Sequence[Step]) -> list[str]:
    names: dict[str, None] = {}
    for call, content in _contents(steps):
        state = content.get("session")
        name = str(state.get("session")) if isinstance(state, Mapping) else ""
        if isinstance(call.arguments, dict) and call.arguments.get("action") == "stop":
            names.pop(name, None)
        elif content.get("recording"):
            names[name] = None
    return list(names)


def _contents(steps: Sequence[Step]) -> Iterator[tuple[ToolRecord, Mapping[str, Any]]]:
    for call in (call for step in steps for call in step.tool_calls):
        if call.tool == TMUX and call.result is not None and isinstance(call.result.content, dict):
            yield call, call.result.content
