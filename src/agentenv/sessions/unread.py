"""How much of the server's memory the output of one slot may take while nobody has read it."""

from __future__ import annotations

from typing import Protocol

SLOT_UNREAD_BYTES = 32 * 1024 * 1024
"""For all terminals, background processes and tmux sessions of a slot together."""


class Holder(Protocol):
    """Keeps output until somebody asks for it."""

    def shed(self) -> None:
        """Drop all that is kept, count it as dropped, and say so to the :class:`Unread`."""


class Unread:
    """One slot's budget. Beyond it whoever has kept something for longest drops what it keeps: a slot that
    prints more than it reads loses its own oldest output, and nobody else notices. Pure."""

    def __init__(self, most_bytes: int = SLOT_UNREAD_BYTES) -> None:
        self.total_bytes = 0
        self._most_bytes = most_bytes
        self._held: dict[Holder, int] = {}

    @property
    def holders(self) -> int:
        """How many keep something."""
        return len(self._held)

    def holds(self, holder: Holder, held_bytes: int) -> None:
        """``holder`` keeps so much now. It is its own turn to drop all of it, perhaps, before this returns."""
        before = self._held.get(holder, 0)
        if held_bytes:
            self._held[holder] = held_bytes
        elif before:
            del self._held[holder]
        self.total_bytes += held_bytes - before
        while self.total_bytes > self._most_bytes:
            next(iter(self._held)).shed()
