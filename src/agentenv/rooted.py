"""Reading below a directory that a stranger has filled: nothing outside of it is read, no pipe or device is opened, and
no file is read beyond a bound."""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

LINKS_MAX: Final = 40
"""Links followed for one path; the kernel's own limit."""
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LeadsOutError(ValueError):
    """A path or a link on it leads out of the directory, or through too many links; the message says where."""


class RootedDirectory:
    """A directory held open; a context manager. Paths are relative to it, have no ``.`` and ``..``, and are empty for
    the directory itself. Every path is opened one component after the other, each relative to the one before, and
    none may be a link: what changes meanwhile gives an OSError, never a file from elsewhere. Raises OSError.

    ``as_root``: links are followed as by a program whose root it is: an absolute one leads to what is in it, and none
    leads out.
    """

    def __init__(self, directory: Path, *, as_root: bool = False) -> None:
        self.directory = directory
        self._as_root = as_root
        self._root = -1

    def __enter__(self) -> Self:
        self._root = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._root)

    @contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """The descriptor of a directory."""
        descriptor = os.dup(self._root)
        try:
            for part in filter(None, path.split("/")):
                deeper = os.open(part, _DIRECTORY, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = deeper
            yield descriptor
        finally:
            os.close(descriptor)

    def file(self, path: str) -> IO[bytes]:
        """A regular file, to read and close."""
        directory, name = posixpath.split(path)
        with self.opened(directory) as descriptor, ExitStack() as stack:
            _check_regular(os.lstat(name, dir_fd=descriptor), path)  # to open a device may do something
            number = os.open(name, _FILE, dir_fd=descriptor)
            stack.callback(os.close, number)
            _check_regular(os.fstat(number), path)
            stack.pop_all()
            return os.fdopen(number, "rb")

    def content(self, path: str, limit_bytes: int) -> bytes:
        """What a regular file has; the links on its path are followed. Raises LeadsOutError, and OSError if it has more
        than ``limit_bytes``."""
        with self.file(self.followed(path)) as file:
            found = file.read(limit_bytes + 1)
        if len(found) > limit_bytes:
            raise OSError(errno.EFBIG, f"it has more than {limit_bytes} bytes", path)
        return found

    def entries(self, path: str) -> list[tuple[str, os.stat_result, str]]:
        """What is in a directory, sorted: names, their state, and where a link points to (empty for all others)."""
        with self.opened(path) as descriptor, os.scandir(descriptor) as scanned:
            return [(name, *_seen(name, descriptor)) for name in sorted(entry.name for entry in scanned)]

    def status(self, path: str) -> os.stat_result:
        """The state of what is at the path, which may be a link."""
        directory, name = posixpath.split(path)
        with self.opened(directory) as descriptor:
            return os.lstat(name, dir_fd=descriptor) if name else os.fstat(descriptor)

    def seen(self, path: str) -> os.stat_result | None:
        """The state of what a path names: links on the way are followed, a last one is not. None if nothing is there.
        Raises LeadsOutError."""
        directory, name = posixpath.split(path)
        try:
            return self.status(posixpath.join(self.followed(directory), name))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def followed(self, path: str) -> str:
        """The path with every link on it followed. Raises LeadsOutError, and OSError if a part does not exist."""
        done: list[str] = []
        waiting = [part for part in reversed(path.split("/")) if part]
        links = 0
        while waiting:
            part = waiting.pop()
            if part == "..":
                if not done and not self._as_root:
                    raise LeadsOutError("it leads out by ..")
                del done[-1:]
                continue
            with self.opened("/".join(done)) as descriptor:
                _, target = _seen(part, descriptor)
            done.append(part)
            if not target:
                continue
            links += 1
            if target.startswith("/") and not self._as_root:
                raise LeadsOutError(f"{'/'.join(done)} is a link to {target}")
            if links > LINKS_MAX:
                raise LeadsOutError(f"more than {LINKS_MAX} links follow one another")
            done = [] if target.startswith("/") else done[:-1]
            waiting += [step for step in reversed(target.split("/")) if step not in ("", ".")]
        return "/".join(done)


def read_beneath(directory: Path, path: str, limit_bytes: int) -> bytes:
    """:meth:`RootedDirectory.content` of a directory that is opened for it. Raises LeadsOutError, OSError."""
    with RootedDirectory(directory) as tree:
        return tree.content(path, limit_bytes)


def _check_regular(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISLNK(status.st_mode):  # to open a link fails by itself
        raise OSError(errno.EINVAL, "not a regular file", path)


def _seen(name: str, directory: int) -> tuple[os.stat_result, str]:
    status = os.lstat(name, dir_fd=directory)
    return status, os.readlink(name, dir_fd=directory) if stat.S_ISLNK(status.st_mode) else ""
