"""The entries of an uncompressed tar, with the places of their data.

Formats: POSIX ustar and pax, and what GNU tar adds (long names, numbers in base 256). Where these leave room, an entry
means what Go's ``archive/tar`` makes of it, because every container engine reads layers with that: global pax headers
are ignored, an empty pax value leaves the ustar field, and a GNU long name is stronger than a pax path.
"""

from __future__ import annotations

import mmap
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Final

BLOCK: Final = 512
"""Headers begin and data begins at multiples of it."""
MAX_RECORD_BYTES: Final = 1024 * 1024
"""Of one pax header or GNU long name: Linux allows 64 KiB for the value of an extended attribute."""
MAX_TARGET_BYTES: Final = 4095
"""Of a symbolic link: PATH_MAX without its NUL."""
MAX_ID: Final = 2**32 - 2
"""The kernel's largest uid and gid; the next one means "none"."""

NS_PER_S: Final = 10**9
_NO_BLOCK: Final = bytes(BLOCK)
_XATTR: Final = b"SCHILY.xattr."
_SPARSE: Final = b"GNU.sparse."
_LONGEST_NUMBER: Final = 20
"""Digits of 2^64."""
_TIME: Final = re.compile(r"(-?)(\d{1,20})(?:\.(\d*))?", re.ASCII)


class BrokenTarError(ValueError):
    """A tar is malformed, or has what is not read here. The message begins with "tar" and names the place."""


class Kind(Enum):
    """What an entry makes; the values are tar's type flags."""

    FILE = b"0"
    HARD_LINK = b"1"
    SYMLINK = b"2"
    CHARACTER_DEVICE = b"3"
    BLOCK_DEVICE = b"4"
    DIRECTORY = b"5"
    FIFO = b"6"


_KINDS: Final = {kind.value: kind for kind in Kind} | {b"\0": Kind.FILE, b"7": Kind.FILE}
_DEVICES: Final = (Kind.CHARACTER_DEVICE, Kind.BLOCK_DEVICE)


@dataclass(slots=True)
class Entry:
    """One entry. ``name`` and ``link`` are as written: nothing of them has been checked but that they have no NUL."""

    name: bytes
    kind: Kind
    mode: int
    """The permission bits with set-user-id, set-group-id and sticky: 0o7777 at most."""
    uid: int
    gid: int
    mtime_ns: int
    size: int = 0
    """Bytes of a file's data; 0 for other kinds."""
    offset: int = 0
    """Where a file's data begins: a multiple of BLOCK."""
    link: bytes = b""
    """Target of a symbolic link, or name of the file that a hard link is another name of."""
    device: tuple[int, int] = (0, 0)
    """Major and minor number of a device."""
    xattrs: dict[bytes, bytes] = field(default_factory=dict)


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap | bytes]:
    """The file's content, read-only. Raises OSError."""
    with path.open("rb") as file, mapped_descriptor(file.fileno()) as view:
        yield view


@contextmanager
def mapped_descriptor(descriptor: int) -> Iterator[mmap.mmap | bytes]:
    """The same, of an open file, which stays open."""
    if os.fstat(descriptor).st_size == 0:
        yield b""  # which cannot be mapped
        return
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as view:
        yield view


def is_ended(path: Path) -> bool:
    """Whether the tar has the two blocks of zeros with which one ends: without them it may have been cut between two
    entries. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 2 * BLOCK))
        return file.read() == bytes(2 * BLOCK)


def entries(tar: mmap.mmap | bytes) -> Iterator[Entry]:
    """The entries of a tar, in order. The data of files is not read.

    Raises BrokenTarError when the tar is malformed or has sparse files.
    """
    at = 0
    pending = _Pending()
    while header := tar[at : at + BLOCK]:
        if header == _NO_BLOCK:
            if tar[at + BLOCK : at + 2 * BLOCK].strip(b"\0"):
                raise BrokenTarError(f"tar is broken at byte {at}: more follows after a lone block of zeros")
            break
        try:
            kind, size = _checked(header)
            after = at + BLOCK
            if kind in b"xgLK":
                _within(tar, after, size)
                if size > MAX_RECORD_BYTES:
                    raise BrokenTarError(f"a header of {size} bytes (at most {MAX_RECORD_BYTES})")
                pending.take(kind, tar[after : after + size])
            else:
                entry = pending.entry(header, kind, size, after)
                pending = _Pending()
                size = entry.size
                _within(tar, after, size)
                yield entry
        except BrokenTarError as error:
            raise BrokenTarError(f"tar is broken at byte {at}: {error}") from None
        at = after + -(-size // BLOCK) * BLOCK
    if pending.used:
        raise BrokenTarError(f"tar ends at byte {at}, after the extended header of an entry")


def _checked(header: bytes) -> tuple[bytes, int]:
    """Type flag and size of a header whose checksum is right."""
    if len(header) < BLOCK:
        raise BrokenTarError("it ends within a header")
    stated = _number(header, 148, 8)
    if stated != _sum(header) - sum(header[148:156]) + 8 * ord(" "):
        rest = header[:148] + b" " * 8 + header[156:]
        signed = sum(byte - 256 if byte > 127 else byte for byte in rest)  # as some old programs count
        if stated != signed:
            raise BrokenTarError("the header's checksum is wrong")
    size = _number(header, 124, 12)
    if size < 0:
        raise BrokenTarError(f"a size of {size}")
    return header[156:157], size


def _sum(header: bytes) -> int:
    """Of its bytes. The lower half of Adler-32 is one more than that, modulo 65521, which 256 bytes do not reach;
    Python's own sum takes many times as long."""
    return (zlib.adler32(header[:256]) & 0xFFFF) + (zlib.adler32(header[256:]) & 0xFFFF) - 2


def _within(tar: mmap.mmap | bytes, begin: int, size: int) -> None:
    if begin + size > len(tar):
        raise BrokenTarError("it ends within an entry's data")


class _Pending:
    """What headers before an entry say about it."""

    def __init__(self) -> None:
        self.used = False
        self._pax: dict[bytes, bytes] = {}
        self._name = b""
        self._link = b""

    def take(self, kind: bytes, body: bytes) -> None:
        """Take in a header of one of the kinds x, g, L, K."""
        if kind == b"g":
            return
        self.used = True
        if kind == b"x":
            self._pax = _pax_records(body)
        elif kind == b"L":
            self._name = body.partition(b"\0")[0]
        else:
            self._link = body.partition(b"\0")[0]

    def entry(self, header: bytes, flag: bytes, size: int, offset: int) -> Entry:
        """The entry of a header, with what was said before it."""
        pax = self._pax
        if flag == b"S" or any(key.startswith(_SPARSE) for key in pax):
            raise BrokenTarError("a sparse file, which is not read here (GNU tar makes them with --sparse)")
        kind = _KINDS.get(flag)
        if kind is None:
            raise BrokenTarError(f"an entry of the unknown type {flag!r}")
        name = self._name or pax.get(b"path") or _ustar_name(header)
        if flag == b"\0" and name.endswith(b"/"):
            kind = Kind.DIRECTORY
        if kind is Kind.FILE:
            size = _decimal(pax[b"size"], "size") if pax.get(b"size") else size
        return Entry(
            name=name,
            kind=kind,
            mode=_number(header, 100, 8) & 0o7777,
            uid=_owner(pax.get(b"uid"), header, 108),
            gid=_owner(pax.get(b"gid"), header, 116),
            mtime_ns=_time_ns(pax.get(b"mtime"), header),
            size=size if kind is Kind.FILE else 0,
            offset=offset if kind is Kind.FILE else 0,
            link=_link(self._link or pax.get(b"linkpath") or _text(header, 157, 100), kind),
            device=_device(header) if kind in _DEVICES else (0, 0),
            xattrs={key[len(_XATTR) :]: value for key, value in pax.items() if key.startswith(_XATTR)},
        )


def _text(header: bytes, begin: int, length: int) -> bytes:
    return header[begin : begin + length].partition(b"\0")[0]


def _ustar_name(header: bytes) -> bytes:
    name = _text(header, 0, 100)
    if header[257:263] != b"ustar\0":  # GNU's magic is another; it has no prefix
        return name
    star = header[508:512] == b"tar\0"  # Jörg Schilling's star keeps times where others continue the prefix
    prefix = _text(header, 345, 131 if star else 155)
    return prefix + b"/" + name if prefix else name


def _link(link: bytes, kind: Kind) -> bytes:
    if kind not in (Kind.SYMLINK, Kind.HARD_LINK):
        return b""
    if not link:
        raise BrokenTarError("a link without a target")
    if kind is Kind.SYMLINK and len(link) > MAX_TARGET_BYTES:
        raise BrokenTarError(f"a symbolic link to {len(link)} bytes (at most {MAX_TARGET_BYTES})")
    return link


def _number(header: bytes, begin: int, length: int) -> int:
    """A number of a header: octal digits, or (GNU) base 256, marked by the first bit."""
    return _read_number(header[begin : begin + length])


@lru_cache(4096)  # most headers of a tar have the same modes, owners and times
def _read_number(raw: bytes) -> int:
    if raw[0] & 0x80:
        bits = 8 * len(raw) - 1
        value = int.from_bytes(raw, "big") & ((1 << bits) - 1)
        return value - (1 << bits) if raw[0] & 0x40 else value
    text = raw.strip(b" \0").partition(b"\0")[0].rstrip(b" ")
    if not text:
        return 0
    if not text.isdigit() or max(text) > ord("7"):
        raise BrokenTarError(f"{raw!r} is not a number")
    return int(text, 8)


def _decimal(text: bytes, what: str) -> int:
    if not text.isdigit() or len(text) > _LONGEST_NUMBER:
        raise BrokenTarError(f"a {what} of {text[:40]!r}")
    return int(text)


def _owner(pax: bytes | None, header: bytes, begin: int) -> int:
    owner = _decimal(pax, "user or group") if pax else _number(header, begin, 8)
    if not 0 <= owner <= MAX_ID:
        raise BrokenTarError(f"a user or group {owner} (at most {MAX_ID})")
    return owner


def _time_ns(pax: bytes | None, header: bytes) -> int:
    ns = time_ns(pax.decode(errors="replace")) if pax else _number(header, 136, 12) * NS_PER_S
    if not -(2**63) <= ns // NS_PER_S < 2**63:
        raise BrokenTarError(f"a time of {ns // NS_PER_S} seconds")
    return ns


def time_ns(text: str) -> int:
    """A time of a pax header: seconds, perhaps negative, perhaps with a fraction. What is finer than a nanosecond is
    cut off, towards the past as GNU tar does. Raises BrokenTarError."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise BrokenTarError(f"a time of {text[:40]!r}")
    sign, seconds, fraction = match[1], int(match[2]), match[3] or ""
    ns = seconds * NS_PER_S + int(fraction[:9].ljust(9, "0"))
    if not sign:
        return ns
    return -ns - (1 if fraction[9:].strip("0") else 0)


def _device(header: bytes) -> tuple[int, int]:
    major, minor = _number(header, 329, 8), _number(header, 337, 8)
    if not (0 <= major < 1 << 12 and 0 <= minor < 1 << 20):
        raise BrokenTarError(f"a device {major}:{minor}, which Linux cannot have")
    return major, minor


def _pax_records(body: bytes) -> dict[bytes, bytes]:
    """The records ``LENGTH KEY=VALUE\\n`` of a pax header; of several with one key the last counts."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(body):
        space = body.find(b" ", at, at + 10)
        digits = body[at:space] if space > 0 else b""
        end = at + int(digits) if digits.isdigit() else 0
        key, equals, value = body[space + 1 : end - 1].partition(b"=")
        if end > len(body) or end <= space + 1 or body[end - 1 : end] != b"\n" or not key or not equals:
            raise BrokenTarError("a broken record of a pax header")
        if b"\0" in key or (b"\0" in value and not key.startswith(_XATTR)):
            raise BrokenTarError(f"a NUL in the pax record {key[:40]!r}")
        found[key] = value
        at = end
    return found
