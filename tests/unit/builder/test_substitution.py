"""Words of a Dockerfile; the expected results are those of BuildKit's lexer."""

from __future__ import annotations

import pytest

from agentenv.builder.substitution import Lexer, SubstitutionError

VARIABLES = {"x": "value", "empty": "", "path": "a/b/c.tar.gz", "é": "letter"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$x ${x}", "value value"),
        ("$unset-${unset}.", "-."),
        ("$xy", ""),
        ("${x}y", "valuey"),
        ("${unset:-d} ${empty:-d} ${x:-d}", "d d value"),
        ("${unset-d} ${empty-d}.", "d ."),
        ("${unset:+s}${empty:+s}${x:+s}", "s"),
        ("${empty+s}${unset+n}", "s"),
        ("${unset:-${x}}", "value"),
        ("${unset:-'a b'}", "a b"),
        ("${x:?must be set}", "value"),
        ("${path#*/}", "b/c.tar.gz"),
        ("${path##*/}", "c.tar.gz"),
        ("${path%.*}", "a/b/c.tar"),
        ("${path%%.*}", "a/b/c"),
        ("${path/b/X} ${path//[/X}", "a/X/c.tar.gz a/b/c.tar.gz"),
        ("${path//\\//-}", "a-b-c.tar.gz"),
        ("${path//?/x}", "xxxxxxxxxxxx"),
        ("'$x'", "$x"),
        ('"$x"', "value"),
        ('"a\\"b\\$x\\\\c\\n"', 'a"b$x\\c\\n'),
        ("\\$x \\'", "$x '"),
        ("\\", ""),
        ("$", "$"),
        ("$$", ""),
        ("$1a$12b", "ab"),
        ("$.x", "$.x"),
        ("$é", "letter"),
        ("a < b << c", "a < b << c"),
    ],
)
def test_a_word(text: str, expected: str) -> None:
    assert Lexer().word(text, VARIABLES) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("'open", "single quote"),
        ('"open', "double quote"),
        ("${x", "is not supported|missing"),
        ("${x:-d", "missing '}'"),
        ("${", "missing '}'"),
        ("${}", "bad substitution"),
        ("${:x}", "bad substitution"),
        ("${x!y}", "modifier ! is not supported"),
        ("${x:#y}", "modifier :# is not supported"),
        ("${unset:?say why}", "unset: say why"),
        ("${empty:?}", "empty: is not allowed to be empty"),
        ("${unset?}", "unset: is not allowed to be unset"),
        ("${x/y", "missing '/'"),
        ("${x#\\a}", "invalid escape"),
    ],
)
def test_what_is_no_word(text: str, message: str) -> None:
    with pytest.raises(SubstitutionError, match=message):
        Lexer().word(text, VARIABLES)


def test_words_are_split_after_substitution_but_not_in_quotes() -> None:
    variables = {"list": "8000 9000", "one": "7000"}
    assert Lexer().words('80 $list "$list" a$one', variables) == ["80", "8000", "9000", "8000 9000", "a7000"]
    assert Lexer().words("   ", {}) == []


def test_the_escape_character_of_the_file() -> None:
    assert Lexer(escape="`").word("`$x C:\\$x", VARIABLES) == "$x C:\\value"


def test_content_of_heredocs_keeps_its_quotes() -> None:
    assert Lexer(plain_quotes=True).word('it\'s "$x" \\$x', VARIABLES) == 'it\'s "value" $x'


def test_what_is_kept() -> None:
    lexer = Lexer(keep_quotes=True, keep_escapes=True, keep_unset=True)
    written = "'a' \"b\" \\c $unset ${unset} ${unset:-d} ${unset/a/b}"
    assert lexer.word(written, {}) == written
