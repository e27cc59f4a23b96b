"""A damaged tar is refused wherever the damage is: GNU tar is the measure, which unpacks what it can and then fails."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import os
import random
import subprocess
import tarfile
from pathlib import Path

import pytest

from agentenv.errors import InvalidArgumentsError
from agentenv.sandbox.server.tools.artifacts import unpack
from agentenv.tar_headers import BLOCK

Files = dict[str, tuple[int, str]]
SIZES = (0, 1, 511, 512, 513, 1500)
TARS_PER_SEED = 60


def packed(chance: random.Random) -> bytes:
    """Long names only in the form that has something to check in their headers."""
    out = io.BytesIO()
    form = chance.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))
    names = ("n", "d/n", "é", "long" * 30 if form == tarfile.PAX_FORMAT else "m")
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for number in range(chance.randrange(1, 6)):
            member = tarfile.TarInfo(f"{chance.choice(names)}{number}")
            member.mtime = chance.choice((5, 1_700_000_000))
            member.type = chance.choice((tarfile.REGTYPE, tarfile.REGTYPE, tarfile.REGTYPE, tarfile.DIRTYPE))
            member.size = chance.choice(SIZES) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(chance.randbytes(member.size)))
    return out.getvalue()


def damaged(tar: bytes, chance: random.Random) -> bytes:
    """A bit turned, a block replaced, taken away or put in, the end cut off, or more behind the end."""
    out = bytearray(tar)
    end = len(tar.rstrip(b"\0"))
    block = BLOCK * chance.randrange(-(-end // BLOCK))
    match chance.randrange(7):
        case 0 | 1:
            at = chance.randrange(block, block + BLOCK)
            out[at] ^= 1 << chance.randrange(8)
        case 2:
            out[block : block + BLOCK] = chance.randbytes(BLOCK)
        case 3:
            del out[block : block + BLOCK]
        case 4:
            out[block:block] = chance.choice((bytes(BLOCK), b"garbage!" * 64))
        case 5:
            del out[chance.randrange(end) :]
        case _:
            out += chance.choice((b"x", b"garbage!" * 100, bytes(100)))
    return bytes(out)


def by_gnu_tar(tar: bytes, into: Path) -> tuple[bool, Files]:
    """Whether it failed, and the files that it has unpacked."""
    into.mkdir()
    done = subprocess.run(["tar", "-xf", "-", "-C", into], input=tar, capture_output=True, check=False)
    found = {}
    for path in into.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            found[str(path.relative_to(into))] = (len(content), hashlib.sha256(content).hexdigest())
    return done.returncode != 0, found


@pytest.mark.parametrize("seed", range(6))
def test_what_gnu_tar_fails_at_is_refused_and_what_is_taken_is_whole(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    outcomes = set()
    for number in range(TARS_PER_SEED):
        whole = packed(chance)
        tar = damaged(whole, chance) if number else whole
        failed, expected = by_gnu_tar(tar, tmp_path / str(number))
        try:
            files = unpack(tar)[1].files
        except InvalidArgumentsError:
            outcomes.add((failed, "refused"))
            assert number, "an undamaged one"
            continue
        outcomes.add((failed, "taken"))
        assert {file.path: (file.size_bytes, file.sha256) for file in files} == expected, (seed, number)
        assert not failed or _only_its_checksum_differs(tar, whole), (seed, number)
    assert {(True, "refused"), (False, "taken")} <= outcomes


def _only_its_checksum_differs(tar: bytes, whole: bytes) -> bool:
    """The digits' end may be written in several ways, of which GNU tar takes some."""
    return len(tar) == len(whole) and all(148 <= at % BLOCK < 156 for at in range(len(tar)) if tar[at] != whole[at])


def test_a_compressed_tar_that_is_damaged_is_refused_too() -> None:
    tar = packed(random.Random(1))
    whole = gzip.compress(tar, mtime=0)
    assert unpack(whole)[1].files == unpack(tar)[1].files == unpack(whole[:10] + whole[10:] + bytes(512))[1].files
    cut_inside = gzip.compress(tar[: 2 * BLOCK + 100], mtime=0)
    wrong_sum = whole[:-6] + bytes([whole[-6] ^ 1]) + whole[-5:]
    for damage in (
        whole[:-1],
        whole[: len(whole) // 2],
        wrong_sum,
        whole + b"garbage",
        cut_inside,
        bz2.compress(tar),
        b"",
    ):
        with pytest.raises(InvalidArgumentsError, match="not a complete tar archive"):
            unpack(damage)


@pytest.mark.parametrize("ns", [0, -1, -250_000_000, -1_750_000_001, 1, 10**18 + 7, 9 * 10**18])
def test_times_arrive_as_they_were_written(tmp_path: Path, ns: int) -> None:
    """By GNU tar, from a file of that time; its own format has no fractions of seconds."""
    (tmp_path / "f").touch()
    os.utime(tmp_path / "f", ns=(0, ns))
    for form, kept in (("pax", ns), ("gnu", ns - ns % 10**9)):
        argv = ["tar", "-cf", "-", f"--format={form}", "-C", str(tmp_path), "f"]
        instructions, _ = unpack(subprocess.run(argv, capture_output=True, check=True).stdout)
        assert kept.to_bytes(8, "little", signed=True) in instructions
