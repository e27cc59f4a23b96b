"""Sums over the rollouts that agent programs played. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from agentenv.agent.transcript import Transcript

__all__ = ["ProgramTotals", "by_dialect", "program_rows"]

_PER_ROLLOUT: Final = ("conversations", "dropped", "refused")
_OF_PROGRAMS: Final = {
    "rollouts": "played",
    "failed": "failed",
    "conversations": "conversations",
    "dropped": "dropped parts",
    "refused": "refused requests",
}
_OF_DIALECTS: Final = {"turns": "turns", "prompt_tokens": "prompt tokens", "completion_tokens": "completion tokens"}


@dataclass
class ProgramTotals:
    """Numbers by program and by the API in which they asked; the built-in loop's rollouts are not counted.

    ``programs``, by name: ``rollouts``; ``failed``, those that ended with another exit code than 0 or before their
    first turn; ``conversations``; ``dropped`` parts of requests; ``refused`` requests, at most the first 20 of a
    rollout. ``dialects``: as :func:`by_dialect`.
    """

    programs: dict[str, Counter[str]] = field(default_factory=dict)
    dialects: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, transcript: Transcript) -> None:
        """One more rollout."""
        if (program := transcript.program) is None:
            return
        self.programs.setdefault(program.name, Counter()).update(
            {
                "rollouts": 1,
                "failed": transcript.finish_reason == "program_failed"
                or (transcript.fault == "task" and not transcript.steps),
                "conversations": len(program.conversations),
                "dropped": sum(program.dropped.values()),
                "refused": len(program.refused),
            }
        )
        for dialect, counted in by_dialect(transcript).items():
            self.dialects.setdefault(dialect, Counter()).update(counted)

    def metrics(self) -> dict[str, float]:
        """Means per rollout of a program, by name; empty if there was none."""
        total = sum(self.programs.values(), Counter[str]())  # without what is 0
        if not (rollouts := total["rollouts"]):
            return {}
        found = {f"program_{name}_per_rollout": total[name] / rollouts for name in _PER_ROLLOUT}
        found["program_failed_rate"] = total["failed"] / rollouts
        for dialect, counted in self.dialects.items():
            found |= {f"{name}_{dialect}_per_rollout": number / rollouts for name, number in counted.items()}
        return found

    def document(self) -> dict[str, dict[str, dict[str, int]]]:
        """For programs: ``programs`` and ``dialects``; empty if there were none."""
        found = {"programs": self.programs, "dialects": self.dialects} if self.programs else {}
        return {kind: {name: dict(counted) for name, counted in by.items()} for kind, by in found.items()}


def by_dialect(transcript: Transcript) -> dict[str, Counter[str]]:
    """Per API in which an agent program asked: its ``turns``, and their ``prompt_tokens`` and ``completion_tokens`` as
    the model's server counted them. Empty for the built-in loop."""
    found: dict[str, Counter[str]] = {}
    for step in transcript.steps:
        if step.dialect:
            numbers = {name: (step.usage or {}).get(name) for name in ("prompt_tokens", "completion_tokens")}
            counted = {name: number for name, number in numbers.items() if isinstance(number, int)}
            found.setdefault(step.dialect, Counter()).update({"turns": 1, **counted})
    return found


def program_rows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, text) of the lines about the programs in a document of results; empty if there were none."""
    found = []
    for kind, names in (("programs", _OF_PROGRAMS), ("dialects", _OF_DIALECTS)):
        for number, (name, counted) in enumerate((document.get(kind) or {}).items()):
            texts = [f"{text} {counted[key]:,}" for key, text in names.items() if key in counted]
            found.append(("" if number else kind, f"{name}: {', '.join(texts)}"))
    return found
