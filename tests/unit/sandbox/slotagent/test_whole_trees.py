"""slottar pack-whole and unpack-whole: a tree comes out as it went in, seen by a walk of its own."""

from __future__ import annotations

import errno
import io
import os
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentenv.sandbox.slotagent.build import ensure_built

ROOT: Final = os.geteuid() == 0
MODES: Final = st.integers(0, 0o7777) if ROOT else st.integers(0, 0o7777).map(lambda mode: mode | 0o700)
"""An ordinary user's walk could not look into what has no rights for him."""
TIMES: Final = st.integers(-(10**18), 4 * 10**18)
NAMES: Final = st.one_of(
    st.sampled_from(["a", "b", "c", ".hidden", "with space", "new\nline", "ü", "x" * 255]),
    st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1, max_size=12),
).filter(lambda name: name not in (".", ".."))
PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Entry:
    """Something to be made; ``where`` and ``of`` choose among what there is."""

    kind: str
    name: str
    where: int
    of: int
    mode: int
    accessed_ns: int
    modified_ns: int
    attributes: dict[str, bytes]
    size: int
    parts: list[tuple[int, bytes]]


ENTRIES: Final = st.lists(
    st.builds(
        Entry,
        kind=st.sampled_from(["file", "file", "folder", "link", "symlink", "pipe", "whiteout"]),
        name=NAMES,
        where=st.integers(0, 100),
        of=st.integers(0, 100),
        mode=MODES,
        accessed_ns=TIMES,
        modified_ns=TIMES,
        attributes=st.dictionaries(
            st.sampled_from(["user.a", "user.overlay.opaque", "user.ü"]), st.binary(max_size=50)
        ),
        size=st.integers(0, 60 * PAGE),
        parts=st.lists(st.tuples(st.integers(0, 50 * PAGE), st.binary(min_size=1, max_size=300)), max_size=3),
    ),
    max_size=14,
)


@pytest.fixture(scope="module")
def slottar(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(ensure_built(tmp_path_factory.mktemp("cache")).tar)


@pytest.fixture
def place() -> Iterator[Path]:
    directory = tempfile.mkdtemp(dir="/dev/shm")  # as workspaces, a tmpfs
    yield Path(directory)
    subprocess.run(["rm", "-rf", directory], check=True)  # shutil.rmtree cannot remove what is so deep


def make(root: Path, entries: list[Entry]) -> None:
    """The tree; what cannot be is left out."""
    root.mkdir()
    folders, paths, dated = [root], [root], [(root, 0o700, 7, 8)]
    for entry in entries:
        path = folders[entry.where % len(folders)] / entry.name
        with suppress(FileExistsError, OSError):
            _make_one(path, entry, paths[entry.of % len(paths)])
            paths.append(path)
            if entry.kind == "folder":
                folders.append(path)
            if entry.kind != "link":
                dated.append((path, entry.mode, entry.accessed_ns, entry.modified_ns))
    for path, mode, accessed_ns, modified_ns in reversed(dated):
        if not path.is_symlink():
            path.chmod(mode)
        os.utime(path, ns=(accessed_ns, modified_ns), follow_symlinks=False)


def _make_one(path: Path, entry: Entry, other: Path) -> None:
    match entry.kind:
        case "file":
            with path.open("xb") as file:
                file.truncate(entry.size)
                for begin, content in entry.parts:
                    file.seek(begin)
                    file.write(content)
        case "folder":
            path.mkdir()
        case "link":
            os.link(other, path, follow_symlinks=False)
        case "symlink":
            path.symlink_to(entry.name * 2)
        case "pipe":
            os.mkfifo(path)
        case _:
            os.mknod(path, stat.S_IFCHR)
    if entry.kind in ("file", "folder"):
        for name, value in entry.attributes.items():
            os.setxattr(path, name, value)


def seen(root: Path) -> dict[str, Any]:
    """Everything that can be told of each entry, and the groups of names that are one file. Nothing is changed."""
    found: dict[str, Any] = {}
    names: dict[int, list[str]] = {}

    def look(path: Path) -> None:
        status = path.lstat()
        name = str(path.relative_to(root))
        content: Any = None
        if stat.S_ISDIR(status.st_mode):
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOATIME)
            with os.scandir(directory) as listed:
                content = sorted(one.name for one in listed)
            os.close(directory)
        elif stat.S_ISREG(status.st_mode):
            content = _content(path, status.st_size)
        elif stat.S_ISLNK(status.st_mode):
            content = str(path.readlink())
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)  # as if unread
        attributes = {
            key: os.getxattr(path, key, follow_symlinks=False) for key in os.listxattr(path, follow_symlinks=False)
        }
        found[name] = (
            *(oct(status.st_mode), status.st_uid, status.st_gid, status.st_nlink, status.st_rdev),
            *(status.st_atime_ns, status.st_mtime_ns, attributes, content),
            0 if stat.S_ISDIR(status.st_mode) else status.st_size,
        )
        if not stat.S_ISDIR(status.st_mode):
            names.setdefault(status.st_ino, []).append(name)
        for child in content if stat.S_ISDIR(status.st_mode) else ():
            look(path / child)

    look(root)
    return {"entries": found, "files": sorted(map(sorted, names.values()))}


def _content(path: Path, size: int) -> tuple[bytes, list[tuple[int, int]]]:
    """The bytes, and where there are any."""
    file = os.open(path, os.O_RDONLY | os.O_NOATIME)
    try:
        parts, at = [], 0
        while at < size:
            try:
                begin = os.lseek(file, at, os.SEEK_DATA)
            except OSError:  # ENXIO: there is no more
                break
            at = os.lseek(file, begin, os.SEEK_HOLE)
            parts.append((begin, at))
        return os.pread(file, size, 0), parts
    finally:
        os.close(file)


def pack(slottar: str, tree: Path) -> bytes:
    return subprocess.run([slottar, "pack-whole", str(tree)], stdout=subprocess.PIPE, check=True).stdout


def unpack(slottar: str, tar: bytes, tree: Path) -> int:
    tree.mkdir()
    return subprocess.run([slottar, "unpack-whole", str(tree)], input=tar, capture_output=True).returncode


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ENTRIES)
def test_a_tree_comes_out_as_it_went_in_and_is_left_as_it_was(slottar: str, entries: list[Entry]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        tree, copy = Path(directory, "tree"), Path(directory, "copy")
        make(tree, entries)
        before = seen(tree)
        tar = pack(slottar, tree)
        assert unpack(slottar, tar, copy) == 0
        after = seen(copy)
        assert after == before
        assert seen(tree)["entries"] == before["entries"]
        assert tar == pack(slottar, copy), "the same files make the same tar"


def test_holes_are_in_the_format_that_others_read(slottar: str, place: Path) -> None:
    (place / "tree").mkdir()
    with (place / "tree" / "hole").open("wb") as file:
        file.truncate(50 * PAGE)
        file.seek(20 * PAGE)
        file.write(b"amid")
    tar = pack(slottar, place / "tree")
    assert len(tar) < 20 * PAGE
    with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
        content = opened.extractfile("hole")
        assert content is not None
        assert content.read() == (place / "tree" / "hole").read_bytes()


@pytest.mark.parametrize("map_text", [b"9\n0\n1\n", b"1\n0\n9999\n", b"x", b"1\n99999\n1\n", b"1\n0\n", b""])
def test_a_map_of_holes_that_cannot_be_is_refused(slottar: str, place: Path, map_text: bytes) -> None:
    stored = map_text.ljust(512, b"\0") + b"x"
    member = tarfile.TarInfo("file")
    member.size = len(stored)
    member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "100"}
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as opened:
        opened.addfile(member, io.BytesIO(stored))
    assert unpack(slottar, written.getvalue(), place / "copy") == errno.EINVAL


def test_a_tree_that_is_as_deep_as_names_can_be_named(slottar: str, place: Path) -> None:
    tree = place / "tree"
    tree.mkdir()
    at, length = os.open(tree, os.O_RDONLY), 0
    while length < 4096:
        os.mkdir("d", dir_fd=at)
        deeper = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at, length = deeper, length + 2
        if length == 4000:
            assert unpack(slottar, pack(slottar, tree), place / "copy") == 0
    os.close(at)
    failed = subprocess.run([slottar, "pack-whole", str(tree)], capture_output=True)
    assert failed.returncode == 127
    assert b"File name too long" in failed.stderr
