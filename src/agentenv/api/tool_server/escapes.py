"""Texts with the escapes of URLs, JSON, HTML and source code decoded."""

from __future__ import annotations

import bisect
import html
import re
from typing import Final

_X: Final = "[0-9a-fA-F]"
_ESCAPE: Final = re.compile(  # begins with a set of characters, which is quick to search for
    r"[%&\\](?:"
    rf"(?<=%)[0-7]{_X}|(?<=%)[89a-fA-F]{_X}(?:%[89a-fA-F]{_X})*"  # a character that is not ASCII is several bytes
    rf"|(?<=&)(?:\#[0-9]{{1,7}};?|\#[xX]{_X}{{1,6}};?|[a-zA-Z][a-zA-Z0-9]{{1,30}};)"
    rf"|(?<=\\)(?:u[dD][89abAB]{_X}{_X}\\u[dD][c-fC-F]{_X}{_X}|u{_X}{{4}}|x{_X}{_X}|[^ux\s])"
    r")"
)
_CONTROLS: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


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
