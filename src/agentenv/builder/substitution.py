"""Variables, quotes and escapes in the words of a Dockerfile.

Follows BuildKit's ``frontend/dockerfile/shell/lex.go`` (``Lex``): ``$x``, ``${x}``, the modifiers ``:-``, ``-``,
``:+``, ``+``, ``:?``, ``?``, ``#``, ``##``, ``%``, ``%%``, ``/`` and ``//``, single and double quotes, and the file's
escape character. Not followed: ``$1`` in the replacement of ``${x//pattern/replacement}`` is literal text here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agentenv.builder.automaton import Automaton, Token

SPACES: Final = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""White space of Go's ``unicode.IsSpace``; Python's ``str.isspace`` has four control characters more."""

MAX_PUT_CHARS: Final = 64 * 1024
"""What variables may add to one text: each could be made of many of the one before."""
_SPECIAL_PARAMETERS: Final = "@*#?-$!0"
_HEREDOC_SPACES: Final = "\t\r "
_NO_NEWLINE: Final = Token((("\n", "\n"),), negated=True)
_STAR: Final = Token((("\n", "\n"),), negated=True, repeats=True)
_ANYTHING: Final = Token(negated=True, repeats=True)


class SubstitutionError(ValueError):
    """The word is not valid: a quote or a brace does not end, or a required variable (``${x:?}``) is not set."""


@dataclass(frozen=True)
class Lexer:
    """Rules for one kind of word; BuildKit's ``Lex`` has the same switches.

    ``keep_quotes`` and ``keep_escapes`` leave those characters in the result, ``keep_unset`` leaves a variable that
    is not set as it is written, ``plain_quotes`` gives quotes no meaning (content of heredocs).
    """

    escape: str = "\\"
    keep_quotes: bool = False
    keep_escapes: bool = False
    keep_unset: bool = False
    plain_quotes: bool = False

    def word(self, text: str, variables: Mapping[str, str]) -> str:
        """``text`` as one word. Raises SubstitutionError."""
        return _Reading(self, text, variables).read()[0]

    def words(self, text: str, variables: Mapping[str, str]) -> list[str]:
        """``text`` split at unquoted white space, after substitution. Raises SubstitutionError."""
        return _Reading(self, text, variables).read()[1]


class _Words:
    """Collects the words of one text."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._open: list[str] = []

    def add(self, text: str) -> None:
        """Text in which white space separates words."""
        for char in text:
            if char not in SPACES:
                self._open.append(char)
            else:
                self._end()

    def add_quoted(self, text: str) -> None:
        if text:
            self._open.append(text)

    def finish(self) -> list[str]:
        self._end()
        return self.done

    def _end(self) -> None:
        if self._open:
            self.done.append("".join(self._open))
            self._open = []


class _Reading:
    """One pass over one text; ``_at`` is the next character."""

    def __init__(self, lexer: Lexer, text: str, variables: Mapping[str, str]) -> None:
        self._lexer = lexer
        self._text = text
        self._variables = variables
        self._at = 0
        self._put = 0
        self._keep_escapes = lexer.keep_escapes

    def read(self) -> tuple[str, list[str]]:
        return self._until("", self._keep_escapes)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        char = self._peek()
        self._at += len(char)
        return char

    def _until(self, stop: str, keep_escapes: bool) -> tuple[str, list[str]]:
        """Read to ``stop`` and past it, or to the end of the text if ``stop`` is empty."""
        before, self._keep_escapes = self._keep_escapes, keep_escapes
        try:
            return self._read_until(stop)
        finally:
            self._keep_escapes = before

    def _read_until(self, stop: str) -> tuple[str, list[str]]:
        result, words = "", _Words()
        while char := self._peek():
            if char == stop:
                self._at += 1
                return result, words.finish()
            if char == "$":
                part = self._dollar()
                words.add(part)
            elif char == "<":
                part = self._angle()
                words.add_quoted(part)
            elif char in "'\"" and not self._lexer.plain_quotes:
                part = self._single_quoted() if char == "'" else self._double_quoted()
                words.add_quoted(part)
            else:
                part = self._plain(words)
            result += part
        if stop:
            raise SubstitutionError(f"the text ends before the matching {stop}")
        return result, words.finish()

    def _plain(self, words: _Words) -> str:
        char = self._next()
        if char != self._lexer.escape:
            words.add(char)
            return char
        part = (char if self._keep_escapes else "") + self._next()
        words.add_quoted(part)
        return part

    def _angle(self) -> str:
        """``<``, or ``<<`` with the white space behind it: the word of a heredoc may be set off."""
        self._at += 1
        if self._peek() != "<":
            return "<"
        start = self._at
        self._at += 1
        while self._peek() and self._peek() in _HEREDOC_SPACES:
            self._at += 1
        return "<" + self._text[start : self._at]

    def _single_quoted(self) -> str:
        end = self._text.find("'", self._at + 1)
        if end < 0:
            raise SubstitutionError("the text ends before the matching single quote")
        inside = self._text[self._at + 1 : end]
        self._at = end + 1
        return f"'{inside}'" if self._lexer.keep_quotes else inside

    def _double_quoted(self) -> str:
        quote = '"' if self._lexer.keep_quotes else ""
        self._at += 1
        result = quote
        while char := self._peek():
            if char == "$":
                result += self._dollar()
                continue
            self._at += 1
            if char == '"':
                return result + quote
            if char == self._lexer.escape:
                result += self._escaped_in_quotes(char)
            else:
                result += char
        raise SubstitutionError("the text ends before the matching double quote")

    def _escaped_in_quotes(self, escape: str) -> str:
        """Only a double quote, a dollar sign and the escape itself can be escaped within double quotes."""
        kept = escape if self._keep_escapes else ""
        if not self._peek():
            return kept
        return kept + (self._next() if self._peek() in ('"', "$", escape) else escape)

    def _dollar(self) -> str:
        self._at += 1
        value = self._variable()
        self._put += len(value)
        if self._put > MAX_PUT_CHARS:
            raise SubstitutionError(f"its variables have more than {MAX_PUT_CHARS} characters")
        return value

    def _variable(self) -> str:
        if self._peek() != "{":
            name = self._name()
            if not name:
                return "$"
            return self._value(name, f"${name}")
        self._at += 1
        if not self._peek():
            raise SubstitutionError("missing '}'")
        if self._peek() in "{}:":
            raise SubstitutionError("bad substitution")
        return self._braced(self._name())

    def _value(self, name: str, unset: str) -> str:
        if name in self._variables:
            return self._variables[name]
        return unset if self._lexer.keep_unset else ""

    def _name(self) -> str:
        """A variable's name, a run of digits, or one special parameter; empty if none follows."""
        start, char = self._at, self._peek()
        if char.isdecimal():
            while self._peek().isdecimal():
                self._at += 1
        elif char and char in _SPECIAL_PARAMETERS:
            self._at += 1
        else:
            while self._peek().isalpha() or self._peek().isdecimal() or self._peek() == "_":
                self._at += 1
        return self._text[start : self._at]

    def _braced(self, name: str) -> str:
        modifier = self._next()
        if modifier == "}":
            return self._value(name, f"${{{name}}}")
        if modifier == "/":
            return self._replacement(name)
        colon = modifier == ":"
        if colon:
            modifier = self._next()
        sign = ":" * colon + modifier
        if not modifier or modifier not in "+-?#%" or (colon and modifier in "#%"):
            raise SubstitutionError(f"the modifier {sign} is not supported")
        word = self._to_brace(modifier in "#%")
        if name not in self._variables and self._lexer.keep_unset:
            return f"${{{name}{sign}{word}}}"
        return self._modified(name, modifier, colon, word)

    def _to_brace(self, keep_escapes: bool) -> str:
        try:
            return self._until("}", keep_escapes)[0]
        except SubstitutionError as error:
            if self._peek():
                raise
            raise SubstitutionError("missing '}'") from error

    def _modified(self, name: str, modifier: str, empty_is_unset: bool, word: str) -> str:
        value = self._variables.get(name)
        if modifier in "#%":
            return _trimmed(modifier, word, value or "")
        missing = value is None or (empty_is_unset and not value)
        if modifier == "-":
            return word if missing else value or ""
        if modifier == "+":
            return "" if missing else word
        if missing:
            state = "unset" if value is None else "empty"
            raise SubstitutionError(f"{name}: {word or f'is not allowed to be {state}'}")
        return value or ""

    def _replacement(self, name: str) -> str:
        everywhere = self._peek() == "/"
        self._at += everywhere
        try:
            pattern = self._until("/", True)[0]
        except SubstitutionError as error:
            raise SubstitutionError("missing '/' in ${}") from error
        replacement = self._to_brace(True)
        if name not in self._variables and self._lexer.keep_unset:
            return f"${{{name}/{pattern}/{replacement}}}"
        return _replaced(pattern, self._variables.get(name, ""), replacement, everywhere)


def _trimmed(modifier: str, pattern: str, value: str) -> str:
    """``#`` and ``%`` take away the shortest match at the start and at the end, doubled the longest."""
    longest = pattern.startswith(modifier)
    tokens = _tokens(pattern[longest:])
    if modifier == "%":  # the shortest match at the end is the shortest at the start of everything reversed
        return _without_prefix(tokens[::-1], value[::-1], longest)[::-1]
    return _without_prefix(tokens, value, longest)


def _without_prefix(tokens: Sequence[Token], value: str, longest: bool) -> str:
    return value[Automaton([tokens]).end(value, longest=longest) or 0 :]


def _replaced(pattern: str, value: str, replacement: str, everywhere: bool) -> str:
    """With the first match replaced, or all of them; of those that begin at one place the longest counts, and an empty
    one does not follow another at once. As Go's ``ReplaceAllString``."""
    tokens = _tokens(pattern)
    forwards, backwards = Automaton([tokens]), Automaton([[_ANYTHING, *reversed(tokens)]])
    parts, copied, searched, ended, put = list[str](), 0, 0, -1, 0
    for begin in sorted(len(value) - place for place in backwards.ends(value[::-1])):
        if begin < searched:
            continue
        end = forwards.end(value, begin, longest=True) or begin
        searched = max(end, begin + 1)
        if begin == end == ended:
            continue
        put += len(replacement)
        if put > MAX_PUT_CHARS:
            raise SubstitutionError(f"its replacements have more than {MAX_PUT_CHARS} characters")
        parts += [value[copied:begin], replacement]
        copied = ended = end
        if not everywhere:
            break
    return "".join([*parts, value[copied:]])


def _tokens(pattern: str) -> list[Token]:
    """A shell pattern with ``*`` and ``?``, which match no newline; brackets are literal, as in BuildKit."""
    tokens, at = list[Token](), 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if char == "\\":
            char = pattern[at : at + 1]
            if char and char in "}/":  # escaped for ${} only
                continue
            if not char or char not in "*?\\":
                raise SubstitutionError(f"invalid escape \\{char} in the pattern {pattern}")
            at += 1
            tokens.append(Token.of(char))
        else:
            tokens.append(_STAR if char == "*" else _NO_NEWLINE if char == "?" else Token.of(char))
    return tokens
