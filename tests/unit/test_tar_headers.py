"""Tars are read as Python's own tarfile reads them, and what is malformed is refused by name."""

from __future__ import annotations

import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.tar_headers import BLOCK, MAX_RECORD_BYTES, BrokenTarError, Kind, entries, is_ended, mapped
from tests.image_sources import member, tar_of

LONG = "d" * 120 + "/" + "n" * 200
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def summed(header: bytearray) -> bytes:
    """The header with its checksum."""
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def header(**fields: bytes) -> bytes:
    """A ustar header of a directory, with some fields as given."""
    places = {
        "name": 0, "mode": 100, "uid": 108, "size": 124, "mtime": 136, "type": 156, "link": 157,
        "major": 329, "minor": 337,
    }  # fmt: skip
    made = bytearray(member("x", type=tarfile.DIRTYPE)[0].tobuf(tarfile.USTAR_FORMAT))
    for name, value in fields.items():
        made[places[name] : places[name] + len(value)] = value
    return summed(made)


def pax_header(records: bytes) -> bytes:
    return header(type=b"x", size=b"%011o\0" % len(records)) + records.ljust(-(-len(records) // BLOCK) * BLOCK, b"\0")


def record(key: bytes, value: bytes) -> bytes:
    rest = b" " + key + b"=" + value + b"\n"
    size = next(size for size in range(len(rest), len(rest) + 10) if size == len(rest) + len(str(size)))
    return b"%d" % size + rest


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_read(form: str) -> None:
    name = "d" * 100 + "/" + "n" * 90 if form == "ustar" else LONG
    content = b"content" * 100
    made = member(name, content, mode=0o4755, uid=1000, gid=0o7777777 if form == "ustar" else 3_000_000_000)
    tar = tar_of(made, member("l", type=tarfile.LNKTYPE, linkname=name[:100]), form=FORMATS[form])
    file, link = entries(tar)
    assert (file.name, file.kind, file.mode, file.size) == (name.encode(), Kind.FILE, 0o4755, len(content))
    assert (file.uid, file.gid, file.mtime_ns) == (1000, made[0].gid, 1_600_000_000 * 10**9)
    assert tar[file.offset : file.offset + file.size] == content
    assert (link.kind, link.link) == (Kind.HARD_LINK, name[:100].encode())


def test_kinds_devices_and_links() -> None:
    made = {
        Kind.DIRECTORY: member("d/", type=tarfile.DIRTYPE),
        Kind.SYMLINK: member("s", type=tarfile.SYMTYPE, linkname="t" * 300),
        Kind.CHARACTER_DEVICE: member("c", type=tarfile.CHRTYPE, devmajor=1, devminor=300),
        Kind.BLOCK_DEVICE: member("b", type=tarfile.BLKTYPE, devmajor=259, devminor=1),
        Kind.FIFO: member("f", type=tarfile.FIFOTYPE),
    }
    found = list(entries(tar_of(*made.values())))
    assert [entry.kind for entry in found] == list(made)
    assert found[1].link == b"t" * 300
    assert [entry.device for entry in found] == [(0, 0), (0, 0), (1, 300), (259, 1), (0, 0)]


@pytest.mark.parametrize(
    ("seconds", "ns"),
    [
        ("1.5", 1_500_000_000),
        ("1600000000.123456789", 1_600_000_000_123_456_789),
        ("-1.25", -1_250_000_000),
        ("-0.0000000001", -1),
        ("7.1234567899", 7_123_456_789),
    ],
)
def test_times_have_nanoseconds_and_may_be_before_1970(seconds: str, ns: int) -> None:
    (entry,) = entries(tar_of(member("x", pax_headers={"mtime": seconds})))
    assert entry.mtime_ns == ns


def test_extended_attributes_and_global_headers() -> None:
    pax = {"SCHILY.xattr.user.a": "1", "comment": "x"}
    (entry,) = entries(tar_of(member("x", pax_headers=pax)))
    assert entry.xattrs == {b"user.a": b"1"}
    shared = header(type=b"g", size=b"%011o\0" % 8) + b"8 a=bcd\n".ljust(BLOCK, b"\0")
    (entry,) = entries(shared + header(name=b"kept\0"))
    assert entry.name == b"kept"


def test_an_extended_attribute_may_be_binary() -> None:
    value = b"\0\n=\xff"
    (entry,) = entries(pax_header(record(b"SCHILY.xattr.security.capability", value)) + header())
    assert entry.xattrs == {b"security.capability": value}


def test_the_last_pax_record_of_a_key_counts_and_an_empty_one_means_the_header() -> None:
    (entry,) = entries(pax_header(record(b"path", b"one") + record(b"path", b"two")) + header())
    assert entry.name == b"two"
    (entry,) = entries(pax_header(record(b"path", b"")) + header())
    assert entry.name == b"x/"


def test_old_tars_mark_directories_by_a_slash() -> None:
    (entry,) = entries(header(name=b"old/", type=b"\0"))
    assert entry.kind is Kind.DIRECTORY


def test_signed_checksums_are_accepted() -> None:
    made = bytearray(header(name=b"\xe4\xf6\xfc\0"))
    made[148:156] = b" " * 8
    made[148:156] = b"%06o\0 " % sum(byte - 256 if byte > 127 else byte for byte in made)
    (entry,) = entries(bytes(made))
    assert entry.name == b"\xe4\xf6\xfc"


def test_an_empty_file_is_an_empty_layer(tmp_path: Path) -> None:
    empty = tmp_path / "empty.tar"
    empty.touch()
    with mapped(empty) as tar:
        assert list(entries(tar)) == []


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "two.tar").write_bytes(header(name=b"a\0") + header(name=b"b\0"))
    with mapped(tmp_path / "two.tar") as tar:
        assert [entry.name for entry in entries(tar)] == [b"a", b"b"]


@pytest.mark.parametrize(
    ("before", "zeros", "ended"),
    [(0, 2, True), (1, 2, True), (3, 3, True), (0, 0, False), (0, 1, False), (3, 1, False)],
)
def test_two_blocks_of_zeros_end_a_tar(tmp_path: Path, before: int, zeros: int, ended: bool) -> None:
    tar = tmp_path / "x.tar"
    tar.write_bytes(header() * before + bytes(zeros * BLOCK))
    assert is_ended(tar) is ended


def test_the_largest_values_are_read() -> None:
    (entry,) = entries(header(type=b"L", size=b"%011o\0" % MAX_RECORD_BYTES) + b"n" * MAX_RECORD_BYTES + header())
    assert entry.name == b"n" * MAX_RECORD_BYTES
    (entry,) = entries(header(type=b"3", major=b"0007777\0", minor=b"3777777\0", mode=b"\x80\0\0\0\0\0\x0f\xff"))
    assert (entry.device, entry.mode) == ((4095, 2**20 - 1), 0o7777)
    for seconds in (2**63 - 1, -(2**63)):
        (entry,) = entries(pax_header(record(b"mtime", b"%d" % seconds)) + header())
        assert entry.mtime_ns == seconds * 10**9


def sparse_pax() -> bytes:
    return pax_header(record(b"GNU.sparse.major", b"1")) + header(type=b"0")


HOSTILE: dict[str, tuple[bytes, str]] = {
    "half a header": (header()[:300], "within a header"),
    "wrong checksum": (header()[:-1] + b"x", "checksum"),
    "text for a number": (header(mode=b"zzzzzzz\0"), "is not a number"),
    "data beyond the end": (header(type=b"0", size=b"77777777777\0"), "within an entry's data"),
    "negative size": (header(type=b"0", size=b"\xff" * 12), "size of -1"),
    "enormous size": (header(type=b"0", size=b"\x80" + b"\x3f" * 11), "within an entry's data"),
    "enormous user": (header(uid=b"\x80\0\0\x01\0\0\0\0"), "user or group"),
    "negative user": (header(uid=b"\xff" * 8), "user or group"),
    "time out of range": (header(mtime=b"\x80" + b"\x3f" * 11), "a time of"),
    "pax: no length": (pax_header(b"path=x\n") + header(), "broken record"),
    "pax: length beyond the end": (pax_header(b"99 path=x\n") + header(), "broken record"),
    "pax: length too short": (pax_header(b"3 path=x\n") + header(), "broken record"),
    "pax: zero length": (pax_header(b"0 path=x\n") + header(), "broken record"),
    "pax: huge length": (pax_header(b"9" * 400 + b" a=b\n") + header(), "broken record"),
    "pax: no key": (pax_header(b"5 =x\n") + header(), "broken record"),
    "pax: NUL in a path": (pax_header(record(b"path", b"a\0b")) + header(), "NUL"),
    "pax: size no number": (pax_header(record(b"size", b"-1")) + header(type=b"0"), "size of"),
    "pax: size of many digits": (pax_header(record(b"size", b"9" * 5000)) + header(type=b"0"), "size of"),
    "pax: time no number": (pax_header(record(b"mtime", b"nan")) + header(), "time of"),
    "pax: fraction no number": (pax_header(record(b"mtime", b"1.-5")) + header(), "time of"),
    "pax: time too late": (pax_header(record(b"mtime", b"%d" % 2**63)) + header(), "time of"),
    "pax: time too early": (pax_header(record(b"mtime", b"%d" % -(2**63 + 1))) + header(), "time of"),
    "pax: user no number": (pax_header(record(b"uid", b"root")) + header(), "user or group"),
    "nothing after pax": (pax_header(record(b"path", b"a")), "after the extended header"),
    "record too large": (header(type=b"x", size=b"%011o\0" % (MAX_RECORD_BYTES + 1)) + bytes(1 << 21), "a header of"),
    "long name beyond the end": (header(type=b"L", size=b"77777777777\0"), "within an entry's data"),
    "more behind a lone block of zeros": (bytes(BLOCK) + header(), "lone block of zeros"),
    "sparse (GNU)": (header(type=b"S"), "sparse"),
    "sparse (pax)": (sparse_pax(), "sparse"),
    "unknown type": (header(type=b"V"), "unknown type"),
    "link without a target": (header(type=b"2"), "without a target"),
    "link too long": (pax_header(record(b"linkpath", b"t" * 4096)) + header(type=b"2"), "symbolic link to 4096"),
    "device's major out of range": (header(type=b"3", major=b"0010000\0"), "device 4096:0"),
    "device's minor out of range": (header(type=b"3", minor=b"4000000\0"), "device 0:1048576"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tars_are_refused_with_the_reason(name: str) -> None:
    tar, reason = HOSTILE[name]
    with pytest.raises(BrokenTarError, match=reason) as caught:
        list(entries(tar))
    assert "at byte" in str(caught.value)


@given(st.binary(max_size=4 * BLOCK))
def test_garbage_never_raises_anything_else(garbage: bytes) -> None:
    read_or_refused(garbage)


@given(st.data())
def test_damaged_headers_never_raise_anything_else(data: Any) -> None:
    """With a right checksum, so that the damage is looked at."""
    tar = bytearray(tar_of(member(LONG, b"abc" * 400, pax_headers={"SCHILY.xattr.user.a": "1"}), member("b", b"b")))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(tar) - 1))
        tar[at] = data.draw(st.integers(0, 255))
    for at in range(0, len(tar), BLOCK):
        if tar[at + 257 : at + 262] == b"ustar":
            tar[at : at + BLOCK] = summed(tar[at : at + BLOCK])
    read_or_refused(bytes(tar))


def read_or_refused(tar: bytes) -> None:
    try:
        found = list(entries(tar))
    except BrokenTarError:
        return
    for entry in found:
        assert 0 <= entry.offset <= entry.offset + entry.size <= len(tar)
        assert -(2**63) <= entry.mtime_ns // 10**9 < 2**63
        struct.pack("<II", entry.uid, entry.gid)
