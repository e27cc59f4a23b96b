"""slottar and slotas with AddressSanitizer and UBSan: whatever they are given, they end in an exit code of theirs."""

from __future__ import annotations

import io
import os
import random
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.unit.sandbox.slotagent.agent_box import sanitized

ENV = {"ASAN_OPTIONS": "detect_leaks=0", "PATH": "/usr/bin:/bin"}
TARS_PER_SEED = 40


def run(program: Path, *arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run([program, *arguments], input=given, capture_output=True, env=ENV, timeout=120, check=False)
    assert b"Sanitizer" not in done.stderr, done.stderr.decode(errors="replace")
    assert b"runtime error" not in done.stderr, done.stderr.decode(errors="replace")
    assert done.returncode >= 0, done
    return done


def usual_tar() -> bytes:
    """Each kind of entry, with long names, extended headers and links."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind in (("d", tarfile.DIRTYPE), ("d/" + "n" * 150, tarfile.REGTYPE), ("f", tarfile.REGTYPE)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode, entry.mtime = kind, 0o755, 1.25
            entry.uid, entry.gid = os.geteuid(), os.getegid()
            entry.pax_headers = {"SCHILY.xattr.user.a": "b" * 40}
            content = b"" if kind == tarfile.DIRTYPE else b"content" * 100
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        for name, kind, target in (
            ("s", tarfile.SYMTYPE, "../out"),
            ("h", tarfile.LNKTYPE, "f"),
            ("p", tarfile.FIFOTYPE, ""),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, target
            tar.addfile(entry)
    return out.getvalue()


def changed(tar: bytes, chance: random.Random) -> bytes:
    """Bytes replaced in the parts that are read as headers, blocks moved, or the end cut off."""
    out = bytearray(tar)
    for _ in range(chance.randrange(1, 12)):
        block = 512 * chance.randrange(len(out) // 512)
        at = block + chance.randrange(512)
        match chance.randrange(5):
            case 0:
                out[at] = chance.randrange(256)
            case 1:
                out[block + 124 : block + 136] = bytes(chance.choice(b"01234567\0 \x80\xff") for _ in range(12))
            case 2:
                out[block : block + 512] = out[:512]
            case 3:
                out[block + 156] = chance.choice(b"0123456xgLKS")
            case _ if len(out) > 1024:
                del out[at:]
        for header in range(0, len(out) - 511, 512) if chance.random() < 0.9 else ():
            whole = bytes(out[header : header + 148]) + b" " * 8 + bytes(out[header + 156 : header + 512])
            if b"ustar" in whole[257:263]:
                out[header + 148 : header + 156] = b"%06o\0 " % sum(whole)
        if len(out) < 512:
            break
    return bytes(out)


@pytest.mark.parametrize("verb", ["unpack", "unpack-whole"])
@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_tar_is_refused_and_never_leaves_the_directory(tmp_path: Path, verb: str, seed: int) -> None:
    chance, tar = random.Random(seed), usual_tar()
    owner = [str(os.geteuid()), str(os.getegid()), "755"] if verb == "unpack" else []
    codes = set()
    for number in range(TARS_PER_SEED):
        into = tmp_path / str(number)
        into.mkdir()
        given = changed(tar, chance) if number else tar
        codes.add(run(sanitized().tar, verb, str(into), *owner, given=given).returncode)
    assert 0 in codes
    assert len(codes) > 1, "some were damaged enough to be refused"
    assert {path.name for path in tmp_path.iterdir()} == {str(number) for number in range(TARS_PER_SEED)}


@pytest.mark.skipif(os.geteuid() != 0, reason="it becomes another user")
@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        ("root", 0),
        ("0:0", 0),
        (":0", 0),
        ("root:root", 0),
        ("4294967294", 0),
        ("4294967295", 210),
        ("99999999999999999999", 210),
        ("-1", 210),
        ("nobody-of-this-name", 210),
        ("root:none-of-this-name", 211),
        ("root:", 125),
        ("n" * 256, 210),
        ("n" * 257, 125),
        ("root:" + "g" * 5000, 211),
        ("root:0:0", 211),
    ],
)
def test_any_name_of_a_user_ends_in_a_code_of_its_own(wanted: str, code: int) -> None:
    assert run(sanitized().as_user, wanted, "true").returncode == code
