"""Observers of an executor's calls: the hook for metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from agentenv.errors import Fault

UNKNOWN_TOOL = "unknown"
"""The name that observers get for tools that are not in the catalog."""


@dataclass(frozen=True, slots=True)
class CallTiming:
    """Durations of one call, in seconds. ``total_s`` is the caller's wait."""

    call_id: str
    tool: str
    batch_wait_s: float
    queue_s: float
    run_s: float
    total_s: float


class CallObserver(Protocol):
    """Notified of every call and batch of an executor. Must neither raise nor block.

    ``tool`` is the name of a known tool, or ``unknown``: names invented by a model are never passed on.
    """

    def finished(self, tool: str, fault: Fault, timing: CallTiming | None) -> None:
        """A call has ended; ``timing`` is given if a slot ran it."""

    def cancelled(self, tool: str) -> None:
        """A call was cancelled by its caller."""

    def batch_left(self, calls: int) -> None:
        """A batch with this many calls was sent."""
