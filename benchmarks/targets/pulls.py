"""I10: storing an image whose layers are here already, compressed, beside their decompression alone."""

from __future__ import annotations

import asyncio
import io
import shutil
import tarfile
import tempfile
import time
import zlib
from pathlib import Path
from typing import Final

from agentenv.config import cache_dir
from agentenv.store import Store
from benchmarks.image_farm import base_tar
from benchmarks.measure import Outcome, at_most
from benchmarks.targets.effort import Effort
from tests.image_sources import oci_layout

FILES, FILE_BYTES = 6_000, 64 * 1024
"""Of a second layer: as many files and bytes as the image of a task has above its base."""
_CHUNK_BYTES: Final = 1024 * 1024
_GZIP_MEMBER: Final = 16 + zlib.MAX_WBITS


async def i10_pull(effort: Effort) -> list[Outcome]:
    """Seconds per GB (10^9 bytes of tar): everything that a pull does but the network, less what zlib takes."""
    beyond, alone = await asyncio.to_thread(_pulls, effort.rounds)
    goal = at_most("I10", "storing a pulled image beyond its decompression, per GB", "s", 0.5)
    return [goal.outcome(beyond, decompression_s_per_gb=alone)]


def _pulls(rounds: int) -> tuple[list[float], list[float]]:
    beyond, alone = [], []
    with tempfile.TemporaryDirectory(prefix="agentenv-bench-", dir=cache_dir()) as directory:
        place = Path(directory)
        base = base_tar().read_bytes()
        layers = [base, _own_layer(base)]
        gigabytes = sum(map(len, layers)) / 1e9
        layout = oci_layout(place / "layout", *layers)
        for _ in range(rounds):
            decompressed_s = _decompression_s(layout.directory)
            began = time.perf_counter()
            Store.open(place / "store").ensure(f"oci:{layout.directory}")
            stored_s = time.perf_counter() - began
            shutil.rmtree(place / "store")
            beyond.append((stored_s - decompressed_s) / gigabytes)
            alone.append(decompressed_s / gigabytes)
    return beyond, alone


def _own_layer(content: bytes) -> bytes:
    """A tar of files that are as compressible as a base's."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for number in range(FILES):
            at = number * FILE_BYTES % (len(content) - FILE_BYTES)
            entry = tarfile.TarInfo(f"opt/{number // 100}/{number}")
            entry.size = FILE_BYTES
            tar.addfile(entry, io.BytesIO(content[at : at + FILE_BYTES]))
    return target.getvalue()


def _decompression_s(layout: Path) -> float:
    """What zlib takes for the layers of a layout, its blobs in the page cache."""
    took_s = 0.0
    for blob in (layout / "blobs" / "sha256").iterdir():
        content = blob.read_bytes()
        if not content.startswith(b"\x1f\x8b"):
            continue
        began = time.perf_counter()
        member = zlib.decompressobj(_GZIP_MEMBER)
        for at in range(0, len(content), _CHUNK_BYTES):
            chunk = content[at : at + _CHUNK_BYTES]
            while chunk and not member.eof:
                member.decompress(chunk, _CHUNK_BYTES)
                chunk = member.unconsumed_tail
        took_s += time.perf_counter() - began
    return took_s
