"""Converts tar archives to and from the records of slotfiles. Pure; neither side is trusted.

Archives come from outside (a model, a trainer's upload), records from a slot. Nothing here opens a file by name:
extracted files are opened by slotfiles, inside the slot, beneath the destination.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import mmap
import os
import posixpath
import tarfile
import zlib
from collections.abc import Iterable

from agentenv.errors import InvalidArgumentsError, PolicyRefusalError
from agentenv.file_names import meant_path, readable_name
from agentenv.sandbox.server.tools.file_records import FileRecord, encode
from agentenv.tar_headers import BLOCK, NS_PER_S, Entry, Kind, entries
from agentenv.tar_members import set_modified_ns
from agentenv.wire.base import MAX_FILE_BYTES
from agentenv.wire.tools import ArtifactFile, ArtifactsReply

MAX_ENTRIES = 50_000
"""Entries of one archive: each costs the server's processor about 20 us."""

_MAX_GZIP_MEMBERS = 1000


class TooLargeError(Exception):
    """More than MAX_FILE_BYTES, or MAX_ENTRIES."""


def pack(records: Iterable[FileRecord]) -> ArtifactsReply:
    """An uncompressed PAX tar of the records, in their order. Names keep their exact bytes, times their nanoseconds.

    Raises TooLargeError when the tar exceeds MAX_FILE_BYTES.
    """
    files: list[ArtifactFile] = []
    output = io.BytesIO()
    with tarfile.open(
        fileobj=output, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as tar:
        for record in records:
            if record.kind not in "fdl":
                continue
            tar.addfile(_member(record), io.BufferedReader(_Content(record.pieces)))
            if output.tell() > MAX_FILE_BYTES:
                raise TooLargeError
            if record.kind == "f":
                files.append(_described(record))
    if output.tell() > MAX_FILE_BYTES:
        raise TooLargeError
    return ArtifactsReply(
        data=output.getvalue(), files=tuple(files), total_bytes=sum(file.size_bytes for file in files)
    )


def listed(records: Iterable[FileRecord]) -> ArtifactsReply:
    """The files among the records, in order: the list that :func:`pack` returns, without a tar.

    Raises TooLargeError for more than slotfiles may send: MAX_FILE_BYTES of content, MAX_ENTRIES.
    """
    files: list[ArtifactFile] = []
    total_bytes = 0
    for count, record in enumerate(records, 1):
        total_bytes += record.content_bytes
        if count > MAX_ENTRIES or total_bytes > MAX_FILE_BYTES:
            raise TooLargeError
        if record.kind == "f":
            files.append(_described(record))
    return ArtifactsReply(files=tuple(files), total_bytes=total_bytes)


def single(path: str, content: bytes | memoryview) -> ArtifactsReply:
    """One file under its own name, as in an archive of it alone; its bytes if they are ``bytes``."""
    name = readable_name(os.fsencode(meant_path(posixpath.basename(path))))
    file = ArtifactFile(path=name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    data = content if isinstance(content, bytes) else None
    return ArtifactsReply(data=data, files=(file,), total_bytes=len(content))


def _member(record: FileRecord) -> tarfile.TarInfo:
    member = tarfile.TarInfo(os.fsdecode(record.path))
    member.mode = record.mode & 0o777
    set_modified_ns(member, record.modified_ns)
    member.type = {"f": tarfile.REGTYPE, "d": tarfile.DIRTYPE, "l": tarfile.SYMTYPE}[record.kind]
    member.linkname = os.fsdecode(record.link)
    member.size = record.content_bytes
    return member


def _described(record: FileRecord) -> ArtifactFile:
    digest = hashlib.sha256(record.content)
    for piece in record.pieces:
        digest.update(piece)
    return ArtifactFile(path=readable_name(record.path), size_bytes=record.content_bytes, sha256=digest.hexdigest())


class _Content(io.RawIOBase):
    """Pieces read one after the other."""

    def __init__(self, pieces: tuple[memoryview, ...]) -> None:
        self._pieces = iter(pieces)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        self._rest = self._rest or next(self._pieces, self._rest)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def unpack(archive: mmap.mmap | bytes) -> tuple[bytes, ArtifactsReply]:
    """The instructions for slotfiles to extract ``archive`` (plain or gzip), and the reply afterwards.

    Raises: InvalidArgumentsError: it is not a tar, is damaged or truncated, wherever that is, or holds more than 64 MiB
    or 50,000 entries.
    PolicyRefusalError: an entry would lead outside the destination, or is not a file, directory or link.
    """
    try:
        plan = _Plan(_plain(archive))
    except (ValueError, EOFError, zlib.error) as error:
        raise InvalidArgumentsError(
            f"data is not a complete tar archive: {error}", next_step="send a plain or gzip tar, base64-encoded"
        ) from error
    return plan.instructions(), plan.reply()


def _plain(archive: mmap.mmap | bytes) -> mmap.mmap | bytes:
    if archive[:2] != b"\x1f\x8b":
        return archive
    plain: list[bytes] = []
    room = MAX_FILE_BYTES
    rest = archive[:]
    for _ in range(_MAX_GZIP_MEMBERS):
        if not rest:
            return b"".join(plain)
        stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        plain.append(stream.decompress(rest, room + 1))
        room -= len(plain[-1])
        if room < 0 or stream.unconsumed_tail:
            raise InvalidArgumentsError(f"data decompresses to more than {MAX_FILE_BYTES} bytes")
        if not stream.eof:
            raise EOFError("the gzip stream is truncated")
        rest = stream.unused_data.lstrip(b"\0")  # gzip may pad its end with zeros
    raise InvalidArgumentsError(f"data has more than {_MAX_GZIP_MEMBERS} gzip members")


class _Plan:
    """What a tar has, as instructions."""

    def __init__(self, tar: mmap.mmap | bytes) -> None:
        """Raises as :func:`unpack`; ValueError for what is no complete tar."""
        self._tar = tar
        self._records: list[FileRecord] = []
        self._modes: list[FileRecord] = []
        self._files: dict[bytes, FileRecord] = {}
        self._links: set[str] = set()
        self._total_bytes = 0
        if not tar:
            raise ValueError("it is empty")
        for count, entry in enumerate(entries(tar), 1):
            if count > MAX_ENTRIES:
                raise InvalidArgumentsError(f"the archive has more than {MAX_ENTRIES} entries")
            self._add(entry)

    def _add(self, entry: Entry) -> None:
        name = self._safe_name(entry.name)
        if name == "." and entry.kind is Kind.DIRECTORY:
            return
        if name == ".":
            raise ValueError("an entry has no name")
        self._links.discard(name)
        if entry.kind is Kind.SYMLINK:
            self._add_link(name, entry.link)
        elif entry.kind is Kind.DIRECTORY:
            self._records.append(FileRecord("d", os.fsencode(name)))
            # Only after all its entries: the directory may be read-only.
            self._modes.append(FileRecord("m", os.fsencode(name), mode=entry.mode & 0o777))
        elif entry.kind in (Kind.FILE, Kind.HARD_LINK):
            self._add_file(os.fsencode(name), entry)
        else:
            raise PolicyRefusalError(f"{_shown(name)} in the archive is neither a file, a directory nor a link")

    def instructions(self) -> bytes:
        """The records for slotfiles."""
        ordered = [*self._records, *reversed(self._modes), FileRecord("e")]
        return b"".join(encode(record) for record in ordered)

    def reply(self) -> ArtifactsReply:
        files = tuple(_described(record) for record in self._files.values())
        return ArtifactsReply(files=files, total_bytes=sum(file.size_bytes for file in files))

    def _safe_name(self, written: bytes) -> str:
        name = os.fsdecode(written)
        if name.startswith("/") or ".." in name.split("/"):
            raise PolicyRefusalError(f"{_shown(name)} in the archive leads outside the destination")
        clean = posixpath.normpath(name)
        parent = posixpath.dirname(clean)
        while parent:
            if parent in self._links:
                raise PolicyRefusalError(f"{_shown(name)} in the archive is below a link of the same archive")
            parent = posixpath.dirname(parent)
        return clean

    def _add_link(self, name: str, written: bytes) -> None:
        target = os.fsdecode(written)
        reached = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
        if target.startswith("/") or reached == ".." or reached.startswith("../"):
            raise PolicyRefusalError(f"the link {_shown(name)} in the archive leads outside the destination")
        self._links.add(name)
        self._files.pop(os.fsencode(name), None)
        self._records.append(FileRecord("l", os.fsencode(name), written))

    def _add_file(self, path: bytes, entry: Entry) -> None:
        if entry.kind is Kind.HARD_LINK:
            record = self._hard_linked(path, entry)
        else:
            end = entry.offset + entry.size
            if end + -end % BLOCK > len(self._tar):
                raise ValueError("tar ends within the padding of an entry's data")
            content = self._tar[entry.offset : end]
            record = FileRecord("f", path, mode=entry.mode & 0o777, modified_ns=_bounded(entry), content=content)
        self._total_bytes += len(record.content)
        if self._total_bytes > MAX_FILE_BYTES:
            raise InvalidArgumentsError(f"the archive contains more than {MAX_FILE_BYTES} bytes")
        self._files[path] = record
        self._records.append(record)

    def _hard_linked(self, path: bytes, entry: Entry) -> FileRecord:
        """A copy: the target of a hard link must come earlier in the same archive."""
        original = self._files.get(os.fsencode(self._safe_name(entry.link)))
        if original is None:
            raise ValueError(f"{_shown(os.fsdecode(path))} is a link to a file that is not in the archive")
        return dataclasses.replace(original, path=path)


def _bounded(entry: Entry) -> int:
    """Its time. Raises ValueError for one that a record has no room for."""
    if not -(2**63) <= entry.mtime_ns < 2**63:
        raise ValueError(f"{_shown(os.fsdecode(entry.name))} has a time of {entry.mtime_ns // NS_PER_S} seconds")
    return entry.mtime_ns


def _shown(name: str) -> str:
    return repr(readable_name(os.fsencode(name)))
