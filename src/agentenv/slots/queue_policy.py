"""The queue of a ledger: who waits for slots, and whose turn it is. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from agentenv.wire.leases import RunKind, Tags

Caps = tuple[tuple[str, int], ...]
"""Tokens that have a cap, by their ids, and how many slots each may hold at once."""

_ticket = attrgetter("ticket")


@dataclass(frozen=True, slots=True)
class Ask:
    """A request in the queue for ``slots`` slots at once (a group is served whole).

    ``ticket`` is unique and increases in order of arrival.
    """

    ticket: int
    slots: int = 1
    run: str = ""
    kind: RunKind = "train"
    caps: Caps = ()
    """Of the tokens by which it was asked for: the slots count to each of them."""


def caps_of(tags: Tags) -> Caps:
    """The caps of the tokens that leases with these tags count to."""
    return tuple((token.id, token.cap) for token in tags.tokens if token.cap is not None)


class QueuePolicy(Protocol):
    """A queue of asks, and the slots that each run holds.

    The one whose turn it is waits until enough slots are free for all it asked for; nobody is served meanwhile.
    """

    def push(self, ask: Ask) -> None:
        """Add an ask that is not in the line. One that was picked and is put back has its old place by its ticket;
        its slots have been given back by ``gave`` before."""

    def withdraw(self, ticket: int, *, aside: bool = False) -> None:
        """Remove an ask, whose client has left; ``aside``: which will be pushed again. No effect if it is not in the
        line."""

    def pick(self, free: int) -> Ask | None:
        """Remove and return the ask whose turn it is; its slots count as held from now on.

        None if nobody may be served, or if the one whose turn it is asked for more than ``free`` slots.
        """

    def took(self, run: str, kind: RunKind, slots: int = 1, caps: Caps = ()) -> None:
        """The run holds slots it did not get by an ask."""

    def gave(self, run: str, kind: RunKind, slots: int = 1, caps: Caps = ()) -> None:
        """The run returned slots, which count to the tokens of ``caps`` no longer. Raises ValueError if it does not
        hold as many."""

    def resetting(self, run: str, slots: int) -> None:
        """So many more slots that the run gave are being reset (negative: are clean, or gone)."""

    def position(self, ticket: int) -> int:
        """The ask's place among those that are served strictly in order of arrival: 1 is the next of them; 0 if it is
        not in the line. It never grows while the ask waits, unless an older one is put back."""

    @property
    def slots_wanted(self) -> int:
        """Number of slots that waiting asks would get now if there were enough."""

    def __len__(self) -> int:
        """Number of asks in the line."""

    def __iter__(self) -> Iterator[int]:
        """The tickets in the line, oldest first. The line must not change meanwhile."""


class FirstCome:
    """First come, first served, whoever asks. Implements :class:`QueuePolicy`; what runs hold makes no difference."""

    def __init__(self) -> None:
        # A sorted list: to move the rest of 10,000 entries costs a few µs, less than a tree of Python objects.
        self._asks: list[Ask] = []
        self._slots = 0

    def push(self, ask: Ask) -> None:
        """See QueuePolicy."""
        insort(self._asks, ask, key=_ticket)
        self._slots += ask.slots

    def withdraw(self, ticket: int, *, aside: bool = False) -> None:  # noqa: ARG002 - the port's
        """See QueuePolicy."""
        at = self._index(ticket)
        if at is not None:
            self._slots -= self._asks.pop(at).slots

    def pick(self, free: int) -> Ask | None:
        """See QueuePolicy."""
        if not self._asks or self._asks[0].slots > free:
            return None
        ask = self._asks.pop(0)
        self._slots -= ask.slots
        return ask

    def took(self, run: str, kind: RunKind, slots: int = 1, caps: Caps = ()) -> None:
        """See QueuePolicy."""

    def gave(self, run: str, kind: RunKind, slots: int = 1, caps: Caps = ()) -> None:
        """See QueuePolicy; never raises."""

    def resetting(self, run: str, slots: int) -> None:
        """See QueuePolicy."""

    def position(self, ticket: int) -> int:
        """See QueuePolicy."""
        at = self._index(ticket)
        return 0 if at is None else at + 1

    @property
    def head(self) -> Ask | None:
        """The ask whose turn it is; None if the line is empty."""
        return self._asks[0] if self._asks else None

    @property
    def slots_wanted(self) -> int:
        """See QueuePolicy."""
        return self._slots

    def copy(self) -> FirstCome:
        """Another line with the same asks."""
        copied = FirstCome()
        copied._asks, copied._slots = self._asks.copy(), self._slots
        return copied

    def older(self, ticket: int) -> int:
        """How many came before that ticket, whether it is in the line or not."""
        return bisect_left(self._asks, ticket, key=_ticket)

    def asks(self) -> Iterator[Ask]:
        """The asks in the line, oldest first. The line must not change meanwhile."""
        return iter(self._asks)

    def __len__(self) -> int:
        return len(self._asks)

    def __iter__(self) -> Iterator[int]:
        return map(_ticket, self._asks)

    def __repr__(self) -> str:
        return f"<FirstCome {len(self)} waiting for {self._slots} slots>"

    def _index(self, ticket: int) -> int | None:
        at = bisect_left(self._asks, ticket, key=_ticket)
        return at if at < len(self._asks) and self._asks[at].ticket == ticket else None
