"""slotfiles (with sanitizers) against a plain Python implementation: the same tree, the same words, for any diff."""

from __future__ import annotations

import asyncio
import difflib
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.errors import InvalidArgumentsError
from agentenv.sandbox.server.tools.files import run_file_tool
from agentenv.sandbox.slot_paths import SlotPaths
from agentenv.wire.tools import PatchArguments, PatchReply
from tests.unit.sandbox.server.file_tools_box import UID, LocalRunner
from tests.unit.sandbox.server.patch_reference.plan import Held, PatchFailedError, planned
from tests.unit.sandbox.slotagent.agent_box import sanitized

Tree = dict[str, bytes]
LINES = ["a", "b", "c", " a", "a ", "\ta", "", "dd", "café", "x" * 130, "--", "-- ", "\x0c", "@@", "a\r"]
HEADERS = [
    "--- a/one", "+++ b/one", "--- /dev/null", "+++ /dev/null", "diff --git a/one b/one",
    "diff --git a/one b/two", "rename from one", "rename to two", "copy from one", "copy to three",
    "new file mode 100755", "old mode 100644", "new mode 100644", "new mode 120000", "deleted file mode 100644",
    "index 12..34", "Binary files a and b differ", "GIT binary patch", '--- "a/o\\156e"', '+++ "b/one"',
    "--- one\t2020", "+++ two/three ", "@@ -1 +1 @@", "@@", "@@ -1,2 +1,2 @@ def f():", "@@ -0,0 +1 @@",
    "@@ -3,0 +4 @@", "@@ -1234567890 +1 @@", "\\ No newline at end of file", "2.39.1", "-a", "+b", " c", "-",
    "+", "similarity index 9%", "rename from /etc/x", "diff --git a b", "--- a/", "-- ",
]  # fmt: skip


def one_of(chance: random.Random, *choices: str) -> str:
    return chance.choice(choices)


def some_file(chance: random.Random) -> list[str]:
    lines = chance.choice([LINES, LINES[:3], ["a"]])
    return [chance.choice(lines) + one_of(chance, "\n", "\n", "\n", "\r\n") for _ in range(chance.randrange(30))]


def edited(chance: random.Random, lines: list[str]) -> list[str]:
    made = list(lines)
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(made) + 1)
        made[at : at + chance.randrange(3)] = some_file(chance)[: chance.randrange(3)]
    return made


def broken(chance: random.Random, diff: list[str]) -> list[str]:
    for _ in range(chance.choice([0, 0, 0, 0, 1, 3])):
        at = chance.randrange(len(diff) + 1)
        new = chance.choice(
            [[], [], [chance.choice(HEADERS) + "\n"], [chance.choice(" -+") + "a\n"], diff[at : at + 3]]
        )
        diff[at : at + chance.randrange(3)] = new
    if chance.random() < 0.2:
        diff = ["@@\n" if line.startswith("@@ ") else line for line in diff]
    return diff


def some_case(chance: random.Random) -> tuple[Tree, str]:
    """A tree, and a diff that more or less fits it."""
    files = {name: some_file(chance) for name in chance.sample(["one", "two", "two/three"], chance.randrange(1, 3))}
    diff: list[str] = []
    for name, lines in files.items():
        new = edited(chance, lines)
        diff += difflib.unified_diff(lines, new, f"a/{name}", f"b/{name}", n=chance.randrange(4))
    if chance.random() < 0.15:
        diff = [chance.choice(HEADERS) + "\n" for _ in range(chance.randrange(12))]
    moved = {name: some_file(chance)[: chance.choice([0, 0, 1, 9])] + lines for name, lines in files.items()}
    tree = {name: "".join(lines).encode()[: chance.choice([None, None, -1])] for name, lines in moved.items()}
    if "two" in tree:
        tree.pop("two/three", None)
    text = "".join(broken(chance, diff)) or "nothing"
    return tree, text[: chance.choice([None, None, None, -1, -2])] or "nothing"


async def by_reference(tree: Tree, asked: PatchArguments) -> tuple[Tree, str]:
    async def read(path: str) -> Held | None:
        return Held(tree[path], 0o644) if path in tree else None

    try:
        plan = await planned(asked, read)
    except (PatchFailedError, InvalidArgumentsError) as error:
        return tree, str(error)
    after = {path: held.content for path, held in plan.files.items() if held is not None}
    kept = {path: content for path, content in tree.items() if path not in plan.files}
    return {**kept, **after}, plan.reply().model_dump_json()


async def by_slotfiles(tree: Tree, asked: PatchArguments, root: Path, program: str) -> tuple[Tree, str]:
    for path, content in tree.items():
        file = root / path
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_bytes(content)
        if os.geteuid() == 0:
            os.chown(file, UID, UID)
            os.chown(file.parent, UID, UID)
    try:
        done = await run_file_tool("patch", asked, LocalRunner(), paths=SlotPaths(workspace=str(root), files=program))
        words = done.content.model_dump_json() if isinstance(done.content, PatchReply) else done.stderr
    except InvalidArgumentsError as error:
        words = str(error)
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}, words


@pytest.fixture
def workplace() -> Iterator[Path]:
    top = Path("/tmp", f"agentenv-patch-{random.randrange(10**9)}")  # not tmp_path: another user has to get there
    top.mkdir()
    yield top
    shutil.rmtree(top)


def compared(seed: int, workplace: Path, program: str) -> bool:
    """Whether the patch was applied; asserts that both say so, or why not."""
    chance = random.Random(seed)
    tree, text = some_case(chance)
    asked = PatchArguments(patch=text, fuzz=chance.randrange(4), strip=chance.choice([*[None] * 9, 0, 1, 2]))
    root = workplace / str(seed)
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    wanted = asyncio.run(by_reference(tree, asked))
    got = asyncio.run(by_slotfiles(tree, asked, root, program))
    shutil.rmtree(root)
    if "a file name is empty or contains a NUL byte" in wanted[1] or "directory" in got[1]:
        return False  # said in other words; and a dict of files knows no directories
    assert got == wanted, (seed, tree, text)
    return got[1].startswith("{")


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_both_make_the_same_of_any_diff(workplace: Path, first: int) -> None:
    program = workplace / "slotfiles"
    shutil.copy(sanitized().files, program)
    applied = sum(compared(seed, workplace, str(program)) for seed in range(first, first + 100))
    assert 15 < applied < 85, "cases of both kinds"
