"""The build context: what COPY and ADD may take from a directory, and what it looks like.

Follows Docker in what a source is: wildcards and ``.dockerignore`` (``patterns``), a link that is named itself is
followed, a link within a directory is copied as a link, sockets are left out. Times and modes are kept, hard links
within one source too; extended attributes are not.

Nothing outside the directory is ever read (``rooted``). A source that leads outside, by ``..`` or by a link, is
refused by its path; BuildKit reads ``/`` and ``..`` as the context itself instead. A file that changes between its
digest and its copying is refused too: the cache would keep the one under the name of the other.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import posixpath
import stat
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from agentenv.builder.archive import ArchiveError, Entry, is_archive, members, opened
from agentenv.builder.instructions import Place
from agentenv.builder.patterns import MAX_IGNORE_BYTES, Entries, Ignore, PatternError, glob
from agentenv.builder.steps import CopyStep, InlineFile
from agentenv.errors import DockerfileError
from agentenv.rooted import LeadsOutError, RootedDirectory
from agentenv.store.layers import swells
from agentenv.tar_members import set_modified_ns

_IGNORE: Final = ".dockerignore"
_BLOCK_BYTES: Final = 512
"""The unit of ``st_blocks``."""
_CORRECT: Final = "correct the path, or put what is missing into the build context"


@dataclass(frozen=True)
class Item:
    """One file, directory or link of a source. ``name`` is relative to the source (a file's is its own), ``path``
    to the context. ``first`` is the name of the item that it is a hard link to."""

    name: str
    path: str
    status: os.stat_result
    target: str = ""
    first: str = ""

    @property
    def is_directory(self) -> bool:
        """Not a link to one."""
        return stat.S_ISDIR(self.status.st_mode)


@dataclass(frozen=True)
class Source:
    """One source of a COPY or ADD: a file, the content of a directory, an archive to unpack, or an inline file."""

    name: str
    is_directory: bool
    items: tuple[Item, ...] = ()
    archive: bool = False
    inline: InlineFile | None = None


class BuildContext:
    """A directory as a build context; a context manager that holds it open.

    ``dockerfile`` is the Dockerfile's path relative to it: the rules of ``DOCKERFILE.dockerignore``, or else
    ``.dockerignore``, list what is not part of it. Opening it raises DockerfileError.
    """

    def __init__(self, directory: Path, dockerfile: str = "Dockerfile") -> None:
        self._tree = RootedDirectory(directory)
        self._dockerfile = dockerfile
        self._ignore = Ignore()

    def __enter__(self) -> Self:
        directory = self._tree.directory
        try:
            self._tree.__enter__()
        except OSError as error:
            place = Place(str(directory), 0, "build context")
            raise place.wrong(error.strerror or str(error), next_step="name a directory that can be read") from error
        with ExitStack() as stack:
            stack.push(self._tree)
            self._ignore = self._rules()
            stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tree.__exit__(kind, error, trace)

    def _rules(self) -> Ignore:
        for name in (f"{self._dockerfile}{_IGNORE}", _IGNORE):
            try:
                return Ignore(self._tree.content(posixpath.normpath(name), MAX_IGNORE_BYTES).decode())
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (UnicodeDecodeError, PatternError, LeadsOutError, OSError) as error:
                place = Place(str(self._tree.directory / name), 0, _IGNORE)
                reason = error.strerror if isinstance(error, OSError) else str(error)
                raise place.wrong(reason or str(error), next_step="correct or remove it") from error
        return Ignore()

    def sources(self, step: CopyStep) -> list[Source]:
        """What the step copies, in its order. A wildcard may match nothing, as in BuildKit. Raises DockerfileError for
        a source without wildcards that does not exist, and for one that leads out of the context or cannot be read."""
        found: list[Source] = []
        for written in step.sources:
            try:
                found += self._sources(written, step)
            except PatternError as error:
                raise step.place.wrong(str(error), next_step="correct the wildcard") from error
            except LeadsOutError as error:
                raise step.place.wrong(
                    f"{written} leads out of the build context: {error}", next_step=_CORRECT
                ) from error
            except ArchiveError as error:
                raise step.place.wrong(f"{written}: {error}", next_step="unpack it with RUN") from error
            except OSError as error:
                raise self._unreadable(step.place, written, error) from error
        return [*found, *inline_sources(step)]

    def digest(self, sources: Sequence[Source]) -> str:
        """SHA-256 of what the sources are: names, kinds, modes, links, content, and no times, as in BuildKit. Raises
        OSError if one cannot be read."""
        total = hashlib.sha256()
        for source in sources:
            self._add(total, "source", source.name, source.is_directory, source.archive)
            if source.inline is not None:
                self._add(total, "inline", source.inline.content)
            for item in source.items:
                kind = stat.S_IFMT(item.status.st_mode)
                mode = stat.S_IMODE(item.status.st_mode)
                content = self._content_digest(item) if stat.S_ISREG(kind) and not item.first else ""
                self._add(total, item.name, kind, mode, item.target, item.first, content)
        return total.hexdigest()

    def entries(self, source: Source) -> Iterator[Entry]:
        """The source as members of a tar stream, sorted by name. Raises ArchiveError and OSError."""
        if source.inline is not None:
            yield _inline(source.inline)
        elif source.archive:
            with self._unchanged(source.items[0]) as file, opened(file) as archive:
                yield from members(archive, source.items[0].status.st_size)
        else:
            for item in source.items:
                yield from self._entry(item)

    @staticmethod
    def _add(total: hashlib._Hash, *words: object) -> None:
        for word in words:
            encoded = os.fsencode(str(word))
            total.update(len(encoded).to_bytes(8, "big") + encoded)

    def _sources(self, written: str, step: CopyStep) -> list[Source]:
        path = posixpath.normpath(written.lstrip("/") or ".")
        if path == ".." or path.startswith("../"):
            raise step.place.wrong(f"{written} leads out of the build context", next_step=_CORRECT)
        path = "" if path == "." else path
        search = glob(path)
        answer: Entries | None = None
        try:
            while True:
                wanted = search.send(answer) if answer is not None else next(search)
                answer = self._names(self._tree.followed(wanted))
        except StopIteration as stop:
            matches: list[str] = stop.value
        sure = matches == [path]
        return [source for match in matches if (source := self._source(match, written, step, sure)) is not None]

    def _names(self, directory: str) -> Entries:
        """What a wildcard chooses from; nothing, if it is below a file."""
        if not stat.S_ISDIR(self._tree.status(directory).st_mode):
            return ()
        return [(name, stat.S_ISDIR(status.st_mode)) for name, status, _ in self._tree.entries(directory)]

    def _source(self, path: str, written: str, step: CopyStep, sure: bool) -> Source | None:
        """The source at ``path``; None for one that is ignored, if a wildcard found it."""
        real = self._tree.followed(path)
        status = self._tree.status(real)
        name = posixpath.basename(path)
        if stat.S_ISDIR(status.st_mode):
            items = self._below(real)
            if items or not real or not self._ignored(path, real):
                return Source(name, True, tuple(items))
        elif not self._ignored(path, real):
            if not stat.S_ISREG(status.st_mode):
                raise step.place.wrong(f"{written} is neither a file nor a directory", next_step=_CORRECT)
            return self._file_source(name, real, status, step.unpack)
        if not sure:
            return None
        raise step.place.wrong(f"{written} is excluded by .dockerignore", next_step=f"add !{path} to .dockerignore")

    def _file_source(self, name: str, real: str, status: os.stat_result, unpack: bool) -> Source:
        archive = False
        if unpack:
            with self._tree.file(real) as file:
                archive = is_archive(file)
        return Source(name, archive, (Item(name, real, status),), archive=archive)

    def _ignored(self, path: str, real: str) -> bool:
        return self._ignore.excludes(path) or (real != path and self._ignore.excludes(real))

    def _below(self, top: str) -> list[Item]:
        """What is below the directory and part of the context, sorted, a directory before its content."""
        found: dict[str, Item] = {}
        inodes: dict[tuple[int, int], str] = {}
        waiting = [top]
        while waiting:
            directory = waiting.pop()
            for name, status, target in self._tree.entries(directory):
                path = posixpath.join(directory, name)
                if not stat.S_ISSOCK(status.st_mode):
                    found[path] = Item(path.removeprefix(top).lstrip("/"), path, status, target)
                if stat.S_ISDIR(status.st_mode) and not self._pruned(path):
                    waiting.append(path)
        kept = self._without_ignored(found)
        return [_linked(item, inodes) for item in sorted(kept, key=lambda item: item.name.split("/"))]

    def _pruned(self, path: str) -> bool:
        return not self._ignore.has_exceptions and self._ignore.excludes(path)

    def _without_ignored(self, found: dict[str, Item]) -> list[Item]:
        """Without what is ignored. The directories above something that is not ignored stay."""
        kept: dict[str, Item] = {}
        for path in found:
            if self._ignore.has_rules and self._ignore.excludes(path):
                continue
            while path in found and path not in kept:
                kept[path] = found[path]
                path = posixpath.dirname(path)
        return list(kept.values())

    def _entry(self, item: Item) -> Iterator[Entry]:
        member = tarfile.TarInfo(item.name)
        member.mode = stat.S_IMODE(item.status.st_mode)
        set_modified_ns(member, item.status.st_mtime_ns)
        if item.is_directory:
            member.type = tarfile.DIRTYPE
        elif stat.S_ISLNK(item.status.st_mode):
            member.type, member.linkname = tarfile.SYMTYPE, item.target
        elif item.first:
            member.type, member.linkname = tarfile.LNKTYPE, item.first
        elif stat.S_ISREG(item.status.st_mode):
            with self._unchanged(item) as file:
                member.size = item.status.st_size
                yield member, file
            return
        else:
            raise ArchiveError(f"{item.path} is a device or a pipe")
        yield member, None

    def _unchanged(self, item: Item) -> IO[bytes]:
        """The item's file; raises OSError if it is not the one that was looked at."""
        file = self._tree.file(item.path)
        if _identity(os.fstat(file.fileno())) != _identity(item.status):
            file.close()
            raise OSError(errno.ESTALE, "it has changed since the build began", item.path)
        return file

    def _content_digest(self, item: Item) -> str:
        if swells(item.status.st_blocks * _BLOCK_BYTES, item.status.st_size):
            raise OSError(errno.EFBIG, f"almost all of its {item.status.st_size} bytes are holes", item.path)
        with self._tree.file(item.path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]

    def _unreadable(self, place: Place, written: str, error: OSError) -> DockerfileError:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return place.wrong(f"{written} is not in the build context {self._tree.directory}", next_step=_CORRECT)
        return place.wrong(f"{written} cannot be read: {error.strerror or error}", next_step="change its permissions")


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def inline_sources(step: CopyStep) -> list[Source]:
    """The step's heredocs as sources."""
    return [Source(file.name, False, inline=file) for file in step.inline]


def _inline(file: InlineFile) -> Entry:
    content = file.content.encode()
    member = tarfile.TarInfo(file.name)
    member.size, member.mode = len(content), 0o644
    return member, io.BytesIO(content)


def _linked(item: Item, inodes: dict[tuple[int, int], str]) -> Item:
    """The item as a hard link, if its file has come before."""
    status = item.status
    if item.is_directory or status.st_nlink == 1 or stat.S_ISLNK(status.st_mode):
        return item
    first = inodes.setdefault((status.st_dev, status.st_ino), item.name)
    return item if first == item.name else Item(item.name, item.path, status, first=first)
