"""Looking at, making, renaming and removing over the real slotfiles, compared with Python's own functions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from pathlib import Path
from random import Random

import pytest

from agentenv.errors import PolicyRefusalError, ProtocolError
from agentenv.sandbox.server.tools.files import Finished
from agentenv.wire.tools import PathsReply
from tests.sweeps import Sweep
from tests.unit.sandbox.server.file_tools_box import Box, FixedRunner, box_fixture  # noqa: F401

NAMES = ("a", "a/b", "a/b/c", "f", "a/f", "link", "link/b", "broken", "broken/x", "f/x", "f/x/y", "new", "new/x/y")
CHANGES = ("mkdir", "rename", "remove")


def by_python(top: Path, action: str, path: str, given: dict[str, object]) -> int:
    """Does it there, and returns the errno of its failure, or 0."""
    at = top / path
    try:
        if action == "mkdir":
            at.mkdir(0o755, parents=bool(given["parents"]), exist_ok=bool(given["exist_ok"]))
        elif action == "rename":
            at.rename(top / str(given["target"]))
        elif action == "stat":
            at.stat(follow_symlinks=bool(given["follow"]))
        elif given["recursive"] and at.is_dir() and not at.is_symlink():
            shutil.rmtree(at)
        else:
            at.unlink()
    except OSError as error:
        return error.errno or -1
    return 0


def tree(top: Path) -> set[tuple[str, str]]:
    return {(str(path.relative_to(top)), oct(path.lstat().st_mode)) for path in top.rglob("*")}


def arguments_of(action: str, random: Random) -> dict[str, object]:
    if action == "rename":
        return {"target": random.choice(NAMES)}
    names = {"mkdir": ("parents", "exist_ok"), "stat": ("follow",), "remove": ("recursive",)}[action]
    return {name: random.random() < 0.5 for name in names}


async def test_whatever_is_done_ends_as_in_python(box: Box, tmp_path: Path, sweep: Sweep) -> None:
    for number, random in enumerate(sweep.cases()):
        here, there = box.path / str(number), tmp_path / str(number)
        for top in (here, there):
            (top / "a/b").mkdir(parents=True)
            (top / "f").write_text("1")
            (top / "link").symlink_to("a")
            (top / "broken").symlink_to("nothing")
            box.give(top)
        done: list[object] = []
        for _ in range(12):
            action, path = random.choice((*CHANGES, "stat")), random.choice(NAMES)
            given = arguments_of(action, random)
            expected = await asyncio.to_thread(by_python, there, action, path, given)
            if "target" in given:
                given["target"] = f"{number}/{given['target']}"
            outcome = await box.call("paths", action=action, path=f"{number}/{path}", **given)
            done.append((action, path, given, expected))
            assert outcome.exit_code == expected, (str(sweep), done)
            assert tree(here) == tree(there), (str(sweep), done)


async def test_what_is_seen_is_what_is_there(box: Box) -> None:
    file = box.make("f", "123")
    file.chmod(0o4751)
    os.utime(file, ns=(0, 1_234_567_890_123_456_789))
    reply = (await box.call("paths", action="stat", path="f")).content
    assert isinstance(reply, PathsReply)
    assert reply.entry is not None
    assert reply.entry.model_dump() == {
        "path": "f", "kind": "file", "size_bytes": 3, "mode": 0o4751, "modified_s": 1_234_567_890.123_456_8,
    }  # fmt: skip


@pytest.mark.parametrize("action", [*CHANGES, "stat"])
@pytest.mark.parametrize("path", ["..", "../outside", "way/secret", "way/../../outside/secret", "/etc/passwd"])
async def test_nothing_leads_out(box: Box, action: str, path: str) -> None:
    (box.path / "way").symlink_to(box.outside)
    before = tree(box.outside)
    with pytest.raises(PolicyRefusalError):
        await box.call("paths", action=action, path=path, **({"target": "x"} if action == "rename" else {}))
    box.make("mine")
    with pytest.raises(PolicyRefusalError):
        await box.call("paths", action="rename", path="mine", target=path)
    assert tree(box.outside) == before


async def test_a_link_out_is_removed_and_not_what_it_leads_to(box: Box) -> None:
    (box.path / "tree").mkdir()
    box.give(box.path / "tree")
    (box.path / "tree/way").symlink_to(box.outside)
    assert (await box.call("paths", action="remove", path="tree/", recursive=True)).exit_code == 0
    assert not (box.path / "tree").exists()
    assert (box.outside / "secret").read_text() == "secret"


async def test_a_tree_may_have_512_levels(box: Box) -> None:
    for levels, left in ((512, False), (513, True)):
        with contextlib.chdir(box.path):
            for _ in range(levels):
                Path("d").mkdir()
                box.give(Path("d"))
                os.chdir("d")
        done = await box.call("paths", action="remove", path="d", recursive=True)
        assert ("too long" in done.stderr, (box.path / "d").exists()) == (left, left), done


@pytest.mark.parametrize(
    ("action", "printed"), [("stat", b"e" + bytes(31)), ("remove", b"f" + bytes(31)), ("mkdir", b"")]
)
async def test_a_slot_that_prints_nonsense_is_a_protocol_error(box: Box, action: str, printed: bytes) -> None:
    box.runner = FixedRunner(Finished(0, printed, b"", 0))  # type: ignore[assignment]
    with pytest.raises(ProtocolError):
        await box.call("paths", action=action, path="x")
