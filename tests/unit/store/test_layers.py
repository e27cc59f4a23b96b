"""Blobs become tars, or are refused before anything depends on them."""

from __future__ import annotations

import errno
import gzip
import io
import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentenv.errors import BadImageError, ImageUnavailableError
from agentenv.store import layers
from agentenv.store.layers import CHUNK_BYTES, Blob, swells, write_tar
from agentenv.store.layout import RESERVE_BYTES, check_room
from tests.image_sources import Compression, compressed, sha256

TAR = os.urandom(300_000) * 11
HOWS: tuple[Compression, ...] = ("", "gzip", "zstd")


def blob(content: bytes, digest: str | None = None) -> Blob:
    def chunks() -> Iterator[bytes]:
        for at in range(0, len(content), 70_001):
            yield content[at : at + 70_001]

    return Blob(chunks, len(content), sha256(content) if digest is None else digest)


def unpacked(source: Blob, diff_id: str = sha256(TAR), limit_bytes: int = 10 * len(TAR)) -> bytes:
    target = io.BytesIO()
    size = write_tar(source, diff_id, target, limit_bytes=limit_bytes, done=lambda _: None)
    assert size == len(target.getvalue())
    return target.getvalue()


@pytest.mark.parametrize("how", HOWS)
def test_every_compression_is_undone(how: Compression) -> None:
    assert unpacked(blob(compressed(TAR, how))) == TAR


def test_gzip_of_several_members_is_one_tar() -> None:
    parts = [TAR[:1], TAR[1:CHUNK_BYTES], b"", TAR[CHUNK_BYTES:]]
    assert unpacked(blob(b"".join(gzip.compress(part, 1) for part in parts))) == TAR


def test_progress_counts_the_bytes_of_the_blob() -> None:
    told: list[int] = []
    source = blob(compressed(TAR, "gzip"))
    write_tar(source, sha256(TAR), io.BytesIO(), limit_bytes=10**9, done=told.append)
    assert told == sorted(told)
    assert told[-1] == source.size_bytes


@pytest.mark.parametrize("how", HOWS)
def test_a_blob_that_its_digest_does_not_name_is_refused(how: Compression) -> None:
    with pytest.raises(BadImageError, match="manifest says"):
        unpacked(blob(compressed(TAR, how), sha256(b"other")))


@pytest.mark.parametrize("size_bytes", [0, 10**18])
def test_a_blob_of_another_size_is_refused(size_bytes: int) -> None:
    with pytest.raises(BadImageError, match=f"manifest says {size_bytes}"):
        unpacked(Blob(blob(TAR).chunks, size_bytes, sha256(TAR)))


@pytest.mark.parametrize("how", HOWS)
def test_a_tar_that_its_diff_id_does_not_name_is_refused(how: Compression) -> None:
    with pytest.raises(BadImageError, match="configuration says"):
        unpacked(blob(compressed(TAR, how)), sha256(b"other"))


@pytest.mark.parametrize("how", ["gzip", "zstd"])
@pytest.mark.parametrize("keep", [-1, -9, 5, 1000])
def test_a_truncated_blob_is_refused(how: Compression, keep: int) -> None:
    with pytest.raises(BadImageError, match=r"is broken|too early"):
        unpacked(blob(compressed(TAR, how)[:keep]))


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_garbage_after_the_compressed_data_is_refused(how: Compression) -> None:
    with pytest.raises(BadImageError, match="is broken"):
        unpacked(blob(compressed(TAR, how) + b"garbage"))


@pytest.mark.parametrize("how", HOWS)
def test_a_bomb_stops_at_the_limit(how: Compression) -> None:
    bomb = compressed(bytes(200 * CHUNK_BYTES), how)
    written = io.BytesIO()
    with pytest.raises(BadImageError, match="more than 3000000 bytes"):
        write_tar(blob(bomb), "", written, limit_bytes=3_000_000, done=lambda _: None)
    assert len(written.getvalue()) <= 3_000_000


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_a_bomb_stops_long_before_the_limit(how: Compression, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(layers, "_SWELLS_FROM_BYTES", 32 * CHUNK_BYTES)
    bomb = compressed(bytes(200 * CHUNK_BYTES), how)
    with (tmp_path / "layer").open("w+b") as target, pytest.raises(BadImageError, match="100 times its size"):
        write_tar(blob(bomb), "", target, limit_bytes=10**12, done=lambda _: None)
    assert (tmp_path / "layer").stat().st_size < 100 * CHUNK_BYTES


def test_what_swells() -> None:
    gib = 2**30
    assert [swells(*pair) for pair in ((1, gib), (0, gib + 1), (gib // 40, 2 * gib), (gib // 200, 2 * gib))] == [
        *(False, True, False, True)
    ]


def test_a_disk_keeps_room_for_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_frsize=4096, f_blocks=10**8, f_bavail=300_000))
    check_room(tmp_path, 300_000 * 4096 - RESERVE_BYTES)
    with pytest.raises(OSError, match="less than the reserve of") as full:
        check_room(tmp_path, 300_000 * 4096 - RESERVE_BYTES + 1)
    assert full.value.errno == errno.ENOSPC
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_frsize=4096, f_blocks=20_000, f_bavail=1_000))
    check_room(tmp_path)  # a twentieth of a small disk is enough
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_frsize=4096, f_blocks=20_000, f_bavail=999))
    with (tmp_path / "layer").open("w+b") as target, pytest.raises(OSError, match="less than the reserve of"):
        write_tar(blob(bytes(20 * CHUNK_BYTES)), "", target, limit_bytes=10**12, done=lambda _: None)


def test_an_empty_blob_is_an_empty_tar() -> None:
    assert unpacked(blob(b""), sha256(b"")) == b""


def test_without_the_zstd_program_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    source = blob(compressed(TAR, "zstd"))
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ImageUnavailableError, match="apt-get install zstd"):
        unpacked(source)


def test_a_source_that_fails_is_told_through_zstd() -> None:
    content = compressed(TAR, "zstd")

    def chunks() -> Iterator[bytes]:
        yield content[:100]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        unpacked(Blob(chunks, len(content)))


def test_deflate_alone_is_not_taken_for_gzip() -> None:
    with pytest.raises(BadImageError, match="configuration says"):
        unpacked(blob(zlib.compress(TAR)))


def test_a_source_that_fails_is_what_is_told_and_no_thread_stays() -> None:
    def failing() -> Iterator[bytes]:
        yield TAR[:CHUNK_BYTES]
        raise ImageUnavailableError("the peer is gone")

    before = threading.active_count()
    for _ in range(5):
        with pytest.raises(ImageUnavailableError, match="the peer is gone"):
            unpacked(Blob(failing, len(TAR), sha256(TAR)))
    assert threading.active_count() == before


def test_a_target_that_fails_ends_the_reading() -> None:
    class Full(io.BytesIO):
        def write(self, _: object) -> int:
            raise OSError(errno.ENOSPC, "no space left")

    closed: list[bool] = []

    def endless() -> Iterator[bytes]:
        try:
            while True:
                yield bytes(CHUNK_BYTES)
        finally:
            closed.append(True)

    before = threading.active_count()
    with pytest.raises(OSError, match="no space left"):
        write_tar(Blob(endless, 10**18), "", Full(), limit_bytes=10**18, done=lambda _: None)
    assert threading.active_count() == before
    assert closed == [True]
