"""Converts tar archives to and from the records of slotfiles. Pure; neither side is trusted.

Archives come from outside (a model, a trainer's upload), records from a slot. Nothing here opens a file by name:
extracted files are opened by slotfiles, inside the slot, beneath the destination.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import posixpath
import tarfile
import zlib
from collections.abc import Iterable
from typing import BinaryIO

from agentenv.errors import InvalidArgumentsError, PolicyRefusalError
from agentenv.sandbox.file_names import meant_path, readable_name
from agentenv.sandbox.server.tools.file_records import FileRecord, encode
from agentenv.wire.base import MAX_FILE_BYTES
from agentenv.wire.tools import ArtifactFile, ArtifactsReply

MAX_ENTRIES = 50_000
"""Entries of one archive: each costs the server's processor about 20 us."""

# RecursionError: tarfile recurses once per long-name header.
_NOT_A_TAR = (tarfile.TarError, zlib.error, EOFError, ValueError, OverflowError, LookupError, RecursionError)
_MAX_GZIP_MEMBERS = 1000
_MAX_MTIME_S = 2**33


class TooLargeError(Exception):
    """More than MAX_FILE_BYTES, or MAX_ENTRIES."""


def pack(records: Iterable[FileRecord]) -> ArtifactsReply:
    """An uncompressed GNU tar of the records, in their order. Names keep their exact bytes.

    Raises TooLargeError when the tar exceeds MAX_FILE_BYTES.
    """
    files: list[ArtifactFile] = []
    output = io.BytesIO()
    with tarfile.open(
        fileobj=output, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"
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
    for entries, record in enumerate(records, 1):
        total_bytes += record.content_bytes
        if entries > MAX_ENTRIES or total_bytes > MAX_FILE_BYTES:
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
    member.mtime = min(max(record.modified_ns // 10**9, 0), _MAX_MTIME_S)
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


def unpack(archive: BinaryIO) -> tuple[bytes, ArtifactsReply]:
    """The instructions for slotfiles to extract ``archive`` (plain or gzip), and the reply afterwards.

    Raises: InvalidArgumentsError: it is not a tar, is truncated, or holds more than 64 MiB or 50,000 entries.
    PolicyRefusalError: an entry would lead outside the destination, or is not a file, directory or link.
    """
    try:
        with tarfile.open(fileobj=_plain(archive), mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
            plan = _Plan(tar)
            for member in tar:
                plan.add(member)
    except _NOT_A_TAR as error:
        raise InvalidArgumentsError(
            f"data is not a complete tar archive: {error}", next_step="send a plain or gzip tar, base64-encoded"
        ) from error
    return plan.instructions(), plan.reply()


def _plain(archive: BinaryIO) -> BinaryIO:
    magic = archive.read(2)
    archive.seek(0)
    if magic != b"\x1f\x8b":
        return archive
    plain = bytearray()
    rest = archive.read()
    for _ in range(_MAX_GZIP_MEMBERS):
        if not rest:
            return io.BytesIO(plain)
        stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        plain += stream.decompress(rest, MAX_FILE_BYTES + 1 - len(plain))
        if len(plain) > MAX_FILE_BYTES or stream.unconsumed_tail:
            raise InvalidArgumentsError(f"data decompresses to more than {MAX_FILE_BYTES} bytes")
        if not stream.eof:
            raise EOFError("the gzip stream is truncated")
        rest = stream.unused_data.lstrip(b"\0")  # gzip may pad its end with zeros
    raise InvalidArgumentsError(f"data has more than {_MAX_GZIP_MEMBERS} gzip members")


class _Plan:
    """Collects the instructions, entry by entry."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self._records: list[FileRecord] = []
        self._modes: list[FileRecord] = []
        self._files: dict[bytes, FileRecord] = {}
        self._links: set[str] = set()
        self._entries = 0
        self._total_bytes = 0

    def add(self, member: tarfile.TarInfo) -> None:
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            raise InvalidArgumentsError(f"the archive has more than {MAX_ENTRIES} entries")
        name = self._safe_name(member.name)
        if name == ".":
            return
        self._links.discard(name)
        if member.issym():
            self._add_link(name, member)
        elif member.isdir():
            self._records.append(FileRecord("d", os.fsencode(name)))
            # Only after all its entries: the directory may be read-only.
            self._modes.append(FileRecord("m", os.fsencode(name), mode=member.mode & 0o777))
        elif member.isreg() or member.islnk():
            self._add_file(name, member)
        else:
            raise PolicyRefusalError(f"{_shown(name)} in the archive is neither a file, a directory nor a link")

    def instructions(self) -> bytes:
        """The records for slotfiles."""
        ordered = [*self._records, *reversed(self._modes), FileRecord("e")]
        return b"".join(encode(record) for record in ordered)

    def reply(self) -> ArtifactsReply:
        files = tuple(_described(record) for record in self._files.values())
        return ArtifactsReply(files=files, total_bytes=sum(file.size_bytes for file in files))

    def _safe_name(self, name: str) -> str:
        if name.startswith("/") or ".." in name.split("/"):
            raise PolicyRefusalError(f"{_shown(name)} in the archive leads outside the destination")
        if "\0" in name:
            raise ValueError("a name contains a NUL byte")
        clean = posixpath.normpath(name)
        parent = posixpath.dirname(clean)
        while parent:
            if parent in self._links:
                raise PolicyRefusalError(f"{_shown(name)} in the archive is below a link of the same archive")
            parent = posixpath.dirname(parent)
        return clean

    def _add_link(self, name: str, member: tarfile.TarInfo) -> None:
        target = member.linkname
        reached = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
        if not target or target.startswith("/") or reached == ".." or reached.startswith("../"):
            raise PolicyRefusalError(f"the link {_shown(name)} in the archive leads outside the destination")
        if "\0" in target:
            raise ValueError("a link contains a NUL byte")
        self._links.add(name)
        self._files.pop(os.fsencode(name), None)
        self._records.append(FileRecord("l", os.fsencode(name), os.fsencode(target)))

    def _add_file(self, name: str, member: tarfile.TarInfo) -> None:
        path = os.fsencode(name)
        if member.islnk():
            record = self._hard_linked(path, member)
        else:
            record = FileRecord(
                "f", path, b"", member.mode & 0o777, 0, self._modified_ns(member), content=self._content(member)
            )
        self._total_bytes += len(record.content)
        if self._total_bytes > MAX_FILE_BYTES:
            raise InvalidArgumentsError(f"the archive contains more than {MAX_FILE_BYTES} bytes")
        self._files[path] = record
        self._records.append(record)

    def _hard_linked(self, path: bytes, member: tarfile.TarInfo) -> FileRecord:
        """A copy: the target of a hard link must come earlier in the same archive."""
        original = self._files.get(os.fsencode(self._safe_name(member.linkname)))
        if original is None:
            raise ValueError(f"{_shown(member.name)} is a link to a file that is not in the archive")
        return dataclasses.replace(original, path=path)

    def _content(self, member: tarfile.TarInfo) -> bytes:
        if member.issparse() or not 0 <= member.size <= MAX_FILE_BYTES:
            raise InvalidArgumentsError(f"{_shown(member.name)} in the archive is sparse or too large")
        stream = self._tar.extractfile(member)
        content = stream.read() if stream else b""
        if len(content) != member.size:
            raise EOFError(f"{_shown(member.name)} is truncated")
        return content

    def _modified_ns(self, member: tarfile.TarInfo) -> int:
        seconds = member.mtime if 0 <= member.mtime <= _MAX_MTIME_S else 0
        return int(seconds * 10**9)


def _shown(name: str) -> str:
    return repr(readable_name(os.fsencode(name)))
