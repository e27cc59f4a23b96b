"""From a layer's blob to its verified tar: read, decompressed and written at once, by a thread each, which also hashes:
none of this needs the interpreter's lock."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import shutil
import subprocess
import tempfile
import threading
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import IO, BinaryIO, Final

from agentenv.deadlines import scaled
from agentenv.errors import BadImageError, ImageUnavailableError
from agentenv.store.layout import begin_to_disk, check_room

CHUNK_BYTES: Final = 1024 * 1024
_AHEAD: Final = 4
"""Chunks that one step may be ahead of the next."""
_BEGIN_BYTES: Final = 16 * CHUNK_BYTES
"""So much of a tar is written before the disk begins with it."""
_MOST_SWELLING: Final = 100
_SWELLS_FROM_BYTES: Final = 1024**3  # smaller layers may compress by any factor
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_GZIP_MEMBER: Final = 16 + zlib.MAX_WBITS  # zlib: the data has a gzip header
_END_S: Final = scaled(30.0)
"""For a program that has been killed, or has nothing left to read."""


@dataclass(frozen=True)
class Blob:
    """A layer as its source has it, compressed or not."""

    chunks: Callable[[], Iterator[bytes]]
    """Reads it from its beginning."""
    size_bytes: int
    digest: str = ""
    """``sha256:…`` of it; empty where the source does not have it."""


def swells(packed_bytes: int, unpacked_bytes: int) -> bool:
    """Whether it is a bomb: more than 1 GiB, and more than 100 times what it is packed to."""
    return unpacked_bytes > max(_SWELLS_FROM_BYTES, _MOST_SWELLING * packed_bytes)


def write_tar(blob: Blob, diff_id: str, target: BinaryIO, *, limit_bytes: int, done: Callable[[int], None]) -> int:
    """Write a blob's uncompressed tar, which is ``diff_id``. Returns its size; ``done`` is called with the bytes of the
    blob have been read.

    Raises BadImageError when the blob is not what its digest says, its tar not what ``diff_id`` says, the compression
    broken, or the tar larger than ``limit_bytes`` or than :func:`swells` allows; ImageUnavailableError when the zstd
    program is needed and missing; OSError, also when the disk has too little room (``check_room``).
    """
    hashed = hashlib.sha256()
    size = read = begun = 0

    def count(bytes_read: int) -> None:
        nonlocal read
        read = bytes_read

    with _ahead(_verified(blob, count)) as compressed, _ahead(_decompressed(compressed)) as chunks:
        for chunk in chunks:
            size += len(chunk)
            if size > limit_bytes:
                raise BadImageError(f"the image's layers have more than {limit_bytes} bytes uncompressed")
            if swells(read, size):
                raise BadImageError(
                    f"a layer unpacks to more than {_MOST_SWELLING} times its size: {size} bytes of {read}"
                )
            hashed.update(chunk)
            target.write(chunk)
            if size - begun >= _BEGIN_BYTES:
                check_room(target.fileno())
                begin_to_disk(target, begun, size - begun)
                begun = size
            done(read)
        for _ in compressed:  # what lies after the end of the compressed data counts for the blob's digest
            pass
        done(read)
    if (found := f"sha256:{hashed.hexdigest()}") != diff_id:
        raise BadImageError(f"a layer is {found}, but the image's configuration says {diff_id}")
    return size


def _verified(blob: Blob, done: Callable[[int], None]) -> Generator[bytes, None, None]:
    """The blob's bytes; raises at their end when they are not what its digest says."""
    hashed = hashlib.sha256()
    read = 0
    for chunk in blob.chunks():
        if blob.digest:
            hashed.update(chunk)
        read += len(chunk)
        done(read)
        yield chunk
    if read != blob.size_bytes:
        raise BadImageError(f"a layer's blob has {read} bytes, but the image's manifest says {blob.size_bytes}")
    if blob.digest and (found := f"sha256:{hashed.hexdigest()}") != blob.digest:
        raise BadImageError(f"a layer's blob is {found}, but the image's manifest says {blob.digest}")


@contextlib.contextmanager
def _ahead(chunks: Generator[bytes, None, None]) -> Iterator[Generator[bytes, None, None]]:
    """The same chunks, brought by a thread that is a few of them ahead; what it fails with is raised in their place.
    The thread has ended when the block has."""
    brought: queue.Queue[bytes | BaseException | None] = queue.Queue(_AHEAD)
    left = threading.Event()

    def bring() -> None:
        last: BaseException | None = None
        try:
            with contextlib.closing(chunks):
                for chunk in chunks:
                    brought.put(chunk)
                    if left.is_set():
                        break
        except BaseException as error:
            last = error
        brought.put(last)

    def taken() -> Generator[bytes, None, None]:
        while isinstance(found := brought.get(), bytes):
            yield found
        if found is not None:
            raise found

    thread = threading.Thread(target=bring, name="layer", daemon=True)
    thread.start()
    try:
        yield taken()
    finally:
        left.set()
        while thread.is_alive():
            with contextlib.suppress(queue.Empty):
                brought.get_nowait()
            thread.join(0.001)


def _decompressed(chunks: Iterator[bytes]) -> Generator[bytes, None, None]:
    """By the first bytes, as engines do; media types are often wrong."""
    first = next(chunks, b"")
    whole = chain([first], chunks)
    if first.startswith(_GZIP):
        yield from _gunzipped(whole)
    elif first.startswith(_ZSTD):
        yield from _unzstd(whole)
    else:
        yield from whole


def _gunzipped(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Of one or more gzip members (estargz and pigz write several). No step makes more than CHUNK_BYTES."""
    member = zlib.decompressobj(_GZIP_MEMBER)
    for chunk in chunks:
        while chunk:
            if member.eof:
                member = zlib.decompressobj(_GZIP_MEMBER)
            try:
                yield member.decompress(chunk, CHUNK_BYTES)
            except zlib.error as error:
                raise BadImageError(f"a layer's gzip compression is broken: {error}") from None
            chunk = member.unused_data if member.eof else member.unconsumed_tail
    if not member.eof:
        rest = member.flush()
        yield rest
        if not member.eof:
            raise BadImageError("a layer's gzip compression ends too early")


def _unzstd(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """By the zstd program: Python has none of its own before 3.14."""
    if shutil.which("zstd") is None:
        raise ImageUnavailableError(
            "the image's layers are compressed with zstd, which is not installed", next_step="apt-get install zstd"
        )
    with tempfile.TemporaryFile() as words:
        argv = ["zstd", "--decompress", "--stdout", "--quiet", "--no-progress"]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words) as program:
            assert program.stdin is not None
            assert program.stdout is not None
            feeder = _Feeder(chunks, program.stdin)
            feeder.start()
            try:
                while chunk := program.stdout.read(CHUNK_BYTES):
                    yield chunk
                program.wait(_END_S)
            finally:
                program.kill()
                feeder.join(_END_S)
        if feeder.failure is not None:
            raise feeder.failure
        if program.returncode:
            words.seek(0)
            output = words.read(400).decode("utf-8", "replace").strip()
            raise BadImageError(f"a layer's zstd compression is broken: {output}")


class _Feeder(threading.Thread):
    """Writes to a program while another thread reads from it."""

    def __init__(self, chunks: Iterable[bytes], stdin: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self.failure: BaseException | None = None
        self._chunks = chunks
        self._stdin = stdin

    def run(self) -> None:
        """Write everything, then close."""
        try:
            with self._stdin:
                for chunk in self._chunks:
                    self._stdin.write(chunk)
        except BrokenPipeError:
            pass  # the program has ended, and its output says why
        except BaseException as error:
            self.failure = error
