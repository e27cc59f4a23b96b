"""I10: storing an image whose layers are here already, compressed, beside their decompression alone."""

from __future__ import annotations

import asyncio
import io
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import partial
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
    beyond, alone, computed = await asyncio.to_thread(_pulls, effort.rounds)
    goal = at_most("I10", "storing a pulled image beyond its decompression, per GB", "s", 0.5)
    cpu = at_most("I10.cpu", "the same in CPU time", "s", 2.5)
    return [goal.outcome(beyond, decompression_s_per_gb=alone), cpu.outcome(computed)]


def _pulls(rounds: int) -> tuple[list[float], list[float], list[float]]:
    beyond, alone, computed = [], [], []
    with tempfile.TemporaryDirectory(prefix="agentenv-bench-", dir=cache_dir()) as directory:
        place = Path(directory)
        base = base_tar().read_bytes()
        layers = [base, _own_layer(base)]
        gigabytes = sum(map(len, layers)) / 1e9
        layout = oci_layout(place / "layout", *layers)
        for _ in range(rounds):
            decompressed_s, decompressed_cpu_s = _timed(partial(_decompress, layout.directory))
            store = Store.open(place / "store")
            stored_s, stored_cpu_s = _timed(partial(store.ensure, f"oci:{layout.directory}"))
            shutil.rmtree(place / "store")
            beyond.append((stored_s - decompressed_s) / gigabytes)
            alone.append(decompressed_s / gigabytes)
            computed.append((stored_cpu_s - decompressed_cpu_s) / gigabytes)
    return beyond, alone, computed


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """How long it takes, and how much CPU time of this process."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began_s, time.process_time() - began_cpu_s


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


def _decompress(layout: Path) -> None:
    """The layers of a layout by zlib, in chunks as the store does it."""
    for blob in (layout / "blobs" / "sha256").iterdir():
        content = blob.read_bytes()
        if not content.startswith(b"\x1f\x8b"):
            continue
        member = zlib.decompressobj(_GZIP_MEMBER)
        for at in range(0, len(content), _CHUNK_BYTES):
            chunk = content[at : at + _CHUNK_BYTES]
            while chunk and not member.eof:
                member.decompress(chunk, _CHUNK_BYTES)
                chunk = member.unconsumed_tail
