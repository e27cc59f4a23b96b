"""Translates the search tool's patterns, as models write them, to the POSIX extended expressions of slotfiles.
Pure.

Accepted is the common subset of ripgrep's default engine and most others: literals, ``.``, classes, ``\\d \\w \\s``
and their complements, ``\\b \\B``, anchors, groups, alternation, greedy and lazy repetition (which does not affect
whether a line matches), ``(?i)`` at the start. Features that need another engine are refused with the reason:
look-around, back-references, and anything that spans lines.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass

from agentenv.errors import InvalidArgumentsError, ProtocolError
from agentenv.sandbox.server.tools.artifacts import readable_name
from agentenv.sandbox.server.tools.file_records import RecordReader
from agentenv.sandbox.slot_paths import USUAL_PATHS, SlotPaths
from agentenv.wire.tools import SearchArguments, SearchMatch, SearchReply

_IN_CLASS = {"d": "0-9", "w": "[:alnum:]_", "s": "[:space:]"}
_OUTSIDE = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[[:alnum:]_]",
    "W": "[^[:alnum:]_]",
    "s": "[[:space:]]",
    "S": "[^[:space:]]",
}
_AS_THEY_ARE = {"b": r"\b", "B": r"\B", "A": "^", "Z": "$", "z": "$"}
_CONTROL = {"t": "\t", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}
_SPECIAL = frozenset(r".[]{}()\*+?|^$")
_MAX_REPEAT = 1000
_MAX_SPELT_OUT = 512
"""Maximum number of characters of all ranges beyond ASCII together."""
_REPEAT = re.compile(r"\{(\d*)(?:(,)(\d*))?\}")
_FLAGS = re.compile(r"\A\(\?([a-zA-Z]+)\)")
_CLASS_NAME = re.compile(r"\[:(\^?)(\w+):\]")
_CLASSES = {"alnum", "alpha", "blank", "cntrl", "digit", "graph", "lower", "print", "punct", "space", "upper", "xdigit"}
_MIN_NEEDLE = 3


@dataclass(frozen=True)
class Translated:
    """``flags`` and ``needle`` are arguments for slotfiles."""

    pattern: str
    flags: str
    needle: str = ""


def translated(asked: SearchArguments) -> Translated:
    """Translate a pattern. Raises InvalidArgumentsError when it is invalid or uses an unsupported feature."""
    if "\n" in asked.pattern or "\0" in asked.pattern:
        raise _wrong("it contains a line break or NUL byte, but lines are matched one at a time")
    if asked.literal and not asked.ignore_case:
        return Translated(asked.pattern, "F")
    if asked.literal:
        return Translated("".join(map(_quoted, asked.pattern)), "i")
    # First of all: this rejects wide ranges, for which Python's compiler would block the server's loop;
    # for the same reason every range is checked when case is ignored.
    made = _Translator(asked.pattern, asked.ignore_case).translated()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(_FLAGS.sub("", asked.pattern, count=1))
    except (re.error, OverflowError, RecursionError) as error:
        # Patterns that only Python finds invalid are tried all the same.
        if not re.search(r"\\[zx]|\[:|\(\?<[A-Za-z]", asked.pattern):
            raise _wrong(str(error)) from error
    return made


class _Translator:
    def __init__(self, pattern: str, ignore_case: bool) -> None:
        self._text = pattern
        self._at = 0
        self._ignore_case = ignore_case
        self._out: list[str] = []
        self._depth = 0
        self._alternatives = False
        self._spelt_out = 0
        self._runs = [""]
        """Literal text that every match contains, run by run; the last one is being collected."""

    def translated(self) -> Translated:
        if flags := _FLAGS.match(self._text):
            self._flags(flags[1])
            self._at = flags.end()
        while self._at < len(self._text):
            self._one()
        if self._depth:
            raise _wrong("unclosed '('")
        needle = "" if self._alternatives or self._ignore_case else max(self._runs, key=len)
        kept = needle if len(needle) >= _MIN_NEEDLE else ""
        return Translated("".join(self._out), "i" if self._ignore_case else "-", kept)

    def _flags(self, letters: str) -> None:
        if unknown := set(letters) - set("imsuU"):
            raise _wrong(f"the flag {min(unknown)!r} is not supported; only (?i) is")
        self._ignore_case = self._ignore_case or "i" in letters

    def _one(self) -> None:
        character = self._text[self._at]
        self._at += 1
        match character:
            case "\\":
                self._escape()
            case "[":
                self._emit(self._class())
            case "(":
                self._open()
            case ")":
                self._close()
            case "|":
                self._alternatives = self._alternatives or self._depth == 0
                self._emit("|")
            case "*" | "+" | "?":
                self._repeat(character)
            case "{":
                self._braces()
            case "." | "^" | "$":
                self._emit(character)
            case _:
                self._literal(character)

    def _literal(self, character: str) -> None:
        self._out.append(_quoted(character))
        if self._depth == 0:
            self._runs[-1] += character

    def _emit(self, piece: str) -> None:
        self._out.append(piece)
        if self._runs[-1]:
            self._runs.append("")

    def _escape(self) -> None:
        if self._at >= len(self._text):
            raise _wrong("it ends with a backslash")
        letter = self._text[self._at]
        self._at += 1
        if letter in _OUTSIDE:
            self._emit(_OUTSIDE[letter])
        elif letter in _AS_THEY_ARE:
            self._emit(_AS_THEY_ARE[letter])
        elif letter in "xuU":
            self._literal(self._code(letter))
        elif letter in _CONTROL:
            self._literal(_CONTROL[letter])
        elif letter in "nr":
            raise _wrong(f"\\{letter} cannot match: lines are matched one at a time, without their end")
        elif letter.isdigit() or letter == "k":
            raise _wrong("back-references are not supported")
        elif letter.isascii() and letter.isalpha():
            raise _wrong(f"\\{letter} is not supported")
        else:
            self._literal(letter)

    def _code(self, letter: str) -> str:
        digits = {"x": 2, "u": 4, "U": 8}[letter]
        code = rf"\{{([0-9a-fA-F]{{1,6}})\}}|([0-9a-fA-F]{{{digits}}})"
        found = re.compile(code).match(self._text, self._at)
        number = int(found[1] or found[2], 16) if found else 0
        if not found or number > 0x10FFFF or number in (0, 10) or 0xD800 <= number < 0xE000:
            raise _wrong(f"\\{letter} is not a character that a line can contain")
        self._at = found.end()
        return chr(number)

    def _open(self) -> None:
        self._depth += 1
        if not self._text.startswith("?", self._at):
            self._emit("(")
            return
        if not (named := re.compile(r"\?(?::|P?<[A-Za-z_]\w*>)").match(self._text, self._at)):
            what = self._text[self._at : self._at + 3]
            hint = (
                "look-around is not supported" if re.match(r"\?<?[=!]", what) else "only (?:...) and (?i) are supported"
            )
            raise _wrong(f"({what}: {hint}")
        self._at = named.end()
        self._emit("(")

    def _close(self) -> None:
        self._depth -= 1
        if self._depth < 0:
            raise _wrong("unmatched ')'")
        self._emit(")")

    def _repeat(self, sign: str) -> None:
        if not self._out or self._out[-1] in ("(", "|", "^"):
            raise _wrong(f"nothing to repeat before {sign!r}")
        self._optional()
        self._out.append(sign)
        if self._text.startswith(("?", "+"), self._at):  # lazy and possessive: the same lines match, nearly always
            if self._text[self._at] == "+":
                raise _wrong("possessive repetition is not supported")
            self._at += 1

    def _braces(self) -> None:
        found = _REPEAT.match(self._text, self._at - 1)
        if not found or not (found[1] or found[3]):
            self._literal("{")
            return
        low, high = int(found[1] or 0), int(found[3]) if found[3] else None
        if max(low, high or 0) > _MAX_REPEAT:
            raise _wrong(f"more than {_MAX_REPEAT} repetitions")
        self._at = found.end()
        if not self._out or self._out[-1] in ("(", "|", "^"):
            raise _wrong("nothing to repeat before '{'")
        self._optional()
        self._out.append(f"{{{low}{found[2] or ''}{'' if high is None else high}}}")
        if self._text.startswith("?", self._at):
            self._at += 1

    def _optional(self) -> None:
        """The last item may be missing, or repeated: it cannot be part of a needle."""
        if self._depth == 0 and self._runs[-1]:
            self._runs[-1] = self._runs[-1][:-1]
            self._runs.append("")

    # -- classes -----------------------------------------------------------------------------------

    def _class(self) -> str:
        """A bracket expression; POSIX takes backslashes in it literally, so its members are parsed here."""
        negated = self._text.startswith("^", self._at)
        self._at += negated
        members: list[str] = []
        named = ""
        first = True
        while True:
            if self._at >= len(self._text):
                raise _wrong("unclosed '['")
            if self._text[self._at] == "]" and not first:
                self._at += 1
                break
            first = False
            if posix := _CLASS_NAME.match(self._text, self._at):
                named += self._named(posix)
                continue
            if self._text[self._at] == "\\" and self._text[self._at + 1 : self._at + 2] in _IN_CLASS:
                named += _IN_CLASS[self._text[self._at + 1]]
                self._at += 2
                continue
            members.append(self._range(self._member()))
        return _bracket(members, named, negated)

    def _named(self, found: re.Match[str]) -> str:
        if found[1] or found[2] not in _CLASSES:
            raise _wrong(f"{found[0]} is not a character class")
        self._at = found.end()
        return f"[:{found[2]}:]"

    def _member(self) -> str:
        character = self._text[self._at]
        self._at += 1
        if character != "\\":
            return character
        if self._at >= len(self._text):
            raise _wrong("unclosed '['")
        letter = self._text[self._at]
        self._at += 1
        if letter in "xuU":
            return self._code(letter)
        if letter in "nr":
            return "\x01"  # no line contains its own end; a class must not be empty
        if letter in _CONTROL:
            return _CONTROL[letter]
        if letter.isascii() and letter.isalnum():
            raise _wrong(f"\\{letter} inside [...] is not supported")
        return letter

    def _range(self, start: str) -> str:
        text = self._text
        follows = text[self._at + 1 : self._at + 3]
        if not text.startswith("-", self._at) or follows[:1] in ("]", "") or follows in (r"\d", r"\w", r"\s"):
            return start
        self._at += 1
        end = self._member()
        if end < start:
            raise _wrong(f"the range {start}-{end} is reversed")
        if end.isascii():
            return f"{start}-{end}"
        self._spelt_out += ord(end) - ord(start) + 1
        if self._spelt_out > _MAX_SPELT_OUT:  # the C library does not define an order of such characters
            raise _wrong(f"the range {start}-{end} is too wide; ranges beyond ASCII may span {_MAX_SPELT_OUT} in all")
        return "".join(map(chr, range(ord(start), ord(end) + 1)))


def _bracket(members: list[str], named: str, negated: bool) -> str:
    """In POSIX, ``]``, ``^`` and ``-`` are literal only at certain places."""
    ranges = "".join(dict.fromkeys(member for member in members if member[1:2] == "-"))
    singles = dict.fromkeys("".join(member for member in members if member[1:2] != "-"))
    plain = "".join(one for one in singles if one not in "]^-[")
    close, caret, dash, bracket = ("]" in singles, "^" in singles, "-" in singles, "[" in singles)
    body = ("]" if close else "") + ranges + plain + named + ("[" if bracket else "")
    if caret and not body and not negated:
        return "[-^]" if dash else r"\^"
    return f"[{'^' if negated else ''}{body}{'^' if caret else ''}{'-' if dash else ''}]"


def _quoted(character: str) -> str:
    return "\\" + character if character in _SPECIAL else character


def _wrong(why: str) -> InvalidArgumentsError:
    return InvalidArgumentsError(
        f"search: invalid pattern: {why}", next_step="correct it, or set literal to search for plain text"
    )


# -- what slotfiles printed ----------------------------------------------------------------------------


def found(printed: bytes, asked: SearchArguments, paths: SlotPaths = USUAL_PATHS) -> SearchReply:
    """The reply. Raises ProtocolError when the slot printed anything else than it must."""
    reader = RecordReader(printed)
    matches: list[SearchMatch] = []
    base = _base(paths.named(asked.path), paths.workspace)
    while (record := reader.record()).kind == "h":
        name = readable_name(record.path)
        path = "/".join(part for part in (base, name) if part)
        text = record.link.decode("utf-8", "replace")
        matches.append(SearchMatch(path=path, line=record.size_bytes, text=text, cut=record.truncated))
        if len(matches) > asked.limit:
            raise ProtocolError("slotfiles found more than requested")
    counts = reader.numbers(4)
    if record.kind != "e":
        raise ProtocolError("slotfiles printed something else than matches")
    searched, binary, large, unreadable = counts
    return SearchReply(
        matches=tuple(matches),
        truncated=record.truncated,
        files_searched=searched,
        binary_skipped=binary,
        large_skipped=large,
        unreadable_skipped=unreadable,
    )


def _base(path: str, workspace: str) -> str:
    """``path`` as it stands before what was found below it."""
    inside = path == workspace or path.startswith(workspace + "/")
    parts = [part for part in (path.removeprefix(workspace) if inside else path).split("/") if part not in ("", ".")]
    return "/".join(["", *parts] if path.startswith("/") and not inside else parts)
