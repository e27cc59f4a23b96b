"""Local files and directories as a transfer stream, and a transfer stream as local files.

Blocking, one piece at a time: callers run it in a thread. Incoming data is not trusted: nothing is written outside
the target or through a link, and a file gets its name only after its SHA-256 was verified.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from agentenv.errors import InvalidArgumentsError
from agentenv.wire.transfers import CHUNK_BYTES, CHUNKED, MAX_ENTRIES, Decoder, Entry, Sink, chunk

_MAX_LINKS_ON_THE_WAY = 40
"""The kernel's limit."""


class ContentDigest:
    """Content of a transfer. ``sha256`` is the file's, or for a directory that of the lines ``<sha256>  <path>`` of
    its files, in order: the same on both sides."""

    def __init__(self) -> None:
        self.files = 0
        self.total_bytes = 0
        self._lines = sha256()
        self._only = ""
        self._is_file = False

    @property
    def sha256(self) -> str:
        """In hex."""
        return self._only if self._is_file else self._lines.hexdigest()

    def add(self, path: bytes, digest: str) -> None:
        """One more file."""
        self.files += 1
        self._is_file = self._is_file or not path
        self._only = digest
        self._lines.update(digest.encode() + b"  " + path + b"\n")


def size_of(source: Path) -> int:
    """Bytes of a file, or of all files below a directory. Raises OSError."""
    if not source.is_dir():
        return source.stat().st_size
    total = 0
    for directory, _, names in os.walk(source):
        for name in names:
            status = os.lstat(os.path.join(directory, name))  # noqa: PTH118 (many, and already strings)
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def stream_of(source: Path, tally: ContentDigest) -> Iterator[bytes]:
    """Generate the stream, piece by piece. A link at ``source`` is followed, links below it are sent as links.

    Raises: OSError; InvalidArgumentsError for anything but files, directories and links, or for too many entries.
    """
    source = source.resolve(strict=True)
    status = source.stat()
    if stat.S_ISREG(status.st_mode):
        yield from _file(source, b"", tally)
    elif stat.S_ISDIR(status.st_mode):
        yield Entry("d", mode=0o755).encode()
        modes: list[Entry] = []
        yield from _below(source, b"", modes, tally)
        for entry in reversed(modes):
            yield entry.encode()
    else:
        raise InvalidArgumentsError(f"{source} is neither a file nor a directory")
    yield Entry("e").encode()


def _below(directory: Path, prefix: bytes, modes: list[Entry], tally: ContentDigest) -> Iterator[bytes]:
    with os.scandir(directory) as listing:
        entries = sorted(listing, key=lambda entry: os.fsencode(entry.name))
    for entry in entries:
        path = prefix + os.fsencode(entry.name)
        if entry.is_symlink():
            yield Entry("l", path, os.fsencode(os.readlink(entry.path))).encode()  # noqa: PTH115 (pathlib would change it)
        elif entry.is_dir():
            if len(modes) >= MAX_ENTRIES:
                raise InvalidArgumentsError(f"more than {MAX_ENTRIES} directories")
            yield Entry("d", path).encode()
            modes.append(Entry("m", path, mode=stat.S_IMODE(entry.stat().st_mode) & 0o777))
            yield from _below(Path(entry.path), path + b"/", modes, tally)
        elif entry.is_file():
            yield from _file(Path(entry.path), path, tally)
        else:
            raise InvalidArgumentsError(f"{entry.path} is neither a file, a directory nor a link")


def _file(source: Path, path: bytes, tally: ContentDigest) -> Iterator[bytes]:
    with source.open("rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        mode = stat.S_IMODE(status.st_mode) & 0o777
        yield Entry("f", path, mode=mode, size=CHUNKED, modified_ns=status.st_mtime_ns).encode()
        digest = sha256()
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
            tally.total_bytes += len(piece)
            yield chunk(piece)
    tally.add(path, digest.hexdigest())
    yield chunk(b"") + digest.digest()


class TreeWriter:
    """Writes a stream to ``target``: call feed, then finish. A context manager that leaves no partial file."""

    def __init__(self, target: Path, *, max_bytes: int) -> None:
        self.tally = ContentDigest()
        self.expected_bytes: int | None = None
        """Size of the file as announced; None for a directory, or before the first record."""
        self._target = target
        self._max_bytes = max_bytes
        self._links: dict[bytes, bytes] = {}
        self._led: dict[bytes, bytes | None] = {}
        self._modes: dict[Path, int] = {}
        self._made: set[Path] = set()
        self.entries = 0
        """Number of records so far."""
        self._part: IO[bytes] | None = None
        self._entry = Entry("e")
        self._decoder = Decoder(Sink(self._begin, self._content, self._verified))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._part is not None:
            self._part.close()
            with contextlib.suppress(OSError):
                Path(self._part.name).unlink()
            self._part = None

    def feed(self, data: bytes) -> None:
        """Raises: ProtocolError, BrokenOffError, OSError (the local disk; EFBIG beyond ``max_bytes``; EPERM for
        what lies behind a link)."""
        self._decoder.feed(data)

    def finish(self) -> bool:
        """Complete the target after the stream has ended: create links, set modes. False if the stream was cut;
        then nothing is done.

        Raises OSError (the local disk; EPERM for a link that leads out of the target, before any is created).
        """
        if not self._decoder.complete:
            return False
        for path in self._links:
            self._reached(path)
        for path, link in self._links.items():
            place = self._place(path)
            with contextlib.suppress(FileNotFoundError):
                place.unlink()
            place.symlink_to(os.fsdecode(link))
        for directory, mode in reversed(self._modes.items()):
            directory.chmod(mode)
        return True

    # -- Sink --------------------------------------------------------------------------------------

    def _begin(self, entry: Entry) -> None:
        self._entry = entry
        self.entries += 1
        if not entry.path:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            if entry.kind == "f":
                self.expected_bytes = None if entry.size == CHUNKED else entry.size
                self._open_part(self._target)
            else:
                self._target.mkdir(exist_ok=True)
        elif entry.kind == "l":
            self._links[entry.path] = entry.link
        elif entry.kind == "f":
            self._links.pop(entry.path, None)
            self._open_part(self._place(entry.path))
        else:
            place = self._place(entry.path)
            self._directory(place)
            self._modes[place] = entry.mode & 0o777

    def _content(self, piece: bytes) -> None:
        self.tally.total_bytes += len(piece)
        if self.tally.total_bytes > self._max_bytes:
            raise OSError(errno.EFBIG, f"more than {self._max_bytes} bytes", str(self._target))
        assert self._part is not None
        self._part.write(piece)

    def _verified(self, digest: str) -> None:
        part, self._part = self._part, None
        assert part is not None
        place = self._place(self._entry.path)
        try:
            part.close()
            Path(part.name).chmod(self._entry.mode & 0o777)
            os.utime(part.name, ns=(self._entry.modified_ns, self._entry.modified_ns))
            Path(part.name).replace(place)
        except BaseException:
            Path(part.name).unlink(missing_ok=True)
            raise
        self.tally.add(self._entry.path, digest)

    # ----------------------------------------------------------------------------------------------

    def _open_part(self, place: Path) -> None:
        if not place.is_symlink() and place.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(place))
        self._part = tempfile.NamedTemporaryFile(  # noqa: SIM115 (closed in __exit__ or _verified)
            prefix=".agentenv-", suffix=".part", dir=place.parent, delete=False
        )

    def _place(self, path: bytes) -> Path:
        """Path of an entry below the target; every directory on the way is a real one, or created."""
        if not path:
            return self._target
        *parents, name = os.fsdecode(path).split("/")
        at = self._target
        for parent in parents:
            at = at / parent
            self._directory(at)
        return at / name

    def _directory(self, place: Path) -> None:
        if place in self._made:
            return
        place.mkdir(exist_ok=True)
        status = place.lstat()
        if stat.S_ISLNK(status.st_mode):
            raise PermissionError(errno.EPERM, "lies behind a link", str(place))
        if (status.st_mode & 0o700) != 0o700:  # of an earlier download; it gets its own mode in the end
            place.chmod(stat.S_IMODE(status.st_mode) | 0o700)
        self._made.add(place)

    def _reached(self, path: bytes, depth: int = 0) -> bytes | None:
        """Where below the target a link leads, followed as the kernel does through both transferred and existing
        links: two links can lead out together although neither does by its text. None for a cycle.

        Raises OSError: EPERM when it leads out; ELOOP.
        """
        if path in self._led:
            return self._led[path]
        if depth > _MAX_LINKS_ON_THE_WAY:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fsdecode(path))
        link = self._link_at(path)
        if link is None:
            return path
        self._led[path] = None  # reached again meanwhile: a cycle
        if link.startswith(b"/") or not link:
            raise _leads_out(path)
        at = posixpath.dirname(path)
        for name in link.split(b"/"):
            if name == b"..":
                if not at:
                    raise _leads_out(path)
                at = posixpath.dirname(at)
            elif name not in (b"", b"."):
                reached = self._reached(posixpath.join(at, name), depth + 1)
                if reached is None:
                    return None
                at = reached
        self._led[path] = at
        return at

    def _link_at(self, path: bytes) -> bytes | None:
        if path in self._links:
            return self._links[path]
        try:
            return os.readlink(os.path.join(os.fsencode(self._target), path))  # noqa: PTH115, PTH118 (bytes)
        except OSError:
            return None  # not a link


def _leads_out(path: bytes) -> PermissionError:
    return PermissionError(errno.EPERM, "the slot sent a link that leads out of it", os.fsdecode(path))
