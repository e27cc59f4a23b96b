"""Patterns of characters, many at once, matched in one pass over a text: an automaton, its states the bits of a number.

A character costs a few operations on that number, whatever the patterns are, and one look-up where the same states had
the same character before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

_MOST_KEPT: Final = 1024
"""Sets of states whose successors are remembered."""


@dataclass(frozen=True)
class Token:
    """One character of ``ranges`` (``negated``: any other one); ``repeats``: any number of them. Or, ``directories``:
    nothing, or anything that ends in a slash."""

    ranges: tuple[tuple[str, str], ...] = ()
    negated: bool = False
    repeats: bool = False
    directories: bool = False

    @classmethod
    def of(cls, char: str) -> Self:
        """That character."""
        return cls(((char, char),))

    @property
    def literal(self) -> str:
        """Its character, if it means just one; empty: it does not."""
        if self.negated or self.repeats or len(self.ranges) != 1 or self.ranges[0][0] != self.ranges[0][1]:
            return ""
        return self.ranges[0][0]

    def takes(self, char: str) -> bool:
        """Whether it is one of its characters."""
        return self.negated != any(low <= char <= high for low, high in self.ranges)


@dataclass(eq=False)
class _States:
    """A set of states: bit ``n`` is before place ``n``. ``accepts``: those of them that end a pattern."""

    bits: int
    accepts: int
    after: dict[str, _States] = field(default_factory=dict)


class Automaton:
    """Finds which of some patterns match. A pattern's tokens have a place each (``directories`` two: before anything,
    and inside), and its end has one."""

    def __init__(self, patterns: Sequence[Sequence[Token]]) -> None:
        self._literals: dict[str, int] = {}
        """Places of one character each, which is left by that character."""
        self._classes: dict[Token, int] = {}
        """Places that are left, or stayed at (``repeats``), by characters of the token."""
        self._inside = 0
        """Places within directories: any character stays, a slash leaves as well."""
        self._skips = self._skips_two = 0
        """Places that may be left without a character, by one or by two."""
        self._ends: dict[int, int] = {}
        """The pattern that ends at a place."""
        self._begins = at = 0
        for number, tokens in enumerate(patterns):
            self._begins |= 1 << at
            previous: Token | None = None
            for token in tokens:
                if token != previous or not (token.repeats or token.directories):
                    at = self._lay(token, at)
                previous = token
            self._ends[at] = number
            at += 1
        self._accepting = sum(1 << end for end in self._ends)
        self._begins = self._spread(self._begins)
        self._moves: dict[str, tuple[int, int]] = {}
        self._known: dict[int, _States] = {}

    def accepted(self, text: str) -> bool:
        """Whether a pattern matches the whole text."""
        states = self._begin()
        for char in text:
            states = states.after.get(char) or self._after(states, char)
        return bool(states.accepts)

    def last_accepting(self, path: str) -> int | None:
        """The last pattern that matches the path or one of its parents."""
        states, found = self._begin(), 0
        for char in path:
            if char == "/":
                found |= states.accepts
            states = states.after.get(char) or self._after(states, char)
        found |= states.accepts
        return self._ends[found.bit_length() - 1] if found else None

    def ends(self, text: str, begin: int = 0) -> Iterator[int]:
        """Where the matches end that begin at a place, the shortest first."""
        states = self._begin()
        for at in range(begin, len(text) + 1):
            if states.accepts:
                yield at
            if at == len(text) or not states.bits:
                return
            states = states.after.get(text[at]) or self._after(states, text[at])

    def end(self, text: str, begin: int = 0, *, longest: bool) -> int | None:
        """Where the shortest or the longest match ends that begins at a place."""
        ends = self.ends(text, begin)
        return max(ends, default=None) if longest else next(ends, None)

    def _begin(self) -> _States:
        return self._states(self._begins)

    def _lay(self, token: Token, at: int) -> int:
        """Give a token its places; the next one."""
        place = 1 << at
        if token.directories:
            self._skips |= place
            self._skips_two |= place
            self._inside |= place << 1
            return at + 2
        if token.repeats:
            self._skips |= place
        if char := token.literal:
            self._literals[char] = self._literals.get(char, 0) | place
        else:
            self._classes[token] = self._classes.get(token, 0) | place
        return at + 1

    def _states(self, bits: int) -> _States:
        known = self._known
        if bits not in known and len(known) >= _MOST_KEPT:
            known = self._known = {}
        return known.setdefault(bits, _States(bits, bits & self._accepting))

    def _after(self, states: _States, char: str) -> _States:
        leave, stay = self._moves_of(char)
        found = states.after[char] = self._states(self._spread((states.bits & leave) << 1 | states.bits & stay))
        return found

    def _moves_of(self, char: str) -> tuple[int, int]:
        """The places that a character leaves, and those at which it stays."""
        moves = self._moves.get(char)
        if moves is None:
            leave, stay = self._literals.get(char, 0) | (self._inside if char == "/" else 0), self._inside
            for token, places in self._classes.items():
                if token.takes(char):
                    leave, stay = (leave, stay | places) if token.repeats else (leave | places, stay)
            if len(self._moves) >= _MOST_KEPT:
                self._moves = {}
            moves = self._moves[char] = leave, stay
        return moves

    def _spread(self, bits: int) -> int:
        """With the places that are reached without a character. Few rounds: repetitions in a row are one."""
        while (more := bits | (bits & self._skips) << 1 | (bits & self._skips_two) << 2) != bits:
            bits = more
        return bits
