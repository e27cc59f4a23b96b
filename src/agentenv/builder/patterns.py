r"""Patterns of paths: wildcards of COPY and ADD, and ``.dockerignore``.

``match`` and ``glob`` follow Go's ``filepath.Match`` and fsutil's ``ResolveWildcards``; ``Ignore`` follows
moby/patternmatcher (``PatternMatcher.MatchesOrParentMatches`` and ``ignorefile.ReadAll``). An invalid pattern is
always an error here; Go notices some only if they come to be compared. A backslash takes the meaning of any character
that follows; patternmatcher leaves ``\a`` and the like to regular expressions.

Patterns and paths are a stranger's, and Python's regular expressions backtrack and keep the interpreter's lock. So
patterns are matched by an automaton (``automaton``), in time linear in the path.
"""

from __future__ import annotations

import posixpath
from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import Final

from agentenv.builder.automaton import Automaton, Token
from agentenv.builder.substitution import SPACES

MAX_PATTERN_CHARS: Final = 4096
"""Of a wildcard: as long as a path can be."""
MAX_IGNORE_BYTES: Final = 64 * 1024
"""Of a file of rules."""
_WILDCARDS: Final = "*?["
_NOT_A_SLASH: Final = Token((("/", "/"),), negated=True)
_STAR: Final = Token((("/", "/"),), negated=True, repeats=True)
_ANYTHING: Final = Token(negated=True, repeats=True)
_DIRECTORIES: Final = Token(directories=True)
"""Nothing, or anything that ends in a slash."""


class PatternError(ValueError):
    """The pattern is not valid, such as one whose bracket does not end."""


def match(pattern: str, path: str) -> bool:
    """Whether the whole ``path`` matches, as Go's ``filepath.Match``: ``*`` and ``?`` match no ``/``, ``[a-z]`` and
    ``[^a-z]`` one character, a backslash takes the meaning of the next. Raises PatternError."""
    return bool(_wildcard(pattern).accepted(path))


def has_wildcards(name: str) -> bool:
    """Whether it has one of ``*``, ``?`` and ``[`` without a backslash."""
    at = 0
    while at < len(name) and name[at] not in _WILDCARDS:
        at += 2 if name[at] == "\\" else 1
    return at < len(name)


@lru_cache(maxsize=64)
def _wildcard(pattern: str) -> Automaton:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise PatternError(f"{pattern[:80]}…: it has more than {MAX_PATTERN_CHARS} characters")
    tokens: list[Token] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if char == "*":
            tokens.append(_STAR)
        elif char == "\\" and at == len(pattern):
            raise PatternError(f"{pattern}: nothing follows the last backslash")
        else:
            token, at = _one(pattern, at - 1)
            tokens.append(token)
    return Automaton([tokens])


def _one(pattern: str, at: int) -> tuple[Token, int]:
    """What matches one character at ``at``, and what follows it: ``?``, a bracket, or a character, perhaps escaped."""
    char = pattern[at]
    at += 1
    if char == "[":
        return _brackets(pattern, at)
    if char == "?":
        return _NOT_A_SLASH, at
    if char == "\\" and at < len(pattern):
        char = pattern[at]
        at += 1
    return Token.of(char), at


def _brackets(pattern: str, at: int) -> tuple[Token, int]:
    """The class of characters that starts at ``at``, and what follows it."""
    negated = pattern.startswith("^", at)
    at += negated
    ranges: list[tuple[str, str]] = []
    while not (ranges and pattern.startswith("]", at)):
        low, at = _bound(pattern, at)
        high = low
        if pattern.startswith("-", at):
            high, at = _bound(pattern, at + 1)
        ranges.append((low, high))
    return Token(tuple(ranges), negated=negated), at + 1


def _bound(pattern: str, at: int) -> tuple[str, int]:
    char = pattern[at : at + 1]
    if char in ("", "-", "]"):
        raise PatternError(f"{pattern}: the bracket does not end, or a bound of its range is missing")
    at += 1
    if char == "\\":
        char = pattern[at : at + 1]
        at += 1
    if not char or at >= len(pattern):
        raise PatternError(f"{pattern}: the bracket does not end")
    return char, at


Entries = Sequence[tuple[str, bool]]
"""Names in a directory, each with whether it is a directory itself; a link to one is not."""


def glob(pattern: str) -> Generator[str, Entries, list[str]]:
    """The paths that match ``pattern``, sorted: yields each directory to list and is sent its entries.

    Paths are relative with no leading slash; the root is the empty path. Without wildcards the pattern itself is the
    answer, whether it exists or not. The part before the first wildcard may lead through links, what follows not.
    """
    parts = [part for part in pattern.split("/") if part]
    fixed = next((number for number, part in enumerate(parts) if has_wildcards(part)), len(parts))
    found = ["/".join(parts[:fixed])]
    for number in range(fixed, len(parts)):
        last = number == len(parts) - 1
        deeper = []
        for directory in found:
            entries = yield directory
            deeper += [
                posixpath.join(directory, name)
                for name, is_directory in sorted(entries)
                if (last or is_directory) and match(parts[number], name)
            ]
        found = deeper
    return found


class Ignore:
    """What ``.dockerignore`` leaves out of the context; the last rule that hits a path decides."""

    def __init__(self, text: str = "") -> None:
        """Raises PatternError."""
        rules = [_rule(line) for line in _ignore_lines(text)]
        self._automaton = Automaton([tokens for tokens, _ in rules])
        self._includes = [includes for _, includes in rules]

    @property
    def has_rules(self) -> bool:
        """Whether anything may be left out."""
        return bool(self._includes)

    @property
    def has_exceptions(self) -> bool:
        """Whether a directory that is left out has to be looked into."""
        return any(self._includes)

    def excludes(self, path: str) -> bool:
        """Whether the relative ``path`` is left out: it or one of its parents is hit. A directory that is left out may
        still have something that is not (``!``), see ``has_exceptions``."""
        last = self._automaton.last_accepting(path)
        return last is not None and not self._includes[last]


def _ignore_lines(text: str) -> list[str]:
    lines = []
    for line in text.removeprefix("\ufeff").split("\n"):
        pattern = line.removesuffix("\r")
        if pattern.startswith("#") or not (pattern := pattern.strip(SPACES)):
            continue
        includes = pattern.startswith("!")
        pattern = pattern[includes:].strip(SPACES)
        if pattern:
            pattern = _clean(pattern)
            pattern = pattern[1:] if pattern.startswith("/") and len(pattern) > 1 else pattern
        lines.append("!" * includes + pattern)
    return lines


def _clean(path: str) -> str:
    """Go's ``filepath.Clean``: as ``normpath``, which alone keeps two leading slashes."""
    cleaned = posixpath.normpath(path)
    return cleaned[1:] if cleaned.startswith("//") else cleaned


def _rule(line: str) -> tuple[list[Token], bool]:
    """What a rule hits, and whether it includes that again."""
    pattern = _clean(line.strip(SPACES))
    includes = pattern.startswith("!")
    pattern = pattern[includes:]
    if not pattern:
        raise PatternError("a line of .dockerignore has nothing after its !")
    return _ignored(pattern), includes


def _ignored(pattern: str) -> list[Token]:
    """Patternmatcher's ``compile``. So ``**.log`` is every name that ends in it, and ``**/a`` every ``a``."""
    tokens: list[Token] = []
    at = 0
    if pattern.startswith("**") and pattern[2:3] != "/" and not set(pattern[2:]) & set("*?[]\\"):
        tokens, at = [_ANYTHING], 2
    while at < len(pattern):
        if pattern.startswith("**", at):
            at += 2
            at += pattern.startswith("/", at)  # **/ is **
            tokens.append(_ANYTHING if at == len(pattern) else _DIRECTORIES)
        elif pattern[at] == "*":
            tokens.append(_STAR)
            at += 1
        else:
            token, at = _one(pattern, at)
            tokens.append(token)
    return tokens
