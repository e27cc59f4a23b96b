"""Archives of a workspace, and what strangers put into archives."""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import io
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from agentenv.errors import (
    InvalidArgumentsError,
    PolicyRefusalError,
)
from agentenv.wire.base import MAX_FILE_BYTES
from agentenv.wire.tools import ArtifactsReply
from tests.unit.sandbox.server.file_tools_box import (  # noqa: F401
    UID,
    Box,
    FixedRunner,
    LocalRunner,
    box_fixture,
    make_tar,
    tar_entry,
)
from tests.unit.sandbox.slotagent.agent_box import sanitized


def contents(archive: bytes | None) -> list[tuple[object, ...]]:
    """Each member; times of files alone, for a directory's is when the last name in it was made."""
    assert archive is not None
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return [
            (member.name, member.type, member.mode, member.linkname, member.size, member.isreg() and member.mtime)
            for member in tar
        ]


async def test_an_archive_comes_back_the_same(box: Box) -> None:
    box.make("src/pkg/run.sh", "#!/bin/sh\n").chmod(0o755)
    box.make("src/pkg/data", "x" * 200_000).chmod(0o600)
    (box.path / "src/empty").mkdir()
    (box.path / "src/link").symlink_to("pkg/data")
    os.mkfifo(box.path / "src/fifo")
    os.utime(box.path / "src/pkg/data", (1_000_000_000, 1_000_000_000))
    reply = await box.archive("src")
    assert [(file.path, file.size_bytes) for file in reply.files] == [("pkg/data", 200_000), ("pkg/run.sh", 10)]
    assert reply.files[1].sha256 == hashlib.sha256(b"#!/bin/sh\n").hexdigest()
    assert reply.total_bytes == 200_010
    assert reply.data is not None
    with tarfile.open(fileobj=io.BytesIO(reply.data)) as tar:
        assert tar.getnames() == ["empty", "link", "pkg", "pkg/data", "pkg/run.sh"]
    for data in (reply.data, gzip.compress(reply.data)):
        assert await box.extract(data, "copy/deep") == ArtifactsReply(files=reply.files, total_bytes=200_010)
        copy = box.path / "copy/deep"
        assert (copy / "pkg/run.sh").stat().st_mode & 0o777 == 0o755
        assert (copy / "pkg/data").stat().st_mtime == 1_000_000_000
        assert (copy / "link").readlink() == Path("pkg/data")
        assert (copy / "empty").is_dir()
    again = await box.archive("copy/deep")
    assert again.files == reply.files
    assert contents(again.data) == contents(reply.data)


async def test_one_file_is_archived_under_its_own_name(box: Box) -> None:
    box.make("a/b/one.txt", "1")
    reply = await box.archive("a/b/one.txt")
    assert [file.path for file in reply.files] == ["one.txt"]


async def test_an_archive_too_large_is_data_not_a_fault(box: Box) -> None:
    box.make("large")
    os.truncate(box.path / "large", MAX_FILE_BYTES + 1)
    for asked in ({"action": "archive"}, {"action": "list"}, {"action": "read", "path": "large"}):
        done = await box.call("artifacts", **asked)
        assert (done.content, done.exit_code) == (None, errno.EFBIG), asked
        assert "exceeds" in done.stderr


async def test_a_list_says_what_the_archive_says_without_the_tar(box: Box) -> None:
    box.make("src/b", "two")
    box.make("src/a/deep", "1")
    (box.path / "src/link").symlink_to("b")
    (box.path / "src/empty").mkdir()
    done = await box.call("artifacts", action="list", path="src")
    archived = await box.archive("src")
    assert done.content == ArtifactsReply(files=archived.files, total_bytes=archived.total_bytes)
    assert [file.path for file in archived.files] == ["a/deep", "b"]


async def test_a_file_that_is_read_comes_with_its_digest(box: Box) -> None:
    content = bytes(range(256)) * 2000
    box.make("a/blob").write_bytes(content)
    done = await box.call("artifacts", action="read", path="a/blob")
    assert isinstance(done.content, ArtifactsReply)
    assert done.content.data == content
    assert done.content == (await box.archive("a/blob")).model_copy(update={"data": content})


@pytest.mark.parametrize(
    "member",
    [
        ("/etc/cron.d/x", b""),
        ("../x", b""),
        ("a/../../x", b""),
        ("link", tar_entry("link", tarfile.SYMTYPE, "/etc")),
        ("link", tar_entry("link", tarfile.SYMTYPE, "../outside")),
        ("a/link", tar_entry("a/link", tarfile.SYMTYPE, "b/../../..")),
        ("device", tar_entry("device", tarfile.CHRTYPE, devmajor=1, devminor=3)),
        ("fifo", tar_entry("fifo", tarfile.FIFOTYPE)),
        ("hard", tar_entry("hard", tarfile.LNKTYPE, "../outside/secret")),
    ],
    ids=lambda member: str(member[0]),
)
async def test_entries_that_lead_outside_are_refused_before_anything_is_written(
    box: Box, member: tuple[str, bytes | tarfile.TarInfo]
) -> None:
    with pytest.raises(PolicyRefusalError):
        await box.extract(make_tar({"first": b"1", member[0]: member[1]}))
    assert await box.names() == []


async def test_an_entry_behind_a_link_of_the_archive_is_refused(box: Box) -> None:
    with pytest.raises(PolicyRefusalError, match="below a link"):
        await box.extract(make_tar({"s": tar_entry("s", tarfile.SYMTYPE, "."), "s/x": b"1"}))


async def test_links_in_the_workspace_do_not_lead_an_extraction_out(box: Box) -> None:
    (box.path / "way").symlink_to("../outside")
    with pytest.raises(PolicyRefusalError):
        await box.extract(make_tar({"way/secret": b"forged"}))
    assert (box.outside / "secret").read_text() == "secret"


async def test_extraction_replaces_a_link_instead_of_writing_through_it(box: Box) -> None:
    box.make("target", "old")
    (box.path / "x").symlink_to("target")
    await box.extract(make_tar({"x": b"new"}))
    assert (await box.read("target")).text == "old"
    assert not (box.path / "x").is_symlink()


async def test_extraction_drops_setuid_and_takes_read_only_directories(box: Box) -> None:
    tool = tar_entry("d/tool", tarfile.REGTYPE, mode=0o6755)
    await box.extract(make_tar({"d": tar_entry("d", tarfile.DIRTYPE, mode=0o555), "d/tool": tool}))
    assert (box.path / "d/tool").stat().st_mode & 0o7777 == 0o755
    assert (box.path / "d").stat().st_mode & 0o7777 == 0o555
    (box.path / "d").chmod(0o755)


async def test_hard_links_become_copies(box: Box) -> None:
    await box.extract(make_tar({"./one": b"1", "two": tar_entry("two", tarfile.LNKTYPE, "./one")}))
    assert (await box.read("two")).text == "1"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"this is no tar",
        gzip.compress(b"nor is this"),
        gzip.compress(b"cut")[:-5],
        b"\x1f\x8b garbage",
        make_tar({"x": b"y" * 5000})[:2000],
        gzip.compress(b"\0" * (MAX_FILE_BYTES + 1), 1),
        gzip.compress(b"") * 1001,
        make_tar({"x": b"", "link": tar_entry("link", tarfile.LNKTYPE, "missing")}),
        make_tar({f"{number:0200}": tar_entry("L" * 200, tarfile.GNUTYPE_LONGNAME) for number in range(2000)}),
    ],
    ids=["empty", "text", "gzip-text", "gzip-cut", "gzip-garbage", "cut", "bomb", "parts", "dangling", "recursion"],
)
async def test_what_is_no_archive_is_the_callers_mistake(box: Box, data: bytes) -> None:
    with pytest.raises(InvalidArgumentsError):
        await box.extract(data)
    assert await box.names() == []


def _record(kind: bytes, path: bytes = b"", *, size: int = 0, mode: int = 0o644) -> bytes:
    header = kind + b"\0" + mode.to_bytes(2, "little") + len(path).to_bytes(4, "little") + b"\0" * 8
    return header + size.to_bytes(8, "little") + b"\0" * 8 + path


async def test_slotfiles_survives_hostile_instructions(box: Box) -> None:
    """Records cut anywhere, and with bytes flipped, end in a clean exit code, and no sanitizer speaks."""
    shutil.copy(sanitized().files, box.program[0])
    good = _record(b"d", b"d") + _record(b"f", b"d/x", size=3) + b"abc" + _record(b"m", b"d") + _record(b"e")
    variants = [good[:cut] for cut in range(0, len(good), 7)]
    variants += [good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :] for at in range(0, len(good), 3)]
    program, root = box.program
    for stdin in variants:
        done = await box.runner.run([program, root, "extract", "into"], stdin=stdin, output_bytes=1000)
        with contextlib.suppress(OSError):
            (box.path / "into/d").chmod(0o755)
        assert b"anitizer" not in done.stderr
        assert b"runtime error" not in done.stderr
        assert done.exit_code < 128 or 200 <= done.exit_code <= 205, (done, stdin)
