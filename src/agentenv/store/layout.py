"""The directory of a store: what lies where, and how files come into being in it.

::

    layers/sha256-DIFFID.tar     a layer, uncompressed and verified; shared by all images that have it
    images/sha256-DIGEST.idx     an image's index (erofs.py)
    images/sha256-DIGEST.json    its manifest (manifest.py), written last: with it the image is there
    names/HASH.json              which image a reference meant when it was last pulled
    blobs/sha256-DIGEST.json     which layer a compressed blob held, so that it is not downloaded again
    pulls/HASH.part/             a download in progress, or one that was interrupted
    trees/sha256-NAME/           an unpacked layer, where the kernel cannot mount images as they are (unpacked.py)
    probe.idx                    the index of an image without files: whether the kernel can is tried with it
    ranges/NUMBER                an empty file, whose lock is a range of user ids (sandbox/supervisor/id_ranges.py)

A file is written as ``NAME.part`` and renamed, so a process that is killed leaves nothing but parts. A process that
writes a part holds its lock (``flock``); an unlocked part is abandoned, and the next writer continues with it or a
sweep removes it. A process that uses a finished layer or image holds the lock of its tar or manifest, shared; to remove
them, it must be held exclusively. No lock needs a file of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from agentenv.errors import AgentEnvError, InfraError
from agentenv.locks import hold
from agentenv.store.erofs import index_of
from agentenv.store.tree import Tree

PART: Final = ".part"
RESERVE_BYTES: Final = 1024**3
"""What images, and what builds copy, leave free on a disk: others work there too."""
_BEGIN_TO_WRITE: Final = 2  # SYNC_FILE_RANGE_WRITE
RANGES: Final = 4096
"""As many ranges of ids as a node has (agentenv.sandbox.supervisor.user_namespace)."""


@dataclass(frozen=True)
class Layout:
    """Paths below ``directory``. Digests are ``sha256:HEX``, and have been checked to be."""

    directory: Path

    @property
    def layers(self) -> Path:
        """The layers' tars."""
        return self.directory / "layers"

    @property
    def images(self) -> Path:
        """Indexes and manifests."""
        return self.directory / "images"

    @property
    def names(self) -> Path:
        """What references meant."""
        return self.directory / "names"

    @property
    def blobs(self) -> Path:
        """What compressed blobs held."""
        return self.directory / "blobs"

    @property
    def pulls(self) -> Path:
        """Downloads."""
        return self.directory / "pulls"

    @property
    def ranges(self) -> Path:
        """Ranges of user ids."""
        return self.directory / "ranges"

    def create(self) -> None:
        """Create what is missing. Raises OSError."""
        for path in (self.layers, self.images, self.names, self.blobs, self.pulls, self.ranges):
            path.mkdir(parents=True, exist_ok=True)
        if not self.trees.exists():
            self.trees.mkdir(exist_ok=True)
            self.trees.chmod(0o1777)  # its writers have ids of their own
        if not self.probe.exists():
            replace(self.probe, index_of(Tree().root, []))
        if not (self.ranges / str(RANGES - 1)).exists():
            for number in range(RANGES):
                # Not touch(): who makes the same one at the same time may not write to it, unless that is root.
                os.close(os.open(self.ranges / str(number), os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o444))

    @property
    def trees(self) -> Path:
        """Unpacked layers, where images cannot be mounted as they are."""
        return self.directory / "trees"

    @property
    def probe(self) -> Path:
        """The index of an image without files, for trying whether this kernel mounts one."""
        return self.directory / "probe.idx"

    def layer(self, diff_id: str) -> Path:
        """A layer's tar."""
        return self.layers / f"{_file(diff_id)}.tar"

    def tree(self, name: str) -> Path:
        """An unpacked layer, by its name (:mod:`agentenv.store.unpacked`)."""
        return self.trees / _file(name)

    def index(self, digest: str) -> Path:
        """An image's index."""
        return self.images / f"{_file(digest)}.idx"

    def manifest(self, digest: str) -> Path:
        """An image's manifest."""
        return self.images / f"{_file(digest)}.json"

    def blob(self, digest: str) -> Path:
        """What a compressed blob held."""
        return self.blobs / f"{_file(digest)}.json"

    def name(self, reference: str) -> Path:
        """What a reference meant."""
        return self.names / f"{_hashed(reference)}.json"

    def pull(self, reference: str) -> Path:
        """The download of a reference."""
        return self.pulls / f"{_hashed(reference)}{PART}"


def digest_of(path: Path) -> str:
    """The digest in a file's name, as :class:`Layout` forms it."""
    return path.name.partition(".")[0].replace("-", ":", 1)


def _file(digest: str) -> str:
    return digest.replace(":", "-", 1)


def _hashed(reference: str) -> str:
    return hashlib.sha256(reference.encode()).hexdigest()[:32]


@contextmanager
def written(final: Path, waiting: Callable[[], None] | None = None) -> Iterator[BinaryIO | None]:
    """An empty file, which becomes ``final`` when the block ends; if it raises, nothing is left. None when ``final``
    is there already, or another process is writing it, which is waited for (``waiting`` is called once then).

    What was written is on the disk when ``final`` appears. Raises OSError.
    """
    if not final.exists():
        with _part(final, waiting) as file:
            if not final.exists():
                yield file
                file.flush()
                os.fsync(file.fileno())
                part_of(final).rename(final)
                return
    yield None


def check_room(place: Path | int, wanted_bytes: int = 0) -> None:
    """Raise OSError (ENOSPC) when so many bytes more would leave less than RESERVE_BYTES, or a twentieth of a small
    disk, on the disk of a path or a descriptor."""
    disk = os.statvfs(place)
    reserve_bytes = min(RESERVE_BYTES, disk.f_blocks * disk.f_frsize // 20)
    if disk.f_bavail * disk.f_frsize - wanted_bytes < reserve_bytes:
        full = os.strerror(errno.ENOSPC)
        raise OSError(
            errno.ENOSPC, f"{full}: {wanted_bytes} more bytes would leave less than the reserve of {reserve_bytes}"
        )


def begin_to_disk(file: BinaryIO, offset: int, length: int) -> None:
    """Have the kernel begin to write a part of a file to its disk, and do not wait for it: the fsync at the end finds
    most of it done. A hint, without effect where there is no disk or no sync_file_range(2)."""
    with contextlib.suppress(OSError, AttributeError):
        begin = ctypes.CDLL(None).sync_file_range
        begin(file.fileno(), ctypes.c_int64(offset), ctypes.c_int64(length), _BEGIN_TO_WRITE)


def replace(final: Path, content: bytes) -> None:
    """Write a small file, whatever it was before. Raises OSError."""
    with _part(final, None) as file:
        file.write(content)
        file.flush()
        part_of(final).replace(final)


@contextmanager
def _part(final: Path, waiting: Callable[[], None] | None) -> Iterator[BinaryIO]:
    """The empty part of a file, which no other process writes; it is removed unless the block renames it."""
    part = part_of(final)
    while True:
        with contextlib.suppress(FileNotFoundError):  # its writer has just finished, or a sweep took it
            descriptor = hold(part, flags=os.O_RDWR | os.O_CREAT, waiting=waiting)
            break
    with os.fdopen(descriptor, "r+b") as file:
        try:
            file.truncate()
            yield file
        finally:
            if _is_at(descriptor, part):
                part.unlink()


def part_of(final: Path) -> Path:
    """What a file is called while it is written."""
    return final.with_name(final.name + PART)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


@contextmanager
def downloading(directory: Path, waiting: Callable[[], None] | None = None) -> Iterator[int]:
    """A directory for one download at a time; there may be in it what an earlier one left that did not end. Removed
    afterwards, except when the block raises something that another attempt may cure.

    Yields a descriptor that holds the lock: a program that inherits it keeps others out when this process is killed.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            directory.mkdir()  # exist_ok would look again, and raise when another download has just removed it
        with contextlib.suppress(FileNotFoundError):
            descriptor = hold(directory, waiting=waiting)
            break
    try:
        yield descriptor
        shutil.rmtree(directory)
    except AgentEnvError as error:
        if not isinstance(error, InfraError):
            shutil.rmtree(directory)
        raise
    finally:
        os.close(descriptor)


def sweep(layout: Layout, *, downloads: bool = False) -> None:
    """Remove what dead processes left; ``downloads``: also what later downloads could continue with. What a process is
    writing stays."""
    for place in (layout.layers, layout.images, layout.names, layout.blobs):
        for part in place.glob(f"*{PART}"):
            _remove_unless_held(part, part)
    for index in layout.images.glob("*.idx"):  # its writer died before the manifest, or its remover after it
        manifest = index.with_suffix(".json")
        if not manifest.exists():
            _remove_unless_held(part_of(manifest), index, unless=manifest)
    if downloads:
        for directory in layout.pulls.glob(f"*{PART}"):
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                descriptor = hold(directory, wait=False)
                shutil.rmtree(directory)
                os.close(descriptor)


def _remove_unless_held(part: Path, path: Path, *, unless: Path | None = None) -> None:
    """Remove a part, and ``path`` that is written under its lock, unless the lock is held or ``unless`` is there."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError):
        descriptor = hold(part, flags=os.O_RDWR | os.O_CREAT, wait=False)
        try:
            if unless is None or not unless.exists():
                path.unlink(missing_ok=True)
        finally:
            part.unlink(missing_ok=True)
            os.close(descriptor)
