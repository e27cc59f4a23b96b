"""What earlier requests were read as. Each has the whole history of its conversation, which is read once. Pure."""

from __future__ import annotations

import hashlib
import marshal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agentenv.agent.protocols import Message

MOST_KEPT: Final = 16
"""Conversations whose last requests are kept; of others the whole history is read again."""


@dataclass(frozen=True)
class Read:
    """What the elements of a request were read as: ``messages`` in their final form, the ids of the calls in them, and
    what was left out or overruled. ``keys`` name what was read; equal keys are equal JSON."""

    keys: list[bytes] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    call_ids: frozenset[str] = frozenset()
    dropped: Counter[str] = field(default_factory=Counter)
    overruled: tuple[str, ...] = ()


class Histories:
    """Of one program, in one dialect."""

    def __init__(self) -> None:
        self._kept: list[Read] = []

    def longest(self, keys: list[bytes]) -> Read:
        """The longest beginning that was read before; empty if there is none."""
        known = [one for one in self._kept if len(one.keys) <= len(keys) and keys[: len(one.keys)] == one.keys]
        return max(known, key=lambda one: len(one.keys), default=Read())

    def keep(self, read: Read, instead: Read) -> None:
        """Remember this one, in the place of the beginning that it has."""
        others = [one for one in self._kept if one is not instead]
        self._kept = [*others[1 - MOST_KEPT :], read]


def keys_of(opening: Any, elements: Sequence[Any]) -> list[bytes]:
    """Keys of a request's parts. Not of their JSON text, which takes five times as long to write; marshal's second
    version writes equal values alike, and tells 1, 1.0 and true apart. Raises: ValueError for values that nest more
    than 2,000 levels deep."""
    return [hashlib.blake2b(marshal.dumps(one, 2), digest_size=16).digest() for one in (opening, *elements)]
