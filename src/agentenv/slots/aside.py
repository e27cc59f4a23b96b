"""Requests that have stepped aside: they wait for their image, and others go on. Pure.

Whoever steps aside keeps the place of its ticket, and comes back to the line as soon as there may be a slot for it.
Of each image, run and kind only the oldest comes back: those behind it are served after it in any case.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence

from agentenv.wire.leases import RunKind

Key = tuple[bool, str, RunKind]
"""Whether it has been served a part of its group, the run and the kind."""


class Aside:
    """Tickets of requests that stepped aside, by image and by who is behind whom."""

    def __init__(self) -> None:
        self._by_image: dict[str, dict[Key, list[int]]] = {}
        self._places: dict[int, tuple[str, Key]] = {}
        self._slots: Counter[str] = Counter()
        self._of_run: Counter[str] = Counter()
        self._missing: dict[int, int] = {}

    def add(self, image: str, key: Key, ticket: int, slots: int) -> None:
        """A request steps aside, which waits for so many slots."""
        self._missing[ticket] = slots
        self._of_run[key[1]] += slots
        self._slots[image] += slots
        insort(self._by_image.setdefault(image, {}).setdefault(key, []), ticket)
        self._places[ticket] = (image, key)

    def remove(self, ticket: int) -> None:
        """It waits aside no longer. Raises KeyError if it does not."""
        image, key = self._places.pop(ticket)
        slots = self._missing.pop(ticket)
        self._slots[image] -= slots
        self._of_run[key[1]] -= slots
        if not self._of_run[key[1]]:
            del self._of_run[key[1]]
        keys = self._by_image[image]
        tickets = keys[key]
        del tickets[bisect_left(tickets, ticket)]
        if not tickets:
            del keys[key]
            if not keys:
                del self._by_image[image], self._slots[image]

    def behind(self, image: str, key: Key) -> bool:
        """Whether a newcomer would be behind somebody who is aside."""
        return key in self._by_image.get(image, ())

    def first(self, image: str) -> Sequence[int]:
        """The oldest of each run and kind that waits for an image; those that have a part of their group come first."""
        keys = self._by_image.get(image, {})
        return [keys[key][0] for key in sorted(keys, reverse=True)]

    def slots(self, image: str) -> int:
        """Slots that those who wait for an image miss."""
        return self._slots[image]

    def slots_of(self, run: str) -> int:
        """Slots that those of a run miss."""
        return self._of_run[run]

    def images(self) -> Sequence[str]:
        """Images that somebody waits for."""
        return list(self._by_image)

    def position(self, ticket: int) -> int:
        """How many are before it among those that it comes after in any case."""
        image, key = self._places[ticket]
        return bisect_left(self._by_image[image][key], ticket)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._places

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
