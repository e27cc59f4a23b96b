"""Who may watch an executor's calls, and what they are told: the hook metrics hang on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from agentenv.errors import Fault

UNKNOWN_TOOL = "unknown"
"""What observers are told instead of a tool name that is not in the catalog."""


@dataclass(frozen=True, slots=True)
class CallTiming:
    """Where one call's time went, in seconds. ``total_s`` is what the caller waited."""

    call_id: str
    tool: str
    batch_wait_s: float
    queue_s: float
    run_s: float
    total_s: float


class CallObserver(Protocol):
    """Told of every call and batch; given to an executor whose metrics are wanted. Must not raise nor wait.

    ``tool`` is the name of a tool there is, or ``unknown``: what a model invents is never passed on.
    """

    def finished(self, tool: str, fault: Fault, timing: CallTiming | None) -> None:
        """A call has ended; ``timing`` when a slot ran it."""

    def cancelled(self, tool: str) -> None:
        """Nobody waits for this call any more."""

    def batch_left(self, calls: int) -> None:
        """A batch of so many calls was sent."""
