"""Files of any size to and from a slot, as streams over connections of their own: with a SHA-256 for every file
(:func:`upload`, :func:`download`), as tars with owners, modes and times, and as the layers of checkpoints.

No call waits for a transfer, neither of this slot nor of another. Memory use stays at a few MiB for any size, here,
in the server and in the slot. An interrupted transfer is repeated from its start; repeating one is idempotent.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Protocol, TypeVar

import aiohttp

from agentenv import errors
from agentenv.background import unless_lost
from agentenv.containers.connection import PIECE_BYTES, ContainerConnection, Params, Retries
from agentenv.containers.handle import ContainerHandle
from agentenv.containers.local_files import ContentDigest, TreeWriter, size_of, stream_of
from agentenv.deadlines import LAYER_SILENCE_S, scaled
from agentenv.tar_headers import is_ended
from agentenv.wire.environment import MAX_PATH_CHARS, MAX_USER_CHARS, why_no_argument
from agentenv.wire.leases import LAYERS_HEADER, LeaseKey
from agentenv.wire.transfers import NOT_REGULAR, OUTSIDE, TOO_LARGE, BrokenOffError, TransferReply

Progress = Callable[[int, int | None], None]
"""Called with the bytes transferred so far and, where known, the total, in the caller's event loop."""
DEFAULT_MAX_BYTES: Final = 8 * 1024**3
"""Default limit of a download: a slot can hold (sparse) files larger than any disk."""

_ATTEMPTS: Final = 3
_FIRST_PAUSE_S: Final = 0.2
_SILENCE_S: Final = scaled(300.0)
"""The container reports sooner that its slot is too slow, also for data still in the buffers of an upload."""

_REFUSALS: Final = (errors.InfraError, errors.ToolCallError, errors.PolicyRefusalError, errors.SlotDestroyedError)
T = TypeVar("T")


class TransferLease(Protocol):
    """The part of a lease that a transfer needs."""

    @property
    def key(self) -> LeaseKey:
        """Sent with every request."""

    @property
    def container(self) -> ContainerHandle:
        """Container of the slot."""

    async def wait_lost(self) -> errors.AgentEnvError:
        """Return when the lease is lost."""


@dataclass(frozen=True)
class Transferred:
    """Content of a transfer. ``sha256`` is the file's, or for a directory that of the lines ``<sha256>  <path>`` of
    its files, names sorted within each directory, as bytes."""

    files: int
    total_bytes: int
    sha256: str


async def upload(
    lease: TransferLease, local: Path, remote: str, *, progress: Progress | None = None, user: str | None = None
) -> Transferred:
    """Copy a local file or directory into the slot. A directory's content lands in ``remote``, beside existing
    entries; a file replaces an existing one of its name. ``user``: whose they are, in a slot with an image; by default
    its own.

    Raises: OSError: ``local`` cannot be read, or the slot cannot take it (no space, a directory in the way).
    InvalidArgumentsError: ``local`` holds a device, a socket or a pipe, or ``remote`` is no path. PolicyRefusalError:
    links in the slot lead out of ``remote``, or ``remote`` outside the workspace of a fake slot. InfraError: the slot
    or the connection failed.
    """
    query = _query(remote, user)
    total = await asyncio.to_thread(size_of, local)

    async def once() -> Transferred:
        tally = ContentDigest()

        def sent() -> None:
            if progress is not None:
                progress(tally.total_bytes, max(total, tally.total_bytes))

        reply = await _put(lease, "transfer", query, stream_of(local, tally), sent)
        if reply.exit_code:
            raise OSError(_as_errno(reply.exit_code), reply.stderr.strip() or "the upload failed", remote)
        if reply.total_bytes != tally.total_bytes:
            raise errors.ProtocolError(f"{tally.total_bytes} bytes were sent, {reply.total_bytes} arrived")
        return Transferred(tally.files, tally.total_bytes, tally.sha256)

    return await _insisting(lease, once)


async def download(
    lease: TransferLease,
    remote: str,
    local: Path,
    *,
    progress: Progress | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    user: str | None = None,
) -> Transferred:
    """Copy a file or directory of the slot to ``local``. A directory's content lands in it, beside existing
    entries; a file replaces an existing one of its name. The slot's data is not trusted: nothing is written
    elsewhere. ``user``: who reads it, in a slot with an image; by default its own.

    Raises:
        OSError: ``remote`` is missing or cannot be read, ``local`` cannot be written, the content exceeds
            ``max_bytes``, a link leads out of ``local``, or something in the slot stopped or killed the transfer.
        InvalidArgumentsError: ``remote`` is no path.
        PolicyRefusalError: ``remote`` leads outside the workspace, on a backend without isolation.
        InfraError: the slot or the connection failed.
    """

    query = _query(remote, user)

    async def once() -> Transferred:
        with TreeWriter(local, max_bytes=max_bytes) as writer:

            def received() -> None:
                if progress is not None:
                    progress(writer.tally.total_bytes, writer.expected_bytes)

            try:
                await _get(lease, "transfer", query, writer.feed, received)
            except BrokenOffError as broken:
                raise _failure(broken, remote) from None
            if not await asyncio.to_thread(writer.finish):
                raise OSError(errno.EIO, "the transfer was stopped by something in the slot", remote)
        return Transferred(writer.tally.files, writer.tally.total_bytes, writer.tally.sha256)

    return await _insisting(lease, once)


async def put_tar(
    lease: TransferLease, stream: IO[bytes], directory: str, *, owner: tuple[int, int] = (0, 0), mode: int = 0o755
) -> None:
    """Unpack an uncompressed tar below a directory of an image slot, which is made with its missing parents, of this
    owner and mode. Directories that exist take the owner, mode and time of their entries, files and links are replaced,
    and no link is followed. Raises OSError (with the path) for what cannot be made there, InfraError. It is sent once:
    the stream is read only once."""
    query: Params = {"path": directory, "uid": owner[0], "gid": owner[1], "mode": mode}
    pieces = iter(lambda: stream.read(PIECE_BYTES), b"")
    reply = await unless_lost(_put(lease, "tar", query, pieces), lease.wait_lost())
    if reply.exit_code:
        raise OSError(reply.exit_code, reply.stderr.strip(), reply.path or directory)


async def get_tar(lease: TransferLease, path: str, target: Path) -> None:
    """Write a directory's content, or one file, of an image slot as a tar to ``target``. Raises InfraError, OSError."""

    async def once() -> None:
        with target.open("wb") as file:
            await _get(lease, "tar", {"path": path}, file.write)

    await _insisting(lease, once)
    if not await asyncio.to_thread(is_ended, target):
        raise errors.InfraError(
            f"{path}: its tar was cut short", next_step="a file in it may be unreadable, or its name over 4096 bytes"
        )


async def download_layers(
    container: ContainerHandle, checkpoint: str, directory: Path, *, first: int = 0
) -> list[Path]:
    """Write the layers of a checkpoint above its image as tars into ``directory``, the lowest first, without the
    ``first`` lowest. Raises CheckpointError; ConnectionLostError (it may be tried again); OSError."""
    paths: list[Path] = []
    count = first + 1
    async with ContainerConnection(container) as connection:
        while (number := first + len(paths)) < count:
            paths.append(directory / f"{number}.tar")
            route = f"/v1/checkpoints/{checkpoint}/layers/{number}"
            async with connection.stream("GET", route, errors.CheckpointError, silence_s=LAYER_SILENCE_S) as response:
                with paths[-1].open("wb") as file:
                    await _received(response, file.write)
                count = int(response.headers.get(LAYERS_HEADER, "1"))
            if not await asyncio.to_thread(is_ended, paths[-1]):
                raise errors.CheckpointError(
                    f"container {container.id}: a layer's tar was cut short", next_step="the container's log says why"
                )
    return paths


# -- one request -----------------------------------------------------------------------------------


async def _insisting(lease: TransferLease, once: Callable[[], Awaitable[T]]) -> T:
    """Repeat what a lost connection, or a container that is busy, has ended; stop at once when the lease is lost."""
    retries = Retries(_FIRST_PAUSE_S, attempts=_ATTEMPTS)
    while True:
        try:
            return await unless_lost(once(), lease.wait_lost())
        except (errors.ConnectionLostError, errors.SandboxUnavailableError) as lost:
            await retries.after(lost)


async def _put(
    lease: TransferLease, route: str, query: Params, pieces: Iterator[bytes], sent: Callable[[], None] = lambda: None
) -> TransferReply:
    """Send these pieces to a route of the slot. Raises what reading them raised."""
    failures: list[Exception] = []

    async def body() -> AsyncIterator[bytes]:
        try:
            while piece := await asyncio.to_thread(_some, pieces):
                yield piece
                sent()
        except Exception as error:
            failures.append(error)
            raise

    path = f"/v1/slots/{lease.key.slot}/{route}"
    async with ContainerConnection(lease.container) as connection:
        try:
            raw = await connection.request(
                "PUT",
                path,
                *_REFUSALS,
                lease=lease.key.model_dump_json(),
                params=query,
                data=body(),
                silence_s=_SILENCE_S,
            )
        except errors.ConnectionLostError:
            if failures:  # the connection was cut here, because what could not be read could not be sent
                raise failures[0] from None
            raise
        return connection.parsed(TransferReply, raw)


async def _get(
    lease: TransferLease,
    route: str,
    query: Params,
    write: Callable[[bytes], object],
    received: Callable[[], None] = lambda: None,
) -> None:
    """Write what a route of the slot sends."""
    path = f"/v1/slots/{lease.key.slot}/{route}"
    async with (
        ContainerConnection(lease.container) as connection,
        connection.stream(
            "GET", path, *_REFUSALS, lease=lease.key.model_dump_json(), params=query, silence_s=_SILENCE_S
        ) as response,
    ):
        await _received(response, write, received)


async def _received(
    response: aiohttp.ClientResponse, write: Callable[[bytes], object], received: Callable[[], None] = lambda: None
) -> None:
    """Write a response's body, about a megabyte at once in a thread, as :func:`_some` reads."""
    gathered = bytearray()
    async for piece in response.content.iter_any():
        gathered += piece
        if len(gathered) >= PIECE_BYTES:
            await asyncio.to_thread(write, bytes(gathered))
            gathered.clear()
            received()
    await asyncio.to_thread(write, bytes(gathered))
    received()


def _some(pieces: Iterator[bytes]) -> bytes:
    """The next pieces, about a megabyte at once: one thread hop for each piece would cost more than reading it."""
    gathered = bytearray()
    for piece in pieces:
        gathered += piece
        if len(gathered) >= PIECE_BYTES:
            break
    return bytes(gathered)


def _query(remote: str, user: str | None) -> dict[str, str]:
    """Raises InvalidArgumentsError."""
    _check_path(remote)
    if user is None:
        return {"path": remote}
    if why_no_argument(user) or not 0 < len(user) <= MAX_USER_CHARS:
        raise errors.InvalidArgumentsError(f"user: a name or number of 1 to {MAX_USER_CHARS} characters")
    return {"path": remote, "user": user}


def _check_path(remote: str) -> None:
    """Raises InvalidArgumentsError for what cannot be the path of a slot's file. A query drops what is not UTF-8."""
    try:
        remote.encode()
    except UnicodeEncodeError as error:
        raise errors.InvalidArgumentsError(
            f"the path {remote[:80]!a} has half of a surrogate pair",
            next_step="write a byte that is not UTF-8 as \\xNN (agentenv.file_names.readable_name)",
        ) from error
    if "\0" in remote or not 0 < len(remote) <= MAX_PATH_CHARS:
        raise errors.InvalidArgumentsError(f"a path has 1 to {MAX_PATH_CHARS} characters, none of them NUL")


def _failure(broken: BrokenOffError, remote: str) -> Exception:
    where = "/".join(part for part in (remote, os.fsdecode(broken.path)) if part)
    if broken.code == OUTSIDE:
        return errors.PolicyRefusalError(
            f"{where!r} is outside the workspace, or behind a link that leads out of the directory being filled",
            next_step="use a path inside /workspace: the fake backend's file tools reach no other",
        )
    if broken.code == NOT_REGULAR:
        return OSError(errno.EINVAL, "is not a regular file", where)
    if broken.code == TOO_LARGE:
        return OSError(errno.EFBIG, "exceeds the number of entries of one transfer", where)
    code = _as_errno(broken.code)
    return OSError(code, os.strerror(code), where)


def _as_errno(code: int) -> int:
    return code if 0 < code <= 128 else errno.EIO
