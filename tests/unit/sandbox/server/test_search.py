from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import InvalidArgumentsError, PolicyRefusalError, ProtocolError
from agentenv.sandbox.server.tools.files import Finished
from agentenv.sandbox.server.tools.slotfiles_exit_codes import BAD_PATTERN
from agentenv.wire.tools import SearchReply
from tests.unit.sandbox.server.file_tools_box import Box, FixedRunner, box_fixture

__all__ = ["box_fixture"]


async def search(box: Box, pattern: str, **more: Any) -> SearchReply:
    done = await box.call("search", pattern=pattern, **more)
    assert isinstance(done.content, SearchReply), done
    return done.content


async def lines(box: Box, pattern: str, **more: Any) -> list[str]:
    return [f"{match.path}:{match.line}:{match.text}" for match in (await search(box, pattern, **more)).matches]


async def test_lines_by_path_and_number(box: Box) -> None:
    box.make("src/b.py", "import os\n\ndef total(x):\n    return x\n")
    box.make("src/a.py", "def sub_total(y): pass")
    box.make("notes.md", "total\n")
    assert await lines(box, r"def \w*total\(") == ["src/a.py:1:def sub_total(y): pass", "src/b.py:3:def total(x):"]
    assert await lines(box, "total", glob="*.md") == ["notes.md:1:total"]
    assert await lines(box, "total", glob="src/a*") == ["src/a.py:1:def sub_total(y): pass"]
    assert await lines(box, "total", path="src/a.py") == ["src/a.py:1:def sub_total(y): pass"]
    assert await lines(box, "^TOTAL$", ignore_case=True) == ["notes.md:1:total"]
    assert await lines(box, "total(x)", literal=True) == ["src/b.py:3:def total(x):"]
    assert await lines(box, "TOTAL(X)", literal=True, ignore_case=True) == ["src/b.py:3:def total(x):"]
    assert await lines(box, "nowhere") == []


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        (r"^\d{3}-\d{4}$", "555-1234", True),
        (r"^\d{3}-\d{4}$", "555-12345", False),
        (r"^.$", "é", True),
        (r"^[é-ü]$", "ö", True),
        ("É", "é", False),
        (r"^[a-ü!]$", "ö", True),
        (r"\bcat\b", "a cat.", True),
        (r"\bcat\b", "concat", False),
        (r"a.*?c", "abbc", True),
        (r"(foo|)bar", "bar", True),
        (r"(|a)b", "b", True),
        (r"()x", "x", True),
        (r"foo$", "foo\r", True),
        (r"[]x]", "]", True),
        (r"[^]x]", "]", False),
        (r"\[a\]\{1\}\(\)\*\+\?\|\^\$\.", "[a]{1}()*+?|^$.", True),
        (r"x\{", "x{", True),
        ("“?hello", "say hello now", True),
        ("cafe?é*$", "cafe", True),
        (r"[A-\]]x", "Ax", True),
        (r"[0-9\]-a]x", "]x", True),
        (r"^[\^-a]ar", "bar", False),
        (r"\p{Greek}+", "α", True),
        (r"(?i:B)ar", "bar", True),
        (r"\Abar\z", "bar", True),
        (r"\A1", "12", True),
        (r"\s", "\t", True),
        (r"\S\W", "a-", True),
        (r"[\d_]+z", "4_2z", True),
        (r"^(ab){2}$", "abab", True),
        (r"\/path", "/path", True),
    ],
)
async def test_what_a_pattern_matches(box: Box, pattern: str, text: str, matches: bool) -> None:
    box.make("f", f"before\n{text}\nafter\n")
    found = (await search(box, pattern, path="f")).matches
    assert any(match.line == 2 for match in found) is matches


@pytest.mark.parametrize(
    ("glob", "paths"),
    [
        ("*.py", "deep/src/e.py src/a.py src/deep/b.py top.py"),
        ("**/*.py", "deep/src/e.py src/a.py src/deep/b.py top.py"),
        ("src/**/*.py", "src/a.py src/deep/b.py"),
        ("src/*.py", "src/a.py"),
        ("/src/*.py", "src/a.py"),
        ("./src/*.py", "src/a.py"),
        ("*.{ts,tsx}", "src/y.ts x.tsx"),
        ("[s-t]*.py", "top.py"),
        ("src/", "deep/src/e.py src/a.py src/deep/b.py src/y.ts"),
        ("./src/", "src/a.py src/deep/b.py src/y.ts"),
        ("deep/src/", "deep/src/e.py"),
        ("/", "deep/src/e.py src/a.py src/deep/b.py src/y.ts top.py x.tsx"),
        ("!*.py", "src/y.ts x.tsx"),
        ("!src/", "top.py x.tsx"),
        ("!./src/*.py", "deep/src/e.py src/deep/b.py src/y.ts top.py x.tsx"),
        ("*.PY", ""),
    ],
)
async def test_which_files_a_glob_means(box: Box, glob: str, paths: str) -> None:
    for path in ("top.py", "x.tsx", "src/a.py", "src/y.ts", "src/deep/b.py", "deep/src/e.py"):
        box.make(path, "needle\n")
    reply = await search(box, "needle", glob=glob)
    assert [match.path for match in reply.matches] == paths.split()
    assert reply.files_searched == len(paths.split())


async def test_what_is_left_out_is_counted(box: Box) -> None:
    box.make("text", "needle\n")
    box.make("binary", "needle\0\n")
    box.make(".git/config", "needle\n")
    box.make(".hidden", "needle\n")
    box.make("locked", "needle\n").chmod(0)
    box.make("shut/text", "needle\n").parent.chmod(0)
    os.mkfifo(box.path / "pipe")
    (box.path / "link").symlink_to("text")
    (box.path / "away").symlink_to("../outside/secret")
    with (box.path / "huge").open("wb") as huge:
        huge.write(b"needle\n" + b"x" * 70_000)
        huge.truncate(65 * 1024 * 1024)
    with (box.path / "long").open("wb") as long:
        long.write(b"x\n" * (33 * 1024 * 1024))
    reply = await search(box, "needle")
    assert [match.path for match in reply.matches] == [".hidden", "text"]
    assert (reply.files_searched, reply.binary_skipped, reply.large_skipped) == (2, 1, 2)
    assert reply.unreadable_skipped == 2
    assert not reply.truncated
    assert (await lines(box, "needle", path=".git")) == [".git/config:1:needle"]


async def test_the_limit_and_long_lines(box: Box) -> None:
    box.make("many", "x\n" * 50)
    reply = await search(box, "x", limit=20)
    assert (len(reply.matches), reply.truncated) == (20, True)
    assert not (await search(box, "x", limit=50)).truncated
    box.make("long", "a" * 5000 + "needle" + "b" * 5000 + "\n")
    (match,) = (await search(box, "needle")).matches
    assert match.cut
    assert (match.text, match.lossy) == ("a" * 100 + "needle" + "b" * 294, False)


@pytest.mark.parametrize("shift", range(4))
async def test_a_long_line_is_cut_between_characters(box: Box, shift: int) -> None:
    for character in ("é", "€", "😀"):
        box.make("long", "a" * shift + character * 1000 + "needle" + character * 1000 + "\n")
        (match,) = (await search(box, "needle")).matches
        assert match.cut
        assert set(match.text.replace("needle", "")) == {character}
        assert not match.lossy


async def test_bytes_that_are_no_text_do_no_harm(box: Box) -> None:
    box.make("latin").write_bytes(b"caf\xe9 au lait\nend needle \xff\n")
    (match,) = (await search(box, "needle")).matches
    assert (match.line, match.text, match.lossy) == (2, "end needle �", True)
    assert [match.line for match in (await search(box, "caf. au")).matches] in ([], [1])


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"pattern": "("}, "unclosed group"),
        ({"pattern": "[a"}, "unclosed character class"),
        ({"pattern": "*a"}, "missing expression"),
        ({"pattern": "x{"}, "repetition quantifier"),
        ({"pattern": "a\nb"}, "line break"),
        ({"pattern": "a\0b"}, "NUL byte"),
        ({"pattern": r"a\nb"}, "is not allowed in a regex"),
        ({"pattern": r"(a)\1"}, "backreferences are not supported"),
        ({"pattern": "(?<!a)b"}, "look-around"),
        ({"pattern": "[z-a]"}, "invalid character class range"),
        ({"pattern": r"\w{1000}{1000}"}, "exceeds size limit"),
        ({"pattern": "x", "glob": "["}, "error parsing glob '\\['"),
        ({"pattern": "x", "glob": "{a"}, "unclosed alternate group"),
        ({"pattern": "x", "glob": "{a", "path": "f"}, "unclosed alternate group"),
        ({"pattern": "x", "glob": "a\0"}, "NUL byte"),
    ],
)
async def test_what_ripgrep_refuses_is_refused_with_its_reason(box: Box, asked: dict[str, Any], why: str) -> None:
    box.make("f", "x\n")
    with pytest.raises(InvalidArgumentsError, match=why) as caught:
        await box.call("search", **asked)
    assert "Consider" not in str(caught.value), "its command line has options that the tool has not"
    assert "literal" in caught.value.next_step


async def test_patterns_and_globs_are_never_options(box: Box) -> None:
    box.make("-f", "--version\n")
    assert await lines(box, "--version", glob="-f") == ["-f:1:--version"]
    assert await lines(box, "--version", literal=True, path="-f") == ["-f:1:--version"]
    box.make("#f#", "--version\n")
    assert await lines(box, "--version", glob="#*") == ["#f#:1:--version"], "no comment either"


async def test_without_ripgrep_the_slot_is_a_broken_one(box: Box) -> None:
    Path(box.paths.ripgrep).unlink()
    with pytest.raises(ProtocolError, match="slotfiles ended with 209"):
        await box.call("search", pattern="x")


async def test_a_ripgrep_that_is_killed_ends_the_search(box: Box) -> None:
    box.make("f", "x\n")
    Path(box.paths.ripgrep).write_text("#!/bin/sh\nkill -9 $$\n")
    done = await box.call("search", pattern="x")
    assert (done.content, done.exit_code) == (None, 137)
    assert "killed by signal 9" in done.stderr


async def test_wrong_calls(box: Box) -> None:
    with pytest.raises(PolicyRefusalError):
        await box.call("search", pattern="x", path="../outside")
    (box.path / "away").symlink_to("../outside")
    with pytest.raises(PolicyRefusalError):
        await box.call("search", pattern="x", path="away")
    done = await box.call("search", pattern="x", path="nope")
    assert (done.exit_code, done.stderr) == (2, "nope: No such file or directory\n")


async def test_a_slot_that_refuses_without_a_reason_is_a_broken_one(box: Box) -> None:
    box.runner = FixedRunner(Finished(BAD_PATTERN, b"e" + bytes(63), b"", 0))  # type: ignore[assignment]
    with pytest.raises(ProtocolError, match="no reason"):
        await box.call("search", pattern="x")


@pytest.mark.parametrize("printed", [b"", b"h" + bytes(31), b"e" + bytes(31), b"x" + bytes(31), b"\xff" * 100])
async def test_a_slot_that_prints_something_else_is_a_broken_one(box: Box, printed: bytes) -> None:
    box.runner = FixedRunner(Finished(0, printed, b"", 0))  # type: ignore[assignment]
    with pytest.raises(ProtocolError):
        await box.call("search", pattern="x")
