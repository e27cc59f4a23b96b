"""Secrets by name, and a redactor that removes their values from texts."""

from __future__ import annotations

import base64
import bisect
import html
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from agentenv.errors import ConfigError

_X: Final = "[0-9a-fA-F]"
_ESCAPE: Final = re.compile(  # begins with a set of characters, which is quick to search for
    r"[%&\\](?:"
    rf"(?<=%)[0-7]{_X}|(?<=%)[89a-fA-F]{_X}(?:%[89a-fA-F]{_X})*"  # a character that is not ASCII is several bytes
    rf"|(?<=&)(?:\#[0-9]{{1,7}};?|\#[xX]{_X}{{1,6}};?|[a-zA-Z][a-zA-Z0-9]{{1,30}};)"
    rf"|(?<=\\)(?:u[dD][89abAB]{_X}{_X}\\u[dD][c-fC-F]{_X}{_X}|u{_X}{{4}}|x{_X}{_X}|[^ux\s])"
    r")"
)
_CONTROLS: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_SHORTEST: Final = 6
"""A shorter value would occur in many texts, and could be guessed from where it was removed."""
_ESCAPED_OVER: Final = 3
_URLSAFE: Final = str.maketrans("+/", "-_")


class Secrets:
    """Values by name; its repr shows names only.

    Raises:
        ConfigError: a value is empty or too short to be removed from texts reliably.
    """

    def __init__(self, values: Mapping[str, str]) -> None:
        for name, value in values.items():
            if len(value) < _SHORTEST:
                raise ConfigError(
                    f"secrets.{name}", f"has {len(value)} characters", next_step=f"use at least {_SHORTEST}"
                )
        self._values = dict(values)
        self.redactor = Redactor(self._values)

    def __repr__(self) -> str:
        return f"<Secrets {', '.join(self._values) or 'none'}>"

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def value(self, name: str) -> str:
        """Raises ConfigError when no secret of that name is declared."""
        if name not in self._values:
            known = ", ".join(self._values) or "none"
            raise ConfigError("secrets", f"unknown secret {name!r}", next_step=f"declare it; declared: {known}")
        return self._values[name]

    def chosen(self, names: Iterable[str]) -> dict[str, str]:
        """These secrets, by name."""
        return {name: self.value(name) for name in names}


def read_secret(name: str, path: Path) -> str:
    """A secret's value from its file, surrounding white space removed. Raises ConfigError when it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"secrets.{name}", f"{path} cannot be read: {error}") from error


class Redactor:
    """Replaces the values of secrets by ``[secret:name]``, also when they are escaped for a URL, JSON, HTML or
    source code (up to three times over, all or some of their characters), in base64 (alone or within something
    longer), in hexadecimal or backwards."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._names: dict[str, str] = {}
        for name, value in values.items():
            for form in _forms(value):
                self._names.setdefault(form, name)
        self._in_hex = [(_hex_pattern(value), name) for name, value in values.items()]
        longest_first = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def text(self, text: str) -> str:
        """``text`` without the value of any secret."""
        if self._pattern is None:
            return text
        spans = list(self._found(text))
        layers: list[Decoded] = []
        read = text
        while len(layers) < _ESCAPED_OVER and (layer := Decoded(read)):
            layers.insert(0, layer)
            read = layer.text
            for begin, end, name in self._found(read):
                for each in layers:
                    begin, end = each.span(begin, end)
                spans.append((begin, end, name))
        return _replaced(text, spans)

    def _found(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Spans of secrets, with their names."""
        assert self._pattern is not None
        for found in self._pattern.finditer(text):
            yield *found.span(), self._names[found.group()]
        for pattern, name in self._in_hex:
            for found in pattern.finditer(text):
                yield *found.span(), name

    def value(self, value: Any) -> Any:
        """A JSON value without the value of any secret, in keys as well."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            plain = str(value)
            return value if self.text(plain) == plain else self.text(plain)
        return value


def _replaced(text: str, spans: list[tuple[int, int, str]]) -> str:
    """Overlapping spans are merged, under the first one's name."""
    parts: list[str] = []
    at = 0
    for begin, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        if begin >= at:
            parts += (text[at:begin], f"[secret:{name}]")
        at = max(at, end)
    return "".join([*parts, text[at:]])


def _forms(value: str) -> set[str]:
    """Without forms that are escaped character by character: these are found by decoding the text."""
    return {value, value[::-1], value.replace(" ", "+"), *_in_base64(value.encode())}


def _hex_pattern(value: str) -> re.Pattern[str]:
    """Upper or lower case, with or without separators between the bytes."""
    digits = value.encode().hex("-").replace("-", r"[:\s-]?")
    return re.compile(re.sub("(?<![\\\\])[a-f]", lambda found: f"[{found[0]}{found[0].upper()}]", digits))


def _in_base64(raw: bytes) -> set[str]:
    """As a whole, and the characters that depend on this value alone when it is inside something longer."""
    whole = base64.b64encode(raw).decode()
    found = {whole, whole.rstrip("=")}
    for before in range(3):
        coded = base64.b64encode(bytes(before) + raw).decode().rstrip("=")
        own = coded[(0, 2, 3)[before] : len(coded) - (1 if (before + len(raw)) % 3 else 0)]
        found.add(own if len(own) >= _SHORTEST else coded)
    return found | {form.translate(_URLSAFE) for form in found}


class Decoded:
    """``text``: ``of`` with one layer of escapes decoded, with the positions of its parts in ``of``."""

    def __init__(self, of: str) -> None:
        parts: list[str] = []
        self._begins: list[int] = []  # in text, of a decoded escape
        self._escapes: list[tuple[int, int, int]] = []  # end of it in text; start and end of it in `of`
        at = length = 0
        for found in _ESCAPE.finditer(of):
            begin, end = found.span()
            meant = _meant(found.group())
            parts += (of[at:begin], meant)
            length += begin - at
            self._begins.append(length)
            length += len(meant)
            self._escapes.append((length, begin, end))
            at = end
        self.text = "".join([*parts, of[at:]])

    def __bool__(self) -> bool:
        """Whether there was an escape."""
        return bool(self._begins)

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """Start and end in ``of`` of this part of the text, which is not empty."""
        return self._place(begin)[0], self._place(end - 1)[1]

    def _place(self, at: int) -> tuple[int, int]:
        index = bisect.bisect_right(self._begins, at) - 1
        if index < 0:
            return at, at + 1
        ends, source, source_end = self._escapes[index]
        if at < ends:
            return source, source_end
        return source_end + at - ends, source_end + at - ends + 1


def _meant(escape: str) -> str:
    if escape[0] == "%":
        return bytes.fromhex(escape.replace("%", "")).decode("utf-8", "replace")
    if escape[0] == "&":
        return html.unescape(escape)
    kind = escape[1].lower()
    if kind == "u":
        units = b"".join(int(unit, 16).to_bytes(2, "big") for unit in re.findall("[0-9a-fA-F]{4}", escape))
        return units.decode("utf-16-be", "replace")
    return chr(int(escape[2:], 16)) if kind == "x" else _CONTROLS.get(escape[1], escape[1])
