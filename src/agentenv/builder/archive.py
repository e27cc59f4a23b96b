"""Tar streams of what a step puts into a root: what goes in, under which name, whose it is.

Owners and modes follow fsutil's ``copy.go``: ``--chown`` and ``--chmod`` count for everything that is copied (a link
has no mode), without ``--chown`` files of the context belong to 0:0 and files of other stages keep their owners.
``--chmod`` does not count for what ADD unpacks, as in BuildKit's ``unpack.go``.
"""

from __future__ import annotations

import lzma
import posixpath
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Final

from agentenv.builder.modes import Mode
from agentenv.store.layers import swells
from agentenv.tar_headers import BrokenTarError
from agentenv.tar_members import StrictMember, modified_ns, set_modified_ns

Entry = tuple[tarfile.TarInfo, IO[bytes] | None]
"""A member and, for a file, its content."""

UNREADABLE: Final = (tarfile.TarError, BrokenTarError, EOFError, OSError, zlib.error, lzma.LZMAError)
"""What reading a file raises that is not an archive, or half of one."""
_XATTR: Final = "SCHILY.xattr."
_WHITEOUT: Final = ".wh."
_KINDS: Final = (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE)
_ZSTANDARD: Final = b"\x28\xb5\x2f\xfd"


class ArchiveError(ValueError):
    """An archive has what must not be put into a root; the message names the entry."""


@dataclass(frozen=True)
class Placed:
    """Where a source goes: below the directory ``at`` (absolute). ``name`` renames a single file; empty: it keeps its
    name, and a directory's content goes into ``at`` itself."""

    at: str
    name: str = ""


def placed(sources: Sequence[tuple[str, bool]], destination: str, is_directory: bool) -> list[Placed]:
    """Where each source goes: pairs of its name and whether it is a directory (or an archive to unpack).

    ``is_directory``: ``destination`` is one now; a slash at its end makes it one. Raises ValueError if
    several files would become one. Follows fsutil's ``Copy`` and ``prepareTargetDir``, one source after the other.
    """
    at = destination.rstrip("/") or "/"
    is_directory = is_directory or destination.endswith("/")
    taken, result = False, []
    for name, contents in sources:
        if contents and taken:
            raise ValueError(f"{destination} would be a file and a directory")
        if contents or is_directory:
            is_directory = True
            result.append(Placed(at))
        elif taken:
            raise ValueError(f"{name} would overwrite the file before it: {destination} is not a directory")
        else:
            taken = True
            result.append(Placed(posixpath.dirname(at), posixpath.basename(at)))
    return result


@dataclass(frozen=True)
class Part:
    """One source on its way into a root. ``owner`` None: entries keep theirs. Raises what ``entries`` raises."""

    place: Placed
    entries: Iterable[Entry]
    owner: tuple[int, int] | None
    mode: Mode


def write(out: IO[bytes], parts: Iterable[Part], admit: Callable[[int], None] = lambda _: None) -> None:
    """The parts as one tar stream; names are relative to their ``place.at``, which is the same for all. ``admit`` is
    called with the size of each entry, and raises where there is no room for it. Raises what it and the entries raise,
    ArchiveError for a name that would delete something in a layer (``.wh.``), and OSError if a file has become shorter
    meanwhile."""
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for part in parts:
            for member, content in part.entries:
                header = _copied(member)
                header.name = part.place.name or header.name
                path = posixpath.join(part.place.at, header.name)
                if any(name.startswith(_WHITEOUT) for name in path.split("/")):
                    raise ArchiveError(f"{path} has a name that means a deletion in layers of images")
                if part.owner is not None:
                    header.uid, header.gid = part.owner
                if header.type != tarfile.SYMTYPE:
                    header.mode = part.mode(header.mode, header.isdir())
                admit(header.size)
                archive.addfile(header, content)


def members(archive: tarfile.TarFile, packed_bytes: int | None = None) -> Iterator[Entry]:
    """The entries of an archive from elsewhere, checked: none leaves the directory it is unpacked into, none is a
    device, and all together are not a bomb (:func:`swells`) of ``packed_bytes``. Raises ArchiveError."""
    total_bytes = 0
    for member in archive:
        total_bytes += member.size
        if packed_bytes is not None and swells(packed_bytes, total_bytes):
            raise ArchiveError(f"it unpacks to {total_bytes} bytes, more than 100 times its size")
        name = _inside(member.name, member.name)
        if not name:
            continue
        if member.type not in _KINDS and not member.isreg():
            raise ArchiveError(f"{member.name} is a device or of an unknown kind")
        header = _copied(member)
        header.name = name
        if member.islnk():
            header.linkname = _inside(member.linkname, f"{member.name} -> {member.linkname}")
        yield header, archive.extractfile(member) if member.isreg() else None


def is_archive(file: IO[bytes]) -> bool:
    """Whether ADD unpacks the file: a tar, plain or compressed with gzip, bzip2 or xz, with an entry. Raises
    ArchiveError for Zstandard, which only newer Pythons read. The file is at its start afterwards."""
    start = file.read(4)
    file.seek(0)
    if start == _ZSTANDARD:
        raise ArchiveError("it is compressed with Zstandard")
    try:
        with opened(file) as archive:
            return archive.next() is not None
    except (*UNREADABLE, ValueError):
        return False
    finally:
        file.seek(0)


def opened(file: IO[bytes]) -> tarfile.TarFile:
    """An archive that ``is_archive``; close it after use."""
    return tarfile.open(fileobj=file, mode="r:*", tarinfo=StrictMember)


def _copied(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """What counts of an entry: no names of owners, and no headers of an archive's own making but its time's fraction
    and extended attributes."""
    header = tarfile.TarInfo(member.name)
    header.type = tarfile.REGTYPE if member.isreg() else member.type
    header.size = member.size if member.isreg() else 0
    header.mode = member.mode & 0o7777
    header.uid, header.gid, header.linkname = member.uid, member.gid, member.linkname
    header.pax_headers = {name: value for name, value in member.pax_headers.items() if name.startswith(_XATTR)}
    set_modified_ns(header, modified_ns(member))
    return header


def _inside(name: str, shown: str) -> str:
    """The name without leading slash; empty for the directory itself."""
    cleaned = posixpath.normpath("/" + name if name.startswith("/") else name)
    if cleaned == ".." or cleaned.startswith("../"):
        raise ArchiveError(f"{shown} leads out of the directory that the archive is unpacked into")
    return cleaned.strip("/") if cleaned not in (".", "/", "//") else ""
