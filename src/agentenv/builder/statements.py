"""The text of a Dockerfile as statements: comments, continuation lines, heredocs, flags and the form of arguments.

Follows BuildKit's ``frontend/dockerfile/parser`` (``parser.go``, ``line_parsers.go``, ``split_command.go``,
``directives.go``), which knows nothing yet of what an instruction means. buildah's parser (openshift/imagebuilder,
``dockerfile/parser``) is an older copy of the same; it differs in heredocs, which it takes from BuildKit.
Not followed: BuildKit's limit of 65,535 bytes a line, and that it garbles flags with characters outside ASCII.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from agentenv.builder.substitution import SPACES, Lexer, SubstitutionError

_BLANK: Final = re.compile(r"[\t\v\f\r ]+")
_HEREDOC: Final = re.compile(r"(\d*)<<(-?)[\t\n\f\r ]*+([^<]*)\Z", re.ASCII)
_DIRECTIVE: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9]*)[\t\n\f\r ]*+=[\t\n\f\r ]*(.+)\Z")
_DIRECTIVES: Final = frozenset({"syntax", "escape", "check"})
_WITH_HEREDOCS: Final = frozenset({"ADD", "COPY", "RUN"})

_JSON_OR_TEXT: Final = frozenset({"CMD", "ENTRYPOINT", "RUN", "SHELL"})
_JSON_OR_LIST: Final = frozenset({"ADD", "COPY", "VOLUME"})
_PAIRS: Final = frozenset({"ENV", "LABEL"})
_LISTS: Final = frozenset({"EXPOSE", "FROM"})


class StatementError(ValueError):
    """The text is not a Dockerfile; ``line`` is where the statement starts, ``keyword`` its first word if known."""

    def __init__(self, line: int, message: str, keyword: str = "") -> None:
        super().__init__(message)
        self.line = line
        self.keyword = keyword


@dataclass(frozen=True)
class Heredoc:
    """A file written in the Dockerfile itself. ``expand``: variables in it are substituted by COPY and ADD."""

    name: str
    content: str
    expand: bool = True
    chomp: bool = False

    @property
    def text(self) -> str:
        """The content, without leading tabs for ``<<-``."""
        return re.sub(r"(?m)^\t+", "", self.content) if self.chomp else self.content


@dataclass(frozen=True)
class Statement:
    """One instruction, not yet understood. ``keyword`` is in capitals; ``line`` counts from 1.

    ``arguments`` has the pairs of ENV and LABEL as name, value, name, value, …; ``exec_form`` is true if they were
    written as a JSON array. ``text`` is the whole instruction in one line, without its heredocs.
    """

    line: int
    keyword: str
    flags: tuple[str, ...]
    arguments: tuple[str, ...]
    exec_form: bool
    text: str
    heredocs: tuple[Heredoc, ...] = ()


@dataclass
class Statements:
    """The statements of a Dockerfile in order, and the escape character that it chose."""

    found: list[Statement] = field(default_factory=list)
    escape: str = "\\"


def read(text: str) -> Statements:
    """The statements of ``text``. Raises StatementError."""
    reader = _Reader(text)
    result = Statements(list(reader.statements()), reader.escape)
    if not result.found:
        raise StatementError(reader.line, "there is no instruction")
    return result


def heredoc_of(word: str) -> Heredoc | None:
    """What ``<<EOF``, ``<<-EOF`` or ``<<"EOF"`` announces (without content); None if the word is something else."""
    match = _HEREDOC.match(word)
    if match is None or not match[3]:
        return None
    words = Lexer(keep_unset=True).words(match[3], {})
    if len(words) != 1:
        return None
    raw = Lexer(keep_unset=True, keep_quotes=True).words(match[3], {})
    quoted = sum(map("".join(raw).count, "'\"")) != sum(map(words[0].count, "'\""))
    return Heredoc(words[0], "", expand=not quoted, chomp=match[2] == "-")


class _Reader:
    """Goes over the lines once; ``line`` is how many were read."""

    def __init__(self, text: str) -> None:
        self._lines = iter(_lines(text))
        self.line = 0
        self.escape = "\\"
        self._directives: set[str] | None = set()

    def statements(self) -> Iterator[Statement]:
        while (line := self._read()) is not None:
            line = line.rstrip("\r\n").lstrip(SPACES)
            if self._is_directive(line) or line.startswith("#"):
                continue
            start = self.line
            line, more = self._without_continuation(line)
            if not more and not line:
                continue
            yield self._statement(start, self._continued(line) if more else line)

    def _read(self) -> str | None:
        line = next(self._lines, None)
        self.line += line is not None
        return line

    def _continued(self, line: str) -> str:
        """The rest of a statement whose first line continues. Comments and empty lines within it are dropped."""
        more = True
        while more and (following := self._read()) is not None:
            following = following.rstrip("\r\n")
            stripped = following.lstrip(SPACES)
            if not stripped or stripped.startswith("#"):
                continue
            following, more = self._without_continuation(following)
            line += following
        return line

    def _without_continuation(self, line: str) -> tuple[str, bool]:
        """The line without the escape character that ends it, and whether there was one. An escape before the
        last one takes its meaning away."""
        stripped = line.rstrip("\t ")
        if stripped.endswith(self.escape) and not stripped.endswith(self.escape * 2):
            return stripped[:-1], True
        return line, False

    def _is_directive(self, line: str) -> bool:
        """``# escape=…`` and the like come before everything else, each once. ``syntax`` and ``check`` are read over:
        there is one syntax here."""
        if self._directives is None:
            return False
        match = _DIRECTIVE.match(line[1:].lstrip(SPACES)) if line.startswith("#") else None
        name = match[1].lower() if match else ""
        if match is None or name not in _DIRECTIVES:
            self._directives = None
            return False
        if name in self._directives:
            raise StatementError(self.line, f"the directive {name} is given twice")
        self._directives.add(name)
        if name == "escape":
            self.escape = match[2].rstrip("\t\n\f\r ")
            if self.escape not in ("\\", "`"):
                raise StatementError(self.line, f"the escape character is \\ or `, not {self.escape}")
        return True

    def _statement(self, start: int, text: str) -> Statement:
        words = _BLANK.split(text.strip(SPACES), maxsplit=1)
        keyword = words[0].upper()
        flags, rest = _flags(words[1], self.escape) if len(words) == 2 else ([], "")
        rest, text = rest.strip(SPACES), text.strip(SPACES)
        try:
            arguments, exec_form = _arguments(keyword, rest, self.escape)
            announced = _announced(text) if _may_have_heredocs(keyword, rest, exec_form, self.escape) else []
        except ValueError as error:
            raise StatementError(start, str(error), keyword) from error
        heredocs = tuple([self._heredoc(start, keyword, heredoc) for heredoc in announced])
        return Statement(start, keyword, tuple(flags), tuple(arguments), exec_form, text, heredocs)

    def _heredoc(self, start: int, keyword: str, announced: Heredoc) -> Heredoc:
        content: list[str] = []
        while (line := self._read()) is not None:
            end = line.rstrip("\r\n")
            if (end.lstrip("\t") if announced.chomp else end) == announced.name:
                return Heredoc(announced.name, "".join(content), announced.expand, announced.chomp)
            content.append(line)
        raise StatementError(start, f"the heredoc {announced.name} does not end", keyword)


def _lines(text: str) -> list[str]:
    """Lines with their ends; only a newline ends one."""
    parts = text.removeprefix("\ufeff").split("\n")
    return [part + "\n" for part in parts[:-1]] + [part for part in parts[-1:] if part]


def _may_have_heredocs(keyword: str, rest: str, exec_form: bool, escape: str) -> bool:
    if keyword == "ONBUILD" and rest:
        keyword, *after = _BLANK.split(rest, maxsplit=1)
        keyword = keyword.upper()
        rest = _flags(after[0], escape)[1].strip(SPACES) if after else ""
        exec_form = _arguments(keyword, rest, escape)[1]
    return keyword in _WITH_HEREDOCS and not exec_form and "<<" in rest


def _announced(text: str) -> list[Heredoc]:
    lexer = Lexer(keep_quotes=True, keep_escapes=True, keep_unset=True)
    try:
        words = lexer.words(text, {})
    except SubstitutionError:  # quotes that only the shell can judge
        return []
    return [heredoc for heredoc in map(heredoc_of, words) if heredoc is not None]


def _flags(text: str, escape: str) -> tuple[list[str], str]:
    """The leading words that start with ``--``, unquoted, and the rest. ``--`` alone ends them."""
    flags: list[str] = []
    at = 0
    while True:
        while at < len(text) and text[at] in SPACES:
            at += 1
        if not text.startswith("--", at):
            return flags, text[at:]
        word, at = _flag(text, at, escape)
        if word == "--":
            return flags, text[at:]
        flags.append(word)


def _flag(text: str, at: int, escape: str) -> tuple[str, int]:
    """The word at ``at`` without its quotes, and where it ends."""
    word, quote = "", ""
    while at < len(text):
        char = text[at]
        if not quote and char in SPACES:
            break
        at += 1
        if not quote and char in "'\"":
            quote = char
        elif char == quote:
            quote = ""
        elif char != escape:
            word += char
        elif at < len(text):
            word += text[at]
            at += 1
    return word, at


def _arguments(keyword: str, rest: str, escape: str) -> tuple[list[str], bool]:
    if keyword in _JSON_OR_TEXT | _JSON_OR_LIST:
        listed = _json(rest)
        if listed is not None:
            return listed, True
    if not rest:
        return [], False
    if keyword in _JSON_OR_LIST | _LISTS:
        return _BLANK.split(rest), False
    if keyword in _PAIRS:
        return _pairs(rest, escape), False
    if keyword == "ARG":
        return _quoted_words(rest, escape), False
    return [rest], False


def _json(rest: str) -> list[str] | None:
    """The strings of a JSON array; None if the text is not one, and is for the shell. ``[1]`` is wrong."""
    if not rest.startswith("["):
        return None
    try:
        listed = json.loads(rest, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return None
    if not all(isinstance(item, str) for item in listed):
        raise ValueError("a JSON array of arguments holds strings only")
    return [item.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for item in listed]


def _no_json(constant: str) -> None:
    raise ValueError(constant)  # NaN and Infinity, which Python alone reads


def _pairs(rest: str, escape: str) -> list[str]:
    """``name=value …``, or ``name value`` with one value to the end of the line."""
    words = _quoted_words(rest, escape)
    if not words:
        return []
    if "=" not in words[0]:
        name, *value = _BLANK.split(rest, maxsplit=1)
        if not value:
            raise ValueError(f"{name} has no value")
        return [name, value[0]]
    for word in words:
        if "=" not in word:
            raise ValueError(f"{word} is not of the form name=value")
    return [part for word in words for part in word.split("=", 1)]


def _quoted_words(text: str, escape: str) -> list[str]:
    """Words at unquoted white space; quotes and escapes stay in them, substitution takes them away later."""
    words: list[str] = []
    word, quote, at = "", "", 0
    while at < len(text):
        char = text[at]
        at += 1
        if not quote and char in SPACES:
            words += [word] if word else []
            word = ""
            continue
        if char == escape and quote != "'":
            if at == len(text):
                break  # an escape at the very end is dropped
            word += char + text[at]
            at += 1
            continue
        if char in "'\"":
            quote = char if not quote else "" if char == quote else quote
        word += char
    return [*words, word] if word else words
