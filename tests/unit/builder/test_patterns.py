"""Wildcards and .dockerignore; the expected results are those of Go's filepath.Match and moby/patternmatcher."""

from __future__ import annotations

import posixpath
import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.builder.patterns import Ignore, PatternError, glob, has_wildcards, match


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("*.py", "a.py", True),
        ("*.py", "a/b.py", False),
        ("a?c", "abc", True),
        ("a?c", "a/c", False),
        ("[a-c]x", "bx", True),
        ("[^a-c]x", "bx", False),
        ("[^a-c]x", "dx", True),
        ("[c-a]x", "bx", False),
        ("[^c-a]x", "bx", True),
        ("[\\]]", "]", True),
        ("[!a]", "!", True),
        ("\\*", "*", True),
        ("\\*", "a", False),
        ("a.b", "axb", False),
        ("é*", "éa", True),
        ("", "", True),
        ("abc", "abc", True),
        ("*c", "abc", True),
        ("a*", "ab/c", False),
        ("a*/b", "abc/b", True),
        ("a*/b", "a/c/b", False),
        ("a*b*c*d*e*/f", "axbxcxdxe/f", True),
        ("a*b*c*d*e*/f", "axbxcxdxexxx/fff", False),
        ("a*b?c*x", "abxbbxdbxebxczzx", True),
        ("a*b?c*x", "abxbbxdbxebxczzy", False),
        ("ab[^e-g]", "abc", True),
        ("a\\*b", "ab", False),
        ("[a-ζ]*", "α", True),
        ("*[a-ζ]", "A", False),
        ("a[^a]b", "a/b", True),
        ("[\\-x]", "-", True),
        ("*x", "xxx", True),
    ],
)
def test_wildcards(pattern: str, path: str, expected: bool) -> None:
    assert match(pattern, path) is expected


@pytest.mark.parametrize("pattern", ["[", "[a", "[]", "[-a]", "[a-]", "a\\", "[a\\"])
def test_an_invalid_pattern_is_an_error(pattern: str) -> None:
    with pytest.raises(PatternError):
        match(pattern, "a")
    with pytest.raises(PatternError):
        Ignore(pattern if not pattern.endswith("a\\") else "[")


def test_what_has_wildcards() -> None:
    assert [has_wildcards(name) for name in ("a*", "a?", "[a]", "a", "\\*", "\\\\*")] == [
        *(True, True, True),
        *(False, False, True),
    ]


TREE = {
    "": [("a", True), ("b.py", False), ("link", False), ("c", True)],
    "a": [("x.py", False), ("y", True)],
    "c": [("x.py", False)],
    "a/y": [("z.py", False)],
}


def globbed(pattern: str) -> list[str]:
    search = glob(pattern)
    try:
        wanted = next(search)
        while True:
            wanted = search.send(TREE[wanted])
    except StopIteration as stop:
        return list(stop.value)


def test_a_wildcard_matches_one_part_of_a_path() -> None:
    assert globbed("*.py") == ["b.py"]
    assert globbed("*") == ["a", "b.py", "c", "link"]
    assert globbed("*/x.py") == ["a/x.py", "c/x.py"]
    assert globbed("a/*/*") == ["a/y/z.py"]
    assert globbed("?/[xz].py") == ["a/x.py", "c/x.py"]
    assert globbed("no*") == []
    assert globbed("a/none") == ["a/none"]


@pytest.mark.parametrize(
    ("rules", "out", "kept"),
    [
        ("*.pyc", ["a.pyc"], ["a/b.pyc", "a.py"]),
        ("**/*.pyc", ["a.pyc", "a/b/c.pyc"], ["a.py"]),
        ("**.log", ["a.log", "a/b.log"], ["log"]),
        ("node_modules", ["node_modules", "node_modules/a/b"], ["a/node_modules"]),
        ("**/node_modules", ["node_modules/a", "a/node_modules/b"], ["node_modules2"]),
        ("a/**", ["a/b", "a/b/c"], ["a", "b"]),
        ("a/**/c", ["a/c", "a/b/c", "a/b/b/c/d"], ["a/b"]),
        ("/a", ["a"], ["b/a"]),
        ("./a/../b/", ["b"], ["a"]),
        ("*\n!keep\n!sub/keep", ["a", "sub", "sub/a"], ["keep", "sub/keep", "keep/a"]),
        ("*.md\n!README.md\nREADME.md", ["README.md"], []),
        ("# comment\n\n  a  \r\n", ["a"], ["# comment"]),
        ("!a", [], ["a"]),
        ("[ab]x", ["ax"], ["cx"]),
        ("a+(b)", ["a+(b)"], ["aab"]),
        ("\ufeffa", ["a"], []),
    ],
)
def test_dockerignore(rules: str, out: list[str], kept: list[str]) -> None:
    ignore = Ignore(rules)
    assert [path for path in (*out, *kept) if ignore.excludes(path)] == out


def test_an_exclamation_mark_needs_a_pattern() -> None:
    with pytest.raises(PatternError, match="nothing after its !"):
        Ignore("a\n!\n")


def test_too_much_is_refused() -> None:
    assert match("a" * 4096, "a" * 4096)
    with pytest.raises(PatternError, match="more than 4096 characters"):
        match("a" * 4097, "a")


SIMPLE = st.text("ab*?/", max_size=8)


def expression(pattern: str) -> str:
    """As a regular expression, which backtracks. Without brackets and backslashes."""
    for token, meaning in (("**/", "(.*/)?"), ("**", "(.*/)?"), ("*", "[^/]*"), ("?", "[^/]")):
        if pattern.startswith(token):
            ends = token == "**" or token == "**/"
            rest = pattern[len(token) :]
            return ".*" if ends and not rest else meaning + expression(rest)
    return re.escape(pattern[0]) + expression(pattern[1:]) if pattern else ""


@given(SIMPLE, st.text("ab/", max_size=12))
def test_a_wildcard_is_a_regular_expression(pattern: str, path: str) -> None:
    simple = expression(re.sub(r"\*+", "*", pattern))
    assert match(pattern, path) == (re.fullmatch(simple, path) is not None)


@given(
    st.lists(st.tuples(st.booleans(), st.text("ab*?/", min_size=1, max_size=8)), max_size=4),
    st.text("ab/", max_size=12),
)
def test_rules_are_regular_expressions_and_the_last_one_counts(rules: list[tuple[bool, str]], path: str) -> None:
    written = [(includes, posixpath.normpath(f"/{pattern}").lstrip("/")) for includes, pattern in rules]
    written = [(includes, pattern) for includes, pattern in written if pattern]
    path = posixpath.normpath(f"/{path}").lstrip("/")
    parents = [path[:end] for end in range(1, len(path) + 1) if path[end : end + 1] in ("", "/")] or [""]
    excluded = False
    for includes, pattern in written:
        suffix = pattern.startswith("**") and pattern[2:3] != "/" and not set("*?") & set(pattern[2:])
        simple = ".*" + re.escape(pattern[2:]) if suffix else expression(pattern)
        if any(re.fullmatch(simple, parent) for parent in parents):
            excluded = not includes
    text = "\n".join("!" * includes + pattern for includes, pattern in written)
    assert Ignore(text).excludes(path) is excluded


@given(st.text("ab*?[]^-\\/", max_size=8), st.text("ab/-]^", max_size=8))
def test_any_pattern_matches_or_is_refused(pattern: str, path: str) -> None:
    with suppress(PatternError):
        match(pattern, path)
    with suppress(PatternError):
        Ignore(pattern).excludes(path)
