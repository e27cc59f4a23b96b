"""search (with sanitizers) against other programs: Python's re for what a line matches, and ripgrep itself, run on a
copy of the tree, for which files a glob means and for everything that lies between ripgrep and the reply."""

from __future__ import annotations

import base64
import json
import os
import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agentenv.errors import InvalidArgumentsError
from agentenv.file_names import readable_name
from agentenv.wire.tools import SearchReply
from tests.sweeps import Sweep
from tests.unit.sandbox.server.file_tools_box import UID, Box, box_fixture
from tests.unit.sandbox.slotagent.agent_box import sanitized

__all__ = ["box_fixture"]

DIRECTORIES = [b"src", b"src/deep", b"src/deep/er", b"lib", b".hid", b"-d", b"a b", b"sub/.git", b"n\nl", b"\xff"]
NAMES = [b"a.py", b"b.py", b"x.ts", b"x.tsx", b"-v.py", b"two words.md", b"l\nine.py", b"\xe9.py", b".env", b"{a}.py"]
NAMES += [b"[x].ts", b"README", b"\xc3\xa9.ts", b"A.PY", b"5:1:x", b"a.py~"]
WORDS = ["cafe", "café", "x", "total", "total(x)", "é", "]x", "^ar", "bar", "B", "Z", "[", "12", "1:2:3", ";2", "“hi”"]
GLOB_PIECES = ["*", "**/", "**", "src", "src/", "/", "a", ".py", ".ts", "{py,ts}", "*.{ts,tsx}", "?", "[a-x]", "[!a]"]
GLOB_PIECES += ["*.py", "deep", "lib/", ".", "/**/", "{src,lib}", "é", "\\*", " ", "-", "[{]"]
LENGTHS = [0, 1, 80, 99, 100, 101, 399, 400, 401, 499, 500, 501, 5_000]
SIZES = [65_535, 65_536, 65_537, 262_143, 262_144, 262_145]


@pytest.fixture(name="checked_box")
def checked_box_fixture(box: Box) -> Box:
    """The box with the sanitizers' build."""
    shutil.copy(sanitized().files, box.program[0])
    return box


# -- what a line matches ---------------------------------------------------------------------------------------------

ATOMS = ["a", "é", "“", "x", "B", "Z", r"\d", r"\s", r"\w", ".", "ca", r"\[", r"\^", r"\]", r"\.", "(?:ab|é)", "(b|)"]
MEMBERS = ["a-f", "é", r"A-\]", r"0-9", r"\]-a", r"\^-a", "9-a", "X-z", r"\-", "“-”", r"\d", "!", r"\\", "x"]
COUNTS = ["", "", "", "?", "*", "+", "{0,2}", "{2}", "??", "*?"]


def pattern_of(rng: random.Random) -> str:
    def atom() -> str:
        if rng.random() < 0.35:
            return f"[{rng.choice(['', '', '^'])}{''.join(rng.sample(MEMBERS, rng.randint(1, 3)))}]"
        return rng.choice(ATOMS)

    one = "".join(atom() + rng.choice(COUNTS) for _ in range(rng.randint(1, 4)))
    return rng.choice(["", "", "^", r"\b"]) + one + rng.choice(["", "", "", "$", r"\b", "|^" + rng.choice(WORDS[:3])])


async def test_the_lines_are_those_that_python_s_re_finds(checked_box: Box) -> None:
    rng = random.Random(43)
    lines = [
        "".join(
            rng.choice(["a", "é", "“", "x", "B", "Z", "[", "]", "^", "7", " ", ".", "_", "ca", "fe", "-", "\\"])
            for _ in range(n)
        )
        for n in [*range(12)] * 20
    ]
    lines += WORDS
    checked_box.make("f").write_bytes("\n".join(lines).encode())
    for _ in range(80):
        pattern, ignore_case = pattern_of(rng), rng.random() < 0.3
        reply = await checked_box.call("search", pattern=pattern, path="f", ignore_case=ignore_case, limit=10_000)
        assert isinstance(reply.content, SearchReply)
        wanted = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
        expected = [number for number, line in enumerate(lines, 1) if wanted.search(line)]
        assert [match.line for match in reply.content.matches] == expected, (pattern, ignore_case)


# -- which files, and which text of them -----------------------------------------------------------------------------


class Hit(NamedTuple):
    path: str
    line: int
    text: str
    cut: bool


def line_of(rng: random.Random) -> bytes:
    if rng.random() < 0.02:
        length = rng.choice(LENGTHS)
        return b"-" * length + rng.choice(WORDS).encode() + b"+" * rng.choice(LENGTHS)
    words = [rng.choice(WORDS).encode() for _ in range(rng.randint(0, 4))]
    return b" ".join([*words, *([b"\xff", b"caf\xe9", b"\xe2\x82"] if rng.random() < 0.05 else [])])


def content_of(rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.08:
        return b""
    if kind < 0.14:
        size = rng.choice(SIZES)
        return (b"total\n" * (size // 6 + 1))[:size]
    end = rng.choice([b"\n", b"\n", b"\r\n"])
    text = end.join(line_of(rng) for _ in range(rng.randint(1, 30))) + rng.choice([b"", end, b"\r", end + end])
    if kind < 0.22:
        return text + b"\0" + text  # binary
    if kind < 0.27:
        return b"x" * 65_536 + b"\n" + text + b"\0\n"  # with a NUL byte too late to be binary
    return rng.choice([b"", b"", b"", b"\xef\xbb\xbf"]) + text


def plant(rng: random.Random, top: bytes) -> dict[bytes, bytes]:
    """A tree below ``top``, and the content of each file in it."""
    planted = {}
    for directory in [b"", *rng.sample(DIRECTORIES, 7)]:
        place = Path(os.fsdecode(top + b"/" + directory))
        place.mkdir(parents=True, exist_ok=True)
        for name in rng.sample(NAMES, 6):
            content = content_of(rng)
            (place / os.fsdecode(name)).write_bytes(content)
            planted[(directory + b"/" + name).removeprefix(b"/")] = content
    root = Path(os.fsdecode(top))
    (root / "link.py").symlink_to("a.py")
    for path in [root, *root.rglob("*")]:
        if os.geteuid() == 0:
            os.chown(path, UID, UID, follow_symlinks=False)
    return planted


def is_binary(content: bytes) -> bool:
    return b"\0" in content[:65_536]


def plain(content: bytes) -> bytes:
    """As lines are matched: without their ends' ``\\r`` and without a byte order mark. A last line that is nothing but
    such an end is an empty line."""
    content = re.sub(rb"(\A|\n)\r\Z", rb"\1\n", content.removeprefix(b"\xef\xbb\xbf"))
    return re.sub(rb"\r(\n|\Z)", rb"\1", content)


def data(value: dict[str, str]) -> bytes:
    return value["text"].encode() if "text" in value else base64.b64decode(value["bytes"])


def shown(path: bytes, number: int, text: bytes, begin: int) -> Hit:
    at = begin - 100 if len(text) > 400 and begin > 100 else 0
    part = text[at : at + 400]
    if cut := len(part) < len(text):  # what it leaves of characters is not shown
        part = re.sub(rb"\A[\x80-\xbf]{1,3}(?![\x80-\xbf])", b"", part)
        part = re.sub(rb"([\xc2-\xf4]|[\xe0-\xf4][\x80-\xbf]|[\xf0-\xf4][\x80-\xbf]{2})\Z", b"", part)
    return Hit(readable_name(path), number, part.decode("utf-8", "replace"), cut)


class Reference:
    """ripgrep's own walk and search, of a copy with plain lines and without binary files."""

    def __init__(self, top: str, planted: dict[bytes, bytes]) -> None:
        self._top = top
        self._planted = planted
        self.binary = {path for path, content in planted.items() if is_binary(content)}
        for path, content in planted.items():
            file = Path(top) / os.fsdecode(path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"" if path in self.binary else plain(content))

    def _run(self, *options: str) -> bytes | None:
        argv = [str(sanitized().ripgrep), "--no-config", "-uu", "--sort=path", *options, "--glob=!**/.git/"]
        done = subprocess.run(argv, cwd=self._top, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
        return None if done.returncode == 2 else done.stdout

    def files(self, glob: str) -> list[bytes] | None:
        """Those that the glob means; None when it is refused. ripgrep says which files are below the directories of a
        name by what is left without them."""
        if glob.endswith("/") and not glob.startswith("!"):
            every, rest = self.files("**"), self.files(f"!{glob}")
            return None if rest is None or every is None else [path for path in every if path not in rest]
        printed = self._run("--files", "--null", f"--glob={glob}")
        return None if printed is None else printed.split(b"\0")[:-1]

    def hits(self, files: list[bytes], *options: str) -> list[Hit]:
        printed = self._run("--json", "--text", "--encoding=none", *options, ".")
        assert printed is not None
        found: dict[bytes, list[Hit]] = {}
        for message in map(json.loads, printed.splitlines()):
            if message["type"] == "match":
                at = message["data"]
                path, text = data(at["path"]).removeprefix(b"./"), data(at["lines"]).removesuffix(b"\n")
                hit = shown(path, at["line_number"], text, at["submatches"][0]["start"])
                found.setdefault(path, []).append(hit)
        return [hit for path in files for hit in found.get(path, [])]


@pytest.fixture(name="copy_of")
def copy_of_fixture() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as top:
        yield top


def glob_of(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(["**", "*", "!*.md", "src/", "*.{py,ts}"])
    glob = re.sub("//+", "/", "".join(rng.choice(GLOB_PIECES) for _ in range(rng.randint(1, 3))))
    # The workspace itself ("/", as "./") means everything in it; to ripgrep it means nothing.
    return rng.choice(["", "", "", "!"]) + ("*" if glob == "/" else glob)


@pytest.mark.parametrize("seed", range(3))
async def test_files_lines_and_texts_are_ripgrep_s(checked_box: Box, copy_of: str, seed: int) -> None:
    assert await searched(checked_box, copy_of, seed) > 100, "the cases are about something"


async def test_any_search_is_ripgrep_s(checked_box: Box, tmp_path: Path, sweep: Sweep) -> None:
    for seed in sweep.seeds():
        (top := tmp_path / str(seed)).mkdir()
        await searched(checked_box, str(top), seed)
        for planted in Path(checked_box.path).iterdir():
            shutil.rmtree(planted) if planted.is_dir() else planted.unlink()


async def searched(checked_box: Box, copy_of: str, seed: int) -> int:
    """How many lines twenty searches of a random tree have found, all of them as ripgrep does."""
    rng = random.Random(seed)
    planted = plant(rng, os.fsencode(checked_box.path))
    reference = Reference(copy_of, planted)
    told = 0
    for _ in range(20):
        glob, pattern, limit = glob_of(rng), rng.choice([*WORDS, "", "o", "a."]), rng.choice([1, 5, 50, 10_000])
        asked: dict[str, Any] = {"pattern": pattern or "^", "literal": bool(pattern), "glob": glob, "limit": limit}
        files = reference.files(glob)
        if files is None:
            with pytest.raises(InvalidArgumentsError, match="error parsing glob"):
                await checked_box.call("search", **asked)
            continue
        reply = (await checked_box.call("search", **asked)).content
        assert isinstance(reply, SearchReply)
        hits = reference.hits(files, *(["-F"] if pattern else []), f"--regexp={pattern or '^'}")
        assert [(one.path, one.line, one.text, one.cut) for one in reply.matches] == hits[:limit], asked
        assert reply.truncated is (len(hits) > limit)
        if reply.truncated:
            names = [readable_name(path) for path in files]
            files = files[: names.index(hits[limit].path) + 1]
        binary = reference.binary.intersection(files)
        assert (reply.binary_skipped, reply.files_searched) == (len(binary), len(files) - len(binary)), asked
        told += len(reply.matches)
    return told
