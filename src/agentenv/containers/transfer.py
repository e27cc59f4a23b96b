"""Streaming transfer of files and directories of any size to and from a slot, over a separate connection.

No call waits for a transfer, neither of this slot nor of another. Memory use stays at a few MiB for any size, here,
in the server and in the slot. Every file carries its SHA-256, which the receiver verifies before the file gets its
name. An interrupted transfer is repeated from its start; repeating one is idempotent.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import aiohttp
from pydantic import ValidationError

from agentenv import errors
from agentenv.background import unless_lost
from agentenv.containers.handle import ContainerHandle
from agentenv.containers.http import headers_for, refusal
from agentenv.containers.local_files import ContentDigest, TreeWriter, size_of, stream_of
from agentenv.wire.environment import MAX_PATH_CHARS
from agentenv.wire.leases import LeaseKey
from agentenv.wire.transfers import LEASE_HEADER, NOT_REGULAR, OUTSIDE, TOO_LARGE, BrokenOffError, TransferReply

Progress = Callable[[int, int | None], None]
"""Called with the bytes transferred so far and, where known, the total, in the caller's event loop."""
DEFAULT_MAX_BYTES = 8 * 1024**3
"""Default limit of a download: a slot can hold (sparse) files larger than any disk."""

_PIECE_BYTES = 1024 * 1024
_ATTEMPTS = 3
_PAUSE_S = 0.2
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=15.0, sock_read=300.0)
"""The container reports sooner that its slot is too slow, also for data still in the buffers of an upload."""

_REFUSALS = (errors.InfraError, errors.ToolCallError, errors.PolicyRefusalError, errors.SlotDestroyedError)
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


async def upload(lease: TransferLease, local: Path, remote: str, *, progress: Progress | None = None) -> Transferred:
    """Copy a local file or directory into the slot. A directory's content lands in ``remote``, beside existing
    entries; a file replaces an existing one of its name.

    Raises: OSError: ``local`` cannot be read, or the slot cannot take it (no space, a directory in the way).
    InvalidArgumentsError: ``local`` holds a device, a socket or a pipe, or ``remote`` is no path. PolicyRefusalError:
    links in the slot lead out of ``remote``, or ``remote`` outside the workspace of a fake slot. InfraError: the slot
    or the connection failed.
    """
    total = await asyncio.to_thread(size_of, local)

    async def once() -> Transferred:
        tally, failures = ContentDigest(), list[Exception]()
        body = _remembering(_body(local, tally, total, progress), failures)
        try:
            async with _request(lease, "PUT", remote, body) as response:
                reply = await _upload_reply(response)
        except errors.ConnectionLostError:
            if failures:  # we cut the connection, because what could not be read could not be sent
                raise failures[0] from None
            raise
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
) -> Transferred:
    """Copy a file or directory of the slot to ``local``. A directory's content lands in it, beside existing
    entries; a file replaces an existing one of its name. The slot's data is not trusted: nothing is written
    elsewhere.

    Raises:
        OSError: ``remote`` is missing or cannot be read, ``local`` cannot be written, the content exceeds
            ``max_bytes``, a link leads out of ``local``, or something in the slot stopped or killed the transfer.
        InvalidArgumentsError: ``remote`` is no path.
        PolicyRefusalError: ``remote`` leads outside the workspace, on a backend without isolation.
        InfraError: the slot or the connection failed.
    """

    async def once() -> Transferred:
        with TreeWriter(local, max_bytes=max_bytes) as writer:
            async with _request(lease, "GET", remote) as response:
                await _receive(response, writer, remote, progress)
            if not await asyncio.to_thread(writer.finish):
                raise OSError(errno.EIO, "the transfer was stopped by something in the slot", remote)
        return Transferred(writer.tally.files, writer.tally.total_bytes, writer.tally.sha256)

    return await _insisting(lease, once)


async def _insisting(lease: TransferLease, once: Callable[[], Awaitable[T]]) -> T:
    """Retry after a lost connection; stop at once when the lease is lost."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return await unless_lost(once(), lease.wait_lost())
        except errors.ConnectionLostError:
            if attempt == _ATTEMPTS:
                raise
            await asyncio.sleep(_PAUSE_S * attempt)
    raise AssertionError("the loop ends by returning or raising")  # pragma: no cover


@asynccontextmanager
async def _request(
    lease: TransferLease, method: str, remote: str, body: AsyncIterator[bytes] | None = None
) -> AsyncIterator[aiohttp.ClientResponse]:
    _check_path(remote)
    container = lease.container
    headers = headers_for(container, **{LEASE_HEADER: lease.key.model_dump_json()})
    url = f"{container.base_url}/v1/slots/{lease.key.slot}/transfer"
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT, trust_env=False) as session,
            session.request(method, url, params={"path": remote}, headers=headers, data=body) as response,
        ):
            if response.status != 200:
                raise await _refusal(container, response)
            yield response
    except (aiohttp.ClientError, TimeoutError) as error:
        raise errors.ConnectionLostError(f"a transfer with {container.id} was cut: {error!r}") from error


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


async def _body(local: Path, tally: ContentDigest, total: int, progress: Progress | None) -> AsyncIterator[bytes]:
    pieces = stream_of(local, tally)
    while piece := await asyncio.to_thread(_some, pieces):
        yield piece
        if progress is not None:
            progress(tally.total_bytes, max(total, tally.total_bytes))


async def _remembering(pieces: AsyncIterator[bytes], failures: list[Exception]) -> AsyncIterator[bytes]:
    """Keep the original exception: the HTTP client reports a failing body only in its own words."""
    try:
        async for piece in pieces:
            yield piece
    except Exception as error:
        failures.append(error)
        raise


def _some(pieces: Iterator[bytes]) -> bytes:
    """The next pieces, about a megabyte at once: one thread hop for each piece would cost more than reading it."""
    gathered = bytearray()
    for piece in pieces:
        gathered += piece
        if len(gathered) >= _PIECE_BYTES:
            break
    return bytes(gathered)


async def _receive(
    response: aiohttp.ClientResponse, writer: TreeWriter, remote: str, progress: Progress | None
) -> None:
    gathered = bytearray()
    try:
        async for piece in response.content.iter_any():
            gathered += piece
            if len(gathered) >= _PIECE_BYTES:
                await asyncio.to_thread(writer.feed, bytes(gathered))
                gathered.clear()
                if progress is not None:
                    progress(writer.tally.total_bytes, writer.expected_bytes)
        await asyncio.to_thread(writer.feed, bytes(gathered))
    except BrokenOffError as broken:
        raise _failure(broken, remote) from None
    if progress is not None:
        progress(writer.tally.total_bytes, writer.expected_bytes)


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


async def _upload_reply(response: aiohttp.ClientResponse) -> TransferReply:
    try:
        return TransferReply.model_validate_json(await response.read())
    except ValidationError as error:
        raise errors.ProtocolError("the response to an upload is malformed") from error


async def _refusal(container: ContainerHandle, response: aiohttp.ClientResponse) -> errors.AgentEnvError:
    """The error the container names. A busy container is treated as unreachable: ask again."""
    refused = refusal(container, response.status, await response.read(), *_REFUSALS)
    return errors.ConnectionLostError(refused.message) if response.status == 503 else refused
