"""Reading, writing and listing, and what comes back wrong, over the real slotfiles program."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import (
    InvalidArgumentsError,
    PolicyRefusalError,
)
from agentenv.sandbox.server.tools.files import run_file_tool
from agentenv.sandbox.slot_paths import SlotPaths
from agentenv.wire.base import MAX_FILE_BYTES
from agentenv.wire.tools import ArtifactsReply, ReadFileReply, SearchReply, WriteFileReply
from tests.unit.sandbox.server.file_tools_box import (  # noqa: F401
    UID,
    Box,
    FixedRunner,
    LocalRunner,
    box_fixture,
    make_tar,
    tar_entry,
)

# ---- reading and writing ----


async def test_what_is_written_is_read(box: Box) -> None:
    assert await box.write("a/b/c.txt", "grüß\0 dich\n") == WriteFileReply(size_bytes=13, created=True)
    assert await box.read("a/b/c.txt") == ReadFileReply(text="grüß\0 dich\n", size_bytes=13, mode=0o644)
    assert (box.path / "a/b").stat().st_mode & 0o777 == 0o755


async def test_absolute_paths_below_the_workspace_are_taken(box: Box) -> None:
    await box.write(f"{box.path}//x", "1")
    assert (await box.read(f"{box.path}/./x")).text == "1"
    assert await box.names(str(box.path)) == ["x"]
    assert await box.names(f"{box.path}/") == ["x"]


async def test_an_overwritten_file_keeps_its_mode_and_says_so(box: Box) -> None:
    box.make("run.sh", "old").chmod(0o751)
    assert not (await box.write("run.sh", "new")).created
    assert (await box.read("run.sh")).mode == 0o751
    assert not (await box.write("run.sh", "newer", mode=0o600)).created
    assert (await box.read("run.sh")).mode == 0o600


async def test_a_setuid_bit_is_not_kept(box: Box) -> None:
    box.make("tool", "old").chmod(0o4755)
    await box.write("tool", "new")
    assert (await box.read("tool")).mode == 0o755


async def test_binary_content_survives(box: Box) -> None:
    data = bytes(range(256)) * 1000
    await box.write("blob", data=data)
    assert (await box.read("blob", binary=True)).data == data
    lossy = await box.read("blob", limit=200)
    assert lossy.lossy
    assert lossy.truncated
    assert lossy.text is not None
    assert "�" in lossy.text


@pytest.mark.parametrize(
    ("offset", "limit", "text", "truncated"),
    [
        (0, None, "0123456789", False),
        (3, 4, "3456", True),
        (6, 4, "6789", False),
        (10, 5, "", False),
        (99, None, "", False),
    ],
)
async def test_ranges(box: Box, offset: int, limit: int | None, text: str, truncated: bool) -> None:
    box.make("digits", "0123456789")
    reply = await box.read("digits", offset=offset, limit=limit)
    assert (reply.text, reply.truncated, reply.size_bytes) == (text, truncated, 10)


async def test_an_offset_no_file_has_is_no_error(box: Box) -> None:
    box.make("digits", "0123456789")
    assert (await box.read("digits", offset=2**63 - 1)).text == ""


async def test_the_largest_file_goes_both_ways(box: Box) -> None:
    data = os.urandom(1024) * (MAX_FILE_BYTES // 1024)
    assert (await box.write("large", data=data)).size_bytes == MAX_FILE_BYTES
    assert (await box.read("large", binary=True)).data == data
    with (box.path / "large").open("ab") as file:
        file.write(b"more")
    beyond = await box.read("large", binary=True)
    assert beyond.truncated
    assert beyond.size_bytes == MAX_FILE_BYTES + 4


async def test_too_large_a_write_is_refused_before_anything_runs(box: Box) -> None:
    with pytest.raises(InvalidArgumentsError, match="exceed the limit"):
        await box.call("write_file", path="x", data=b"x" * (MAX_FILE_BYTES + 1))
    assert await box.names() == []


@pytest.mark.parametrize(
    ("tool", "arguments", "code", "words"),
    [
        ("read_file", {"path": "none"}, errno.ENOENT, "No such file"),
        ("read_file", {"path": "none/x"}, errno.ENOENT, "No such file"),
        ("read_file", {"path": "file/x"}, errno.ENOTDIR, "Not a directory"),
        ("read_file", {"path": "directory"}, errno.EISDIR, "Is a directory"),
        ("read_file", {"path": "fifo"}, errno.EINVAL, "not a regular file"),
        ("read_file", {"path": "socket"}, errno.EINVAL, "not a regular file"),
        ("read_file", {"path": "loop"}, errno.ELOOP, "symbolic links"),
        ("read_file", {"path": "forbidden"}, errno.EACCES, "Permission denied"),
        ("read_file", {"path": "n" * 300}, errno.ENAMETOOLONG, "too long"),
        ("write_file", {"path": "directory", "text": ""}, errno.EISDIR, "Is a directory"),
        ("write_file", {"path": "directory/", "text": ""}, errno.EISDIR, "Is a directory"),
        ("write_file", {"path": ".", "text": ""}, errno.EISDIR, "Is a directory"),
        ("write_file", {"path": "file/x", "text": ""}, errno.ENOTDIR, "Not a directory"),
        ("write_file", {"path": "fifo", "text": ""}, errno.EINVAL, "not a regular file"),
        ("write_file", {"path": "loop", "text": ""}, errno.ELOOP, "symbolic links"),
        ("write_file", {"path": "forbidden", "text": ""}, errno.EACCES, "Permission denied"),
        ("write_file", {"path": "n" * 300, "text": ""}, errno.ENAMETOOLONG, "too long"),
        ("list_files", {"path": "none"}, errno.ENOENT, "No such file"),
        ("list_files", {"path": "file"}, errno.ENOTDIR, "Not a directory"),
        ("artifacts", {"action": "archive", "path": "fifo"}, errno.EINVAL, "not a regular file"),
    ],
)
async def test_a_failing_operation_is_data(
    box: Box, tool: str, arguments: Mapping[str, Any], code: int, words: str
) -> None:
    box.make("file")
    box.make("directory/inner")
    box.make("forbidden").chmod(0)
    os.mkfifo(box.path / "fifo", 0o777)
    os.mknod(box.path / "socket", 0o140666)
    (box.path / "loop").symlink_to("loop")
    done = await box.call(tool, **arguments)
    assert (done.content, done.exit_code) == (None, code)
    assert words in done.stderr


async def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(box: Box) -> None:
    box.make("full/file", "old")
    box.runner = LocalRunner(file_limit_bytes=100_000)
    done = await box.call("write_file", path="full/file", text="x" * 200_000)
    assert done.content is None
    assert done.exit_code == 128 + 25, "SIGXFSZ"
    assert "signal 25" in done.stderr
    assert (box.path / "full/file").read_text() == "old"
    assert [path.name for path in (box.path / "full").iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")
async def test_a_full_disk_leaves_the_old_file_and_nothing_else(box: Box) -> None:
    box.make("keep")
    options = f"size=1m,mode=0700,uid={UID},gid={UID}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "slotfiles-test", box.path], check=True)
    try:
        await box.write("file", "old")
        for attempt in range(3):
            done = await box.call("write_file", path="file", text="x" * 2_000_000)
            assert (done.content, done.exit_code) == (None, errno.ENOSPC), attempt
            assert "No space left" in done.stderr
        assert await box.names() == ["file"]
        assert (await box.read("file")).text == "old"
        done = await box.call("artifacts", action="extract", data=make_tar({"a": b"x" * 900_000, "b": b"x" * 900_000}))
        assert done.exit_code == errno.ENOSPC
        assert "b" not in await box.names()
    finally:
        subprocess.run(["umount", box.path], check=True)


async def test_content_cut_short_replaces_nothing(box: Box) -> None:
    """As when the server dies while it sends."""
    box.make("file", "old")
    program, root = box.program
    done = await box.runner.run([program, root, "write", "file", "-", "10"], stdin=b"12345", output_bytes=100)
    assert done.exit_code == 203
    assert await box.names() == ["file"]
    assert (await box.read("file")).text == "old"


# ---- staying inside ----

OUTSIDE = [
    "/etc/passwd",
    "/",
    "..",
    "../outside/secret",
    "a/../../outside/secret",
    "missing/../../outside/secret",
    "{workspace}/../outside/secret",
    "{workspace}x/secret",
    "{outside}/secret",
    "absolute-link",
    "relative-link",
    "directory-link/secret",
    "process-link/secret",
]


@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize(
    ("tool", "more"),
    [
        ("read_file", {}),
        ("write_file", {"text": "forged"}),
        ("list_files", {}),
        ("artifacts", {"action": "archive"}),
        ("artifacts", {"action": "extract", "data": "H4sIAAAAAAACA2NgoBwAAP//"}),
    ],
)
async def test_nothing_leaves_the_workspace(box: Box, path: str, tool: str, more: dict[str, Any]) -> None:
    box.make("a/file")
    (box.path / "absolute-link").symlink_to(box.outside / "secret")
    (box.path / "relative-link").symlink_to("../outside/secret")
    (box.path / "directory-link").symlink_to("../outside")
    (box.path / "process-link").symlink_to(f"/proc/self/root/{box.outside}")
    before = sorted(str(found) for found in box.outside.parent.rglob("*"))
    if "data" in more:
        more = {**more, "data": make_tar({"secret": b"forged"})}
    with pytest.raises(PolicyRefusalError, match="outside the workspace"):
        await box.call(tool, path=path.format(workspace=box.path, outside=box.outside), **more)
    assert (box.outside / "secret").read_text() == "secret"
    assert sorted(str(found) for found in box.outside.parent.rglob("*")) == before


async def test_links_inside_are_followed(box: Box) -> None:
    box.make("real/file", "old").chmod(0o640)
    (box.path / "directory").symlink_to("real")
    (box.path / "link").symlink_to("directory/../real/./file")
    (box.path / "absolute").symlink_to(box.path / "real/file")
    (box.path / "dangling").symlink_to("made/later")
    assert (await box.read("link")).text == "old"
    assert not (await box.write("link", "new")).created
    assert (box.path / "link").is_symlink()
    assert (await box.read("real/file")) == ReadFileReply(text="new", size_bytes=3, mode=0o640)
    assert not (await box.write("absolute", "newer")).created
    assert (await box.read("directory/file")).text == "newer"
    assert (await box.write("dangling", "x")).created
    assert (await box.read("made/later")).text == "x"


async def test_a_race_of_links_never_leads_outside(box: Box) -> None:
    """While the calls run, `swap` changes between a directory and a link to the secret's directory."""
    box.make("real/secret", "mine")
    swap, spare = box.path / "swap", box.path / "spare"
    stop = threading.Event()

    def swapper() -> None:
        targets = ["real", "../outside"]
        while not stop.is_set():
            for target in targets:
                spare.symlink_to(target)
                spare.rename(swap)

    thread = threading.Thread(target=swapper)
    thread.start()
    outcomes = set()
    try:
        while not swap.is_symlink():
            await asyncio.sleep(0)
        for turn in range(150):
            try:
                done = await box.call("read_file", path="swap/secret")
                if isinstance(done.content, ReadFileReply):
                    assert done.content.text in ("mine", f"{turn - 1}", "")
                outcomes.add("read" if done.content else done.exit_code)
                await box.call("write_file", path="swap/secret", text="mine")
            except PolicyRefusalError:
                outcomes.add("refused")
    finally:
        stop.set()
        thread.join()
    assert (box.outside / "secret").read_text() == "secret"
    assert sorted(path.name for path in box.outside.iterdir()) == ["secret"]
    assert outcomes <= {"read", "refused", errno.ENOENT}
    assert {"read", "refused"} <= outcomes


# ---- listing ----


async def test_a_listing_is_sorted_deep_and_honest(box: Box) -> None:
    for name in ("b/z", "b/a", "a.txt", "a/1", "c", ".hidden/x"):
        box.make(name, "12345")
    (box.path / "link").symlink_to("a")
    os.mkfifo(box.path / "fifo")
    assert await box.names() == [".hidden", "a", "a.txt", "b", "c", "fifo", "link"]
    assert await box.names(hidden=False) == ["a", "a.txt", "b", "c", "fifo", "link"]
    deep = await box.names(depth=2)
    assert deep == [".hidden", ".hidden/x", "a", "a/1", "a.txt", "b", "b/a", "b/z", "c", "fifo", "link"]
    assert await box.names(depth=2, hidden=False) == deep[2:]
    kinds = {entry.path: entry.kind for entry in (await box.listing()).entries}
    assert kinds["a"] == "directory"
    assert kinds["c"] == "file"
    assert kinds["fifo"] == "other"
    assert kinds["link"] == "symlink"
    assert await box.names("b") == ["a", "z"], "relative to the directory listed"
    first = (await box.listing("b/..", limit=3)).entries[2]
    assert (first.path, first.size_bytes, first.mode) == ("a.txt", 5, 0o644)
    assert first.modified_s == pytest.approx((box.path / "a.txt").stat().st_mtime)


async def test_a_listing_says_when_it_was_cut(box: Box) -> None:
    for number in range(20):
        box.make(f"d/{number:02}")
    assert not (await box.listing("d", limit=20)).truncated
    cut = await box.listing(depth=9, limit=5)
    assert cut.truncated
    assert [entry.path for entry in cut.entries] == ["d", "d/00", "d/01", "d/02", "d/03"]


async def test_a_large_directory_is_listed(box: Box) -> None:
    (box.path / "many").mkdir()
    for number in range(10_000):
        (box.path / "many" / f"{number:05}{'x' * 40}").touch()
    assert len(await box.names("many", limit=100_000)) == 10_000


async def test_names_that_are_not_utf_8_are_shown_and_archived_exactly(box: Box) -> None:
    box.make("caf\udce9", "x")
    assert await box.names() == ["caf\\xe9"]
    reply = await box.archive()
    assert reply.files[0].path == "caf\\xe9"
    again = await box.extract(reply.data or b"", "again")
    assert again.files == reply.files
    assert (box.path / "again" / "caf\udce9").read_text() == "x"


ODD_NAMES = (
    *("a\udcff", "a\\xff", "a\\\\xff", "\\a\udcff", "\\\\a\udcff", "a\\xFF", "a\\x7f", "\\", "\\\\", "\\n"),
    *("a\\udcff", "�", "a\udcc3", "caf\udce9/a\\xff", "a\\\\b/\udc80", "~", "- x", "*", "é\udcff"),
    "a\udced\udca0\udc80",
)  # fmt: skip


async def test_every_name_is_shown_as_no_other_is_and_read_by_what_is_shown(box: Box) -> None:
    for name in ODD_NAMES:
        box.make(name, f"in {name!a}")
    shown = [entry.path for entry in (await box.listing(depth=9)).entries if entry.kind == "file"]
    assert len(set(shown)) == len(ODD_NAMES)
    assert {(await box.read(f"./{path}")).text for path in shown} == {f"in {name!a}" for name in ODD_NAMES}
    done = await box.call("artifacts", action="list")
    assert isinstance(done.content, ArtifactsReply)
    assert sorted(file.path for file in done.content.files) == sorted(shown)
    done = await box.call("search", pattern="in ")
    assert isinstance(done.content, SearchReply)
    assert sorted(match.path for match in done.content.matches) == sorted(shown)
    for path in shown:
        assert not (await box.write(f"./{path}", path)).created
        done = await box.call("artifacts", action="read", path=f"./{path}")
        assert isinstance(done.content, ArtifactsReply)
        assert (done.content.files[0].path, done.content.data) == (path.rpartition("/")[2], path.encode())
        found = await box.call("search", pattern=path, path=f"./{path}", literal=True)
        assert isinstance(found.content, SearchReply)
        assert [match.path for match in found.content.matches] == [path]
    assert await box.names("caf\\xe9") == ["a\\\\xff"]


@pytest.mark.parametrize("path", ["/proc/filesystems", "/sys/devices/system/cpu/online"])
@pytest.mark.parametrize("limit", [1, 5, 100, 4096, None])
async def test_a_file_of_unknown_size_is_read_to_its_end(box: Box, path: str, limit: int | None) -> None:
    content = Path(path).read_bytes()
    paths = SlotPaths(workspace="/proc", files=box.paths.files)
    read, offset, size, more = b"", 0, 0, True
    while more:
        asked = {"path": path, "offset": offset, "limit": limit, "binary": True}
        done = await run_file_tool("read_file", asked, box.runner, paths=paths)
        assert isinstance(done.content, ReadFileReply), done
        read += done.content.data or b""
        more = done.content.truncated
        assert len(read) > offset or not more, "it goes on, but nothing comes"
        assert done.content.next_offset == (len(read) if more else None)
        assert done.content.size_bytes >= len(read) + more
        offset = len(read)
        size = done.content.size_bytes
    assert (read, size) == (content, len(content))
