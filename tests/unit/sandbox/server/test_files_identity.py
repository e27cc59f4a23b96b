"""What a file keeps when its content is replaced, by write_file or patch: what it keeps when a shell writes to it."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from agentenv.containers.local_files import ContentDigest, stream_of
from tests.unit.sandbox.identity import as_user
from tests.unit.sandbox.server.file_tools_box import UID, Box, box_fixture, make_tar

__all__ = ["box_fixture"]

OTHER: Final = 20_998
DISK_BYTES: Final = 2**20
NET_RAW: Final = struct.pack("<5I", 0x0200_0001, 1 << 13, 0, 0, 0)
"""A capability of a program (linux/capability.h: VFS_CAP_REVISION_2)."""
_UNDEFINED = 2**32 - 1
_ENTRIES: Final = ((1, 6, _UNDEFINED), (2, 6, OTHER), (4, 4, _UNDEFINED), (16, 6, _UNDEFINED), (32, 0, _UNDEFINED))
ACCESS_LIST: Final = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in _ENTRIES)
"""Of a file: its owner, one more user, the group, the mask, others."""

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users, mounts and disks")


def _mode(mode: int) -> Callable[[Path], None]:
    return lambda file: file.chmod(mode)


def _owned(uid: int, gid: int, mode: int) -> Callable[[Path], None]:
    def make(file: Path) -> None:
        os.chown(file, uid, gid)
        file.chmod(mode)

    return make


def _attribute(name: str, value: bytes) -> Callable[[Path], None]:
    return lambda file: os.setxattr(file, name, value)


def _linked(file: Path) -> None:
    os.link(file, file.with_name("other-link"))


def _listed_by_its_directory(file: Path) -> None:
    os.setxattr(file.parent, "system.posix_acl_default", ACCESS_LIST)


def _in_a_closed_directory(file: Path) -> None:
    file.parent.chmod(0o555)


def _in_a_sticky_directory(file: Path) -> None:
    os.chown(file.parent, 0, 0)
    file.parent.chmod(0o1777)
    os.chown(file, OTHER, OTHER)
    file.chmod(0o666)


OWN: Final[Mapping[str, Callable[[Path], None]]] = {
    "private": _mode(0o600),
    "executable": _mode(0o751),
    "set user id": _mode(0o4755),
    "set ids": _mode(0o6711),
    "set group id without execution": _mode(0o2644),
    "user attribute": _attribute("user.key", b"value\0\xff"),
    "access list": _attribute("system.posix_acl_access", ACCESS_LIST),
    "access list of the directory": _listed_by_its_directory,
    "hard link": _linked,
    "closed directory": _in_a_closed_directory,
}
OF_OTHERS: Final[Mapping[str, Callable[[Path], None]]] = {
    "other owner": _owned(OTHER, OTHER, 0o640),
    "other group": _owned(UID, OTHER, 0o664),
    "other owner, set ids": _owned(OTHER, OTHER, 0o6755),
    "writable by all": _owned(OTHER, OTHER, 0o666),
    "sticky directory": _in_a_sticky_directory,
    "capability": lambda file: os.setxattr(file, "security.capability", NET_RAW),
}


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:  # not tmp_path: another user has to get there
        Path(name).chmod(0o755)
        yield Path(name)


def facts(directory: Path) -> dict[str, Any]:
    """Everything about the directory's files but their times and numbers."""
    found = {}
    for path in sorted(directory.iterdir()):
        status = path.stat()
        attributes = {name: os.getxattr(path, name) for name in os.listxattr(path)}
        kept = (oct(status.st_mode), status.st_uid, status.st_gid, status.st_nlink, attributes)
        found[path.name] = (*kept, path.read_bytes())
    return found


def made(directory: Path, prepare: Callable[[Path], None]) -> Path:
    directory.mkdir()
    file = directory / "file"
    file.write_bytes(b"old\nsecond\n")
    if os.geteuid() == 0:
        os.chown(directory, UID, UID)
        os.chown(file, UID, UID)
    prepare(file)
    return file


def ran(command: list[str], stdin: bytes) -> int:
    return subprocess.run(command, input=stdin, capture_output=True, timeout=60, check=False).returncode


def check_like_a_shell(box: Box, place: Path, prepare: Callable[[Path], None], identity: tuple[str, ...]) -> None:
    patch = b"--- a/file\n+++ b/file\n@@ -1,2 +1,2 @@\n-old\n+new\n second\n"
    new = b"new\nsecond\n"
    shell = made(place / "shell", prepare)
    written = not ran([*identity, "sh", "-c", 'cat > "$1"', "sh", str(shell)], new)
    for way, stdin in (("write", new), ("patch", patch)):
        ours = made(place / way, prepare)
        options = ["file", "-", str(len(stdin))] if way == "write" else [".", "-", "0", str(len(stdin))]
        done = ran([*identity, box.program[0], str(ours.parent), way, *options], stdin)
        assert (not done, facts(ours.parent)) == (written, facts(shell.parent)), way


@pytest.mark.parametrize("kind", OWN)
def test_a_users_own_file_keeps_what_it_keeps_under_a_shell(box: Box, place: Path, kind: str) -> None:
    check_like_a_shell(box, place, OWN[kind], as_user(UID))


@root_only
@pytest.mark.parametrize("kind", [*OWN, *OF_OTHERS])
@pytest.mark.parametrize("identity", [(), as_user(UID)], ids=["root", "user"])
def test_any_file_keeps_what_it_keeps_under_a_shell(
    box: Box, place: Path, kind: str, identity: tuple[str, ...]
) -> None:
    check_like_a_shell(box, place, {**OWN, **OF_OTHERS}[kind], identity)


@root_only
@pytest.mark.parametrize("identity", [(), as_user(UID)], ids=["root", "user"])
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o751, 0o6755])
def test_a_renamed_file_takes_along_what_can_be_given_and_a_copied_one_its_bits(
    box: Box, place: Path, mode: int, identity: tuple[str, ...]
) -> None:
    file = made(place / "files", _owned(OTHER, OTHER, mode | 0o006))
    os.setxattr(file, "user.key", b"value")
    os.link(file, file.with_name("link"))
    patch = b"diff --git a/file b/copy\ncopy from file\ncopy to copy\n"
    patch += b"diff --git a/file b/renamed\nrename from file\nrename to renamed\n"
    command = [*identity, box.program[0], str(file.parent), "patch", ".", "-", "0", str(len(patch))]
    assert ran(command, patch) == 0
    user = UID if identity else 0
    owner = user if identity else OTHER
    bits = oct(0o100006 | (mode & 0o777 if identity else mode))
    found = facts(file.parent)
    assert found["renamed"] == (bits, owner, owner, 1, {"user.key": b"value"}, b"old\nsecond\n")
    assert found["copy"] == (oct(0o100006 | mode & 0o777), user, user, 1, {}, b"old\nsecond\n")
    assert found["link"][-1] == b"old\nsecond\n"
    assert sorted(found) == ["copy", "link", "renamed"]


async def test_who_has_a_file_open_never_reads_half_of_another(box: Box) -> None:
    with box.make("file", "old" * 1000).open() as opened:
        await box.write("file", "new")
        assert opened.read() == "old" * 1000


async def test_an_uploaded_file_keeps_owner_and_links_as_under_cp_and_one_that_is_unpacked_is_new_as_under_tar(
    box: Box, tmp_path: Path
) -> None:
    (tmp_path / "sent").write_bytes(b"new")
    (tmp_path / "sent").chmod(0o750)
    os.utime(tmp_path / "sent", ns=(5, 5))
    for name in ("uploaded", "unpacked", "read-only"):
        box.make(f"{name}/sent", "old")
        os.link(box.path / name / "sent", box.path / name / "link")
        os.setxattr(box.path / name / "sent", "user.key", b"value")
    (box.path / "read-only/sent").chmod(0o444)
    for name in ("uploaded", "read-only"):
        stream = b"".join(stream_of(tmp_path, ContentDigest()))
        done = await box.runner.run([*box.program, "receive", name], stdin=stream, output_bytes=1000)
        assert done.exit_code == 0, done
    await box.extract(make_tar({"sent": b"new"}), "unpacked")
    kept = facts(box.path / "uploaded")
    assert kept["sent"] == kept["link"]
    assert kept["sent"][0] == oct(0o100750)
    assert kept["sent"][3:] == (2, {"user.key": b"value"}, b"new")
    assert (box.path / "uploaded/sent").stat().st_mtime_ns == 5
    for name in ("unpacked", "read-only"):  # cp -f replaces what may not be written to
        found = facts(box.path / name)
        assert (found["sent"][3:], found["link"][-1]) == ((1, {}, b"new"), b"old")


@pytest.fixture
def disk(box: Box) -> Iterator[Box]:
    """The workspace is a disk of 1 MiB."""
    options = f"size={DISK_BYTES},mode=0700,uid={UID},gid={UID}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "slotfiles-test", box.path], check=True)
    yield box
    subprocess.run(["umount", "-R", box.path], check=True)


@root_only
@pytest.mark.parametrize("kilobytes", [1, 300, 600, 900, 1100])
@pytest.mark.parametrize("tool", ["write_file", "patch"])
async def test_a_full_disk_leaves_a_file_with_two_links_as_it_was(disk: Box, tool: str, kilobytes: int) -> None:
    old = "old\n" * 50_000
    new = "n" * (kilobytes * 1000) + "\n"
    disk.make("file", old)
    os.link(disk.path / "file", disk.path / "link")
    text = f"--- a/file\n+++ b/file\n@@ -50000 +50000,2 @@\n old\n+{new}"
    done = await disk.call(tool, **({"path": "file", "text": new} if tool == "write_file" else {"patch": text}))
    assert done.exit_code in (0, errno.ENOSPC)
    written = new if tool == "write_file" else old + new
    contents = {path.name: path.read_text() for path in disk.path.iterdir()}
    assert contents == dict.fromkeys(("file", "link"), old if done.exit_code else written)
    assert done.exit_code or kilobytes < 1000


@root_only
async def test_a_patch_that_fails_midway_takes_back_what_it_wrote_over(disk: Box) -> None:
    for name in ("a", "mounted", "z"):
        disk.make(name, "old\n")
    os.link(disk.path / "a", disk.path / "link")
    subprocess.run(["mount", "--bind", disk.outside / "secret", disk.path / "mounted"], check=True)
    (disk.outside / "secret").write_text("old\n")
    changed = "--- {0}\n+++ {0}\n@@ -1 +1 @@\n-old\n+new\n"
    removed = "--- mounted\n+++ /dev/null\n@@ -1 +0,0 @@\n-old\n"
    done = await disk.call("patch", patch=changed.format("a") + changed.format("z") + removed)
    assert (done.exit_code, set(disk.tree().values())) == (errno.EBUSY, {"old\n"})
    assert sorted(disk.tree()) == ["a", "link", "mounted", "z"]
    # What is mounted is written over, as by a shell.
    done = await disk.call("patch", patch=changed.format("mounted"))
    assert (done.exit_code, (disk.outside / "secret").read_text()) == (0, "new\n")
    assert not (await disk.write("mounted", "newer")).created
    assert (disk.outside / "secret").read_text() == "newer"
    assert sorted(disk.tree()) == ["a", "link", "mounted", "z"]
