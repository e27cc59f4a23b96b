"""Interface for tools that run a program in their slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentenv.sandbox.server.inbox import Attached


@dataclass(frozen=True)
class Finished:
    """A program that ended. ``exit_code`` is 128 + n when signal n ended it, and an errno when it could not be
    started at all. Stdout beyond the cap is reduced to head and tail, and the rest is counted."""

    exit_code: int
    stdout: bytes | memoryview
    stderr: bytes
    stdout_dropped_bytes: int


class SlotRunner(Protocol):
    """Runs programs in one slot, for one call."""

    async def run(self, argv: Sequence[str], *, stdin: bytes | Attached | None = None, output_bytes: int) -> Finished:
        """Run ``argv`` to its end in the workspace; at most ``output_bytes`` of its stdout are kept."""
