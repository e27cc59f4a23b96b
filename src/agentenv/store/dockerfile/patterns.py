r"""Patterns of paths: wildcards of COPY and ADD, and ``.dockerignore``.

``match`` and ``glob`` follow Go's ``filepath.Match`` and fsutil's ``ResolveWildcards``; ``Ignore`` follows
moby/patternmatcher (``PatternMatcher.MatchesOrParentMatches`` and ``ignorefile.ReadAll``). An invalid pattern is
always an error here; Go notices some only if they come to be compared. A backslash takes the meaning of any character
that follows; patternmatcher leaves ``\a`` and the like to regular expressions.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Final

from agentenv.store.dockerfile.substitution import SPACES

_WILDCARDS: Final = "*?["


class PatternError(ValueError):
    """The pattern is not valid: a bracket does not end, say."""


def match(pattern: str, path: str) -> bool:
    """Whether the whole ``path`` matches, as Go's ``filepath.Match``: ``*`` and ``?`` match no ``/``, ``[a-z]`` and
    ``[^a-z]`` one character, a backslash takes the meaning of the next. Raises PatternError."""
    return re.fullmatch(_expression(pattern), path, re.DOTALL) is not None


def has_wildcards(name: str) -> bool:
    """Whether one of ``*``, ``?`` and ``[`` stands in it without a backslash."""
    return any(char in _WILDCARDS for char in re.sub(r"\\.", "", name, flags=re.DOTALL))


def _expression(pattern: str) -> str:
    out, at = "", 0
    while at < len(pattern):
        char = pattern[at]
        if char == "[":
            part, at = _brackets(pattern, at + 1)
            out += part
            continue
        at += 1
        if char == "\\":
            if at == len(pattern):
                raise PatternError(f"{pattern}: nothing follows the last backslash")
            out += re.escape(pattern[at])
            at += 1
        else:
            out += {"*": "[^/]*", "?": "[^/]"}.get(char) or re.escape(char)
    return out


def _brackets(pattern: str, at: int) -> tuple[str, int]:
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
    inside = "".join(f"{re.escape(low)}-{re.escape(high)}" for low, high in ranges if low <= high)
    if not inside:  # [b-a] is valid, and no character is in it
        return ("." if negated else "(?!)"), at + 1
    return f"[{'^' * negated}{inside}]", at + 1


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
"""Names in a directory, each with whether it is a directory itself; a link to one is none."""


def glob(pattern: str) -> Generator[str, Entries, list[str]]:
    """The paths that match ``pattern``, sorted: yields the directory it wants listed and is sent its entries.

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


@dataclass(frozen=True)
class _Rule:
    expression: re.Pattern[str]
    includes: bool

    def hits(self, path: str) -> bool:
        """Whether the path or one of its parents matches."""
        parts = path.split("/")
        return any(self.expression.fullmatch("/".join(parts[:count])) for count in range(len(parts), 0, -1))


@dataclass(frozen=True)
class Ignore:
    """What ``.dockerignore`` leaves out of the context; the last rule that hits a path decides."""

    rules: tuple[_Rule, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Ignore:
        """Raises PatternError."""
        return cls(tuple(_rule(line) for line in _ignore_lines(text)))

    def excludes(self, path: str) -> bool:
        """Whether the relative ``path`` is left out. A directory that is left out may still have something that
        is not (``!``), see ``has_exceptions``."""
        excluded = False
        for rule in self.rules:
            if rule.includes == excluded and rule.hits(path):
                excluded = not rule.includes
        return excluded

    @property
    def has_exceptions(self) -> bool:
        """Whether a directory that is left out has to be looked into."""
        return any(rule.includes for rule in self.rules)


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


def _rule(line: str) -> _Rule:
    pattern = _clean(line.strip(SPACES))
    includes = pattern.startswith("!")
    pattern = pattern[includes:]
    if not pattern:
        raise PatternError("a line of .dockerignore has nothing behind its !")
    return _Rule(re.compile(_ignore_expression(pattern), re.DOTALL), includes)


def _ignore_expression(pattern: str) -> str:
    """Patternmatcher's ``compile``. So ``**.log`` is every name that ends in it, and ``**/a`` every ``a``."""
    if pattern.startswith("**") and pattern[2:3] != "/" and not set(pattern[2:]) & set("*?[]\\"):
        return ".*" + re.escape(pattern[2:])
    out, at = "", 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if pattern.startswith("**", at - 1):
            at += 1
            at += pattern.startswith("/", at)  # **/ is **
            out += ".*" if at == len(pattern) else "(.*/)?"
        elif char == "*":
            out += "[^/]*"
        elif char == "?":
            out += "[^/]"
        elif char == "[":
            part, at = _brackets(pattern, at)
            out += part
        elif char == "\\" and at < len(pattern):
            out += re.escape(pattern[at])
            at += 1
        else:
            out += re.escape(char)
    return out
