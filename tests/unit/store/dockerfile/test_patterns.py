"""Wildcards and .dockerignore; the expected results are those of Go's filepath.Match and moby/patternmatcher."""

from __future__ import annotations

import pytest

from agentenv.store.dockerfile.patterns import Ignore, PatternError, glob, has_wildcards, match


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
    with pytest.raises(PatternError, match="nothing behind its !"):
        Ignore("a\n!\n")
