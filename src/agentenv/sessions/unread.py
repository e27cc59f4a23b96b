"""Limits the server's memory for unread output of one slot."""

from __future__ import annotations

from typing import Protocol

SLOT_UNREAD_BYTES = 32 * 1024 * 1024
"""Limit for all terminals, background processes and tmux sessions of a slot together."""


class OutputHolder(Protocol):
    """Keeps output until it is taken."""

    def shed(self) -> None:
        """Drop all kept output, count it as dropped, and report to the :class:`Unread`."""


class Unread:
    """Budget of one slot. Above it, whoever has kept output longest drops it: a slot that prints more than it reads
    loses its own oldest output, without effect on others. Pure."""

    def __init__(self, most_bytes: int = SLOT_UNREAD_BYTES) -> None:
        self.total_bytes = 0
        self._most_bytes = most_bytes
        self._held: dict[OutputHolder, int] = {}

    def holds(self, holder: OutputHolder, held_bytes: int) -> None:
        """``holder`` keeps this much now. It may have to drop all of it before this returns."""
        before = self._held.get(holder, 0)
        if held_bytes:
            self._held[holder] = held_bytes
        elif before:
            del self._held[holder]
        self.total_bytes += held_bytes - before
        while self.total_bytes > self._most_bytes:
            next(iter(self._held)).shed()
