"""send, receive, apply and search of the real slotfiles: its SHA-256, and what hostile input does to it."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from pathlib import Path

import pytest

from agentenv.containers.local_files import ContentDigest, TreeWriter, stream_of
from agentenv.sandbox.server.tools.file_records import RecordReader
from agentenv.sandbox.server.tools.files import Finished
from agentenv.sandbox.server.tools.slotfiles_exit_codes import BAD_PATTERN
from agentenv.wire.transfers import CHUNKED, BrokenOffError, Entry, chunk
from tests.unit.sandbox.server.file_tools_box import Box, box_fixture
from tests.unit.sandbox.slotagent.agent_box import sanitized

__all__ = ["box_fixture"]

SIZES = (0, 1, 55, 56, 57, 63, 64, 65, 119, 120, 65_535, 65_536, 65_537, 200_003)


@pytest.fixture
def hardened(box: Box) -> Box:
    """The box with the sanitizers' build."""
    shutil.copy(sanitized().files, box.program[0])
    return box


async def slotfiles(box: Box, operation: str, *more: str, stdin: bytes = b"") -> Finished:
    program, root = box.program
    done = await box.runner.run([program, root, operation, *more], stdin=stdin, output_bytes=10**8)
    assert b"anitizer" not in done.stderr, done.stderr
    assert b"runtime error" not in done.stderr, done.stderr
    return done


def received(printed: bytes, target: Path) -> ContentDigest:
    with TreeWriter(target, max_bytes=10**9) as writer:
        writer.feed(printed)
        assert writer.finish()
    return writer.tally


async def test_its_sha256_is_the_standards_at_every_length(hardened: Box, tmp_path: Path) -> None:
    for size in SIZES:
        hardened.make(f"tree/{size:07}").write_bytes(os.urandom(size))
    sent = await slotfiles(hardened, "send", "tree", "1000")
    assert sent.exit_code == 0
    tally = received(bytes(sent.stdout), tmp_path / "out")  # compares every digest with hashlib's
    assert tally.total_bytes == sum(SIZES)
    back = b"".join(stream_of(tmp_path / "out", ContentDigest()))
    assert (await slotfiles(hardened, "receive", "back", stdin=back)).exit_code == 0
    for size in SIZES:
        assert (hardened.path / f"back/{size:07}").read_bytes() == (hardened.path / f"tree/{size:07}").read_bytes()
    wrong = Entry("f", size=CHUNKED).encode() + chunk(b"abc") + chunk(b"") + hashlib.sha256(b"abd").digest()
    done = await slotfiles(hardened, "receive", "wrong", stdin=wrong + Entry("e").encode())
    assert (done.exit_code, RecordReader(done.stdout).record().kind) == (74, "x")
    assert not (hardened.path / "wrong").exists()


async def test_a_sender_that_fails_says_where(box: Box, tmp_path: Path) -> None:
    box.make("tree/a", "x")
    locked = box.make("tree/b/locked", "x")
    locked.chmod(0)
    sent = await slotfiles(box, "send", "tree", "1000")
    with pytest.raises(BrokenOffError) as caught:
        received(bytes(sent.stdout), tmp_path / "out")
    assert (caught.value.code, caught.value.path) == (13, b"b/locked")
    with pytest.raises(BrokenOffError) as caught:
        received(bytes((await slotfiles(box, "send", "tree", "1")).stdout), tmp_path / "out")
    assert caught.value.code == 204


def variants(good: bytes) -> list[bytes]:
    cuts = [good[:cut] for cut in range(0, len(good), 11)]
    return cuts + [good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :] for at in range(0, len(good), 5)]


async def test_receive_survives_hostile_streams(hardened: Box) -> None:
    parts = [Entry("d"), Entry("d", b"d"), Entry("f", b"d/x", size=CHUNKED, mode=0o644)]
    good = b"".join(part.encode() for part in parts) + chunk(b"abc") + chunk(b"") + hashlib.sha256(b"abc").digest()
    good += Entry("l", b"d/l", b"x").encode() + Entry("m", b"d", mode=0o700).encode() + Entry("e").encode()
    assert (await slotfiles(hardened, "receive", "fine", stdin=good)).exit_code == 0
    for stdin in variants(good):
        done = await slotfiles(hardened, "receive", "into", stdin=stdin)
        assert done.exit_code < 128 or 200 <= done.exit_code <= 205, (done, stdin)
        left = [path for path in hardened.path.rglob("*") if path.name.startswith(".agentenv")]
        assert left == []


async def test_patch_survives_hostile_text(hardened: Box) -> None:
    """Cut anywhere, with bytes flipped, and shorter than announced: a clean end, and nothing staged is left."""
    good = b"""diff --git "a/o\\156e" b/one
--- "a/o\\156e"
+++ b/one
@@ -1,2 +1,2 @@ f
 a
-b
+B
diff --git a/one b/two
rename from one
rename to two
diff --git a/d/new b/d/new
new file mode 100644
--- /dev/null
+++ b/d/new
@@ -0,0 +1 @@
+x
\\ No newline at end of file
"""
    for text in [*variants(good), good]:
        shutil.rmtree(hardened.path / "d", ignore_errors=True)
        (hardened.path / "two").unlink(missing_ok=True)
        hardened.make("one", "a\nb\n")
        for announced in (len(text), len(text) + 1):
            done = await slotfiles(hardened, "patch", ".", "-", "3", str(announced), stdin=text)
            assert done.exit_code < 128 or 200 <= done.exit_code <= 207, (done, text)
            left = [path for path in hardened.path.rglob("*") if path.name.startswith(".agentenv")]
            assert left == []
    assert hardened.tree().items() >= {("two", "a\nB\n"), ("d/new", "x")}


async def test_search_survives_what_files_hold(hardened: Box) -> None:
    for number, content in enumerate((b"", b"\n", b"\r\n", b"x", b"\xff\xfe\n\xc3", b"a" * 70_000, b"\n" * 70_000)):
        hardened.make(f"f{number}").write_bytes(content)
    ripgrep = hardened.paths.ripgrep
    for flags, pattern in (("-", "a*x?$"), ("i", "^.$"), ("F", "x"), ("iF", "X")):
        assert (await slotfiles(hardened, "search", ".", ripgrep, flags, "10", "", pattern)).exit_code == 0
    for wrong in ("(", "[", r"\w{999}{999}"):
        assert (await slotfiles(hardened, "search", ".", ripgrep, "-", "10", "", wrong)).exit_code == BAD_PATTERN


async def test_search_survives_what_a_process_prints_in_the_place_of_ripgrep(hardened: Box) -> None:
    """The slot's user can trace it, or kill it."""
    rng = random.Random(43)
    pieces = [b"\n", b"\n", b";", b";", b"1", b"7", b"99999999999999999999999", b"0", b"\0", b"a" * 401, b"-1", b":"]
    for name in ("a", "b"):
        hardened.make(name, "x\n" * 9)
    real, forged = Path(hardened.paths.ripgrep), hardened.outside / "forged"
    listing = shutil.copy(real, hardened.outside / "real")
    real.write_text(
        f'#!/bin/sh\ncase "$*" in *--files*) exec {listing} "$@";; esac\ncat {forged}; exec cat > /dev/null\n'
    )
    for _ in range(60):
        forged.write_bytes(b"".join(rng.choice(pieces) for _ in range(rng.randint(1, 30))))
        done = await slotfiles(hardened, "search", ".", str(real), "-", "3", "", "x")
        assert done.exit_code == 0, (done, forged.read_bytes())


async def test_a_time_before_1970_with_a_fraction_is_kept(box: Box) -> None:
    when_ns = -1_500_000_001
    root = Entry("f", b"", size=CHUNKED, mode=0o644, modified_ns=when_ns)
    stdin = root.encode() + chunk(b"x") + chunk(b"") + hashlib.sha256(b"x").digest() + Entry("e").encode()
    done = await slotfiles(box, "receive", "old", stdin=stdin)
    assert done.exit_code == 0, done
    assert (box.path / "old").stat().st_mtime_ns == when_ns
