"""What a slot does to a transfer ends it in good order, once; only a lost slot cuts the connection."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import io
import re
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from aiohttp.typedefs import Handler

from agentenv.containers import transfer
from agentenv.containers.transfer import download, download_layers, get_tar, put_tar, upload
from agentenv.errors import AgentEnvError, CheckpointError, ConnectionLostError, InfraError, LeaseLostError
from agentenv.sandbox.server import bodies, transfer_routes
from agentenv.sandbox.server.access import BEARER, Bearer
from agentenv.sandbox.server.transfer_run import TransferRun
from agentenv.sandbox.slot_paths import USUAL_PATHS, SlotPaths
from agentenv.wire.leases import LAYERS_HEADER, LeaseKey
from agentenv.wire.transfers import CHUNKED, Entry, chunk

BEGUN = Entry("f", size=CHUNKED, mode=0o644).encode() + chunk(b"half")


class Run:
    """A run of slotfiles that prints ``pieces``, then does nothing until it is killed."""

    def __init__(self, *pieces: bytes | Exception) -> None:
        self.killed = asyncio.Event()
        self._pieces = list(pieces)

    def start(self, *_: Any, **__: Any) -> None:
        """It runs."""

    async def write(self, data: bytes) -> bool:
        await self.killed.wait()
        return False

    def end_input(self) -> None:
        """That was all."""

    async def read(self) -> bytes:
        if not self._pieces:
            await self.killed.wait()
            return b""
        piece = self._pieces.pop(0)
        if isinstance(piece, Exception):
            raise piece
        return piece

    async def ended(self) -> int:
        await self.killed.wait()
        return 128 + signal.SIGKILL

    def kill(self) -> None:
        self.killed.set()

    close = kill


class Impatient(transfer_routes.Waited):
    """Has no patience with the run; the two ends of the connection have all of theirs."""

    def __init__(self, run: TransferRun) -> None:
        super().__init__(run)
        self._left_s = 0.2


@dataclass
class Io:
    """As much of a slot's as a transfer looks at."""

    paths: SlotPaths


class Lease:
    """Is never lost."""

    def __init__(self, base_url: str) -> None:
        self.key = LeaseKey(slot=0, epoch=1, secret="s" * 32)
        self.container: Any = SimpleNamespace(id="c", base_url=base_url, token="t")

    async def wait_lost(self) -> AgentEnvError:
        await asyncio.Event().wait()
        raise AssertionError


@web.middleware
async def _by_control_token(request: web.Request, handler: Handler) -> web.StreamResponse:
    request[BEARER] = Bearer()
    return await handler(request)


@asynccontextmanager
async def served(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Run], *, image: bool = False
) -> AsyncIterator[tuple[Lease, list[Run]]]:
    """The routes over a container whose slot, of an image or not, starts such runs."""
    made: list[Run] = []

    def run(_: Any) -> Run:
        made.append(make())
        return made[-1]

    monkeypatch.setattr(transfer_routes, "Waited", Impatient)
    monkeypatch.setattr(transfer_routes, "TransferRun", run)
    app = web.Application(middlewares=[_by_control_token])
    slot = SimpleNamespace(io=lambda _: Io(replace(USUAL_PATHS, own_root=image)))
    container: Any = SimpleNamespace(slot=lambda _: slot, find=lambda _: slot, context=SimpleNamespace(env={}))
    transfer_routes.TransferRoutes(container).add_to(app.router)
    async with TestServer(app) as server:
        yield Lease(str(server.make_url("")).rstrip("/")), made


@pytest.mark.parametrize("pieces", [(), (BEGUN,), (Entry("f", size=CHUNKED).encode(), chunk(b"a"), chunk(b"b"))])
async def test_a_download_that_its_slot_stops_is_told_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pieces: tuple[bytes, ...]
) -> None:
    async with served(monkeypatch, lambda: Run(*pieces)) as (lease, runs):
        with pytest.raises(OSError, match="stopped by something in the slot"):
            await asyncio.wait_for(download(lease, "f", tmp_path / "f"), 30)
    assert [run.killed.is_set() for run in runs] == [True]
    assert list(tmp_path.iterdir()) == []


async def test_a_run_that_says_all_and_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with served(monkeypatch, lambda: Run(BEGUN, b"")) as (lease, runs):
        with pytest.raises(OSError, match="stopped by something in the slot"):
            await asyncio.wait_for(download(lease, "f", tmp_path / "f"), 30)
    assert len(runs) == 1


async def test_an_upload_that_its_slot_stops_is_told_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("content")
    async with served(monkeypatch, Run) as (lease, runs):
        with pytest.raises(OSError, match="killed by signal 9"):
            await asyncio.wait_for(upload(lease, tmp_path / "f", "f"), 30)
    assert [run.killed.is_set() for run in runs] == [True]


async def test_a_run_that_takes_all_and_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Endless(Run):
        async def write(self, data: bytes) -> bool:
            return True

        async def ended(self) -> int:
            await asyncio.Event().wait()
            raise AssertionError

    (tmp_path / "f").write_text("content")
    async with served(monkeypatch, lambda: Endless(b"")) as (lease, _):
        with pytest.raises(OSError, match="killed by signal 9"):
            await asyncio.wait_for(upload(lease, tmp_path / "f", "f"), 30)


@pytest.mark.parametrize(("piece_bytes", "goes_on"), [(4 * 1024 * 1024, True), (1, False)])
async def test_progress_earns_the_time_back_that_a_transfer_took(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int, goes_on: bool
) -> None:
    """Each step takes 50 of the 60 seconds."""
    monkeypatch.setattr(bodies, "IDLE_S", 60.0)
    now_s = 0.0

    async def step(result: Any) -> Any:
        nonlocal now_s
        now_s += 50
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return result

    for name, result in (("write", True), ("read", bytes(piece_bytes))):
        run: Any = SimpleNamespace(kill=Mock(), write=lambda _: step(True), read=lambda: step(bytes(piece_bytes)))
        waited: Any = transfer_routes.Waited(run)
        waited._loop = SimpleNamespace(time=lambda: now_s)
        took = [await (waited.write(bytes(piece_bytes)) if name == "write" else waited.read()) for _ in range(4)]
        assert (took == [result] * 4, run.kill.called) == (goes_on, not goes_on)


class Trickling(Run):
    """Goes on just before anybody loses patience, again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    async def _step(self) -> None:
        self.steps += 1
        async with asyncio.timeout(0.1):
            await self.killed.wait()

    async def write(self, data: bytes) -> bool:
        with contextlib.suppress(TimeoutError):
            await self._step()
        return not self.killed.is_set()

    async def read(self) -> bytes:
        with contextlib.suppress(TimeoutError):
            await self._step()
        return b"" if self.killed.is_set() else BEGUN[: self.steps][-1:]


async def test_a_slot_that_lets_a_transfer_trickle_holds_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "up").write_bytes(b"x" * 1_000_000)
    monkeypatch.setattr(transfer_routes, "_LEAST_BYTES_PER_S", 10_000_000)
    async with served(monkeypatch, Trickling) as (lease, runs):
        with pytest.raises(OSError, match="stopped by something in the slot"):
            await asyncio.wait_for(download(lease, "f", tmp_path / "f"), 30)
        with pytest.raises(OSError, match="killed by signal 9"):
            await asyncio.wait_for(upload(lease, tmp_path / "up", "f"), 30)
    assert [isinstance(run, Trickling) and run.steps < 10 for run in runs] == [True, True]


class Ended(Run):
    """Takes everything, prints, and ends with ``code``."""

    def __init__(self, code: int, *pieces: bytes) -> None:
        super().__init__(*pieces, b"")
        self._code = code
        self.argv: Sequence[str] = ()

    def start(self, argv: Sequence[str], *_: Any, **__: Any) -> None:
        self.argv = argv

    async def write(self, data: bytes) -> bool:
        return True

    async def ended(self) -> int:
        return self._code


@pytest.mark.parametrize(
    ("code", "printed", "failed"),
    [
        (0, b"", None),
        (errno.EACCES, b"/opt/a\xff", (errno.EACCES, "Permission denied", "/opt/a\\xff")),
        (errno.ENOSPC, b"", (errno.ENOSPC, "No space left on device", "/opt")),
        (137, b"", (137, "it was ended", "/opt")),
    ],
)
async def test_a_tar_that_is_not_unpacked_is_told_with_the_place(
    monkeypatch: pytest.MonkeyPatch, code: int, printed: bytes, failed: tuple[int, str, str] | None
) -> None:
    async with served(monkeypatch, lambda: Ended(code, *filter(None, [printed])), image=True) as (lease, runs):
        sent = put_tar(lease, io.BytesIO(b"tar"), "/opt", owner=(3, 4), mode=0o750)
        if failed is None:
            await asyncio.wait_for(sent, 30)
            assert [run.argv[1:] for run in runs if isinstance(run, Ended)] == [["unpack", "/opt", "3", "4", "488"]]
            return
        with pytest.raises(OSError, match=re.escape(failed[1])) as caught:
            await asyncio.wait_for(sent, 30)
    assert (caught.value.errno, caught.value.strerror, caught.value.filename) == failed


@pytest.mark.parametrize("code", [1, errno.EACCES, 128, 137])
async def test_a_sender_that_cannot_be_started_is_told_by_its_errno(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    async with served(monkeypatch, lambda: Ended(code)) as (lease, _):
        with pytest.raises(OSError, match="f") as caught:
            await asyncio.wait_for(download(lease, "f", tmp_path / "f"), 30)
    assert caught.value.errno == (code if code <= 128 else errno.EIO)


async def test_progress_ends_with_the_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rest = chunk(b"") + hashlib.sha256(b"half").digest() + Entry("e").encode()
    seen: list[int] = []
    async with served(monkeypatch, lambda: Ended(0, BEGUN, rest)) as (lease, _):
        got = await download(lease, "f", tmp_path / "f", progress=lambda done, _: seen.append(done))
    assert (got.total_bytes, seen[-1], (tmp_path / "f").read_bytes()) == (4, 4, b"half")


async def test_a_tar_is_fetched_whole_or_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = b"header" + bytes(1024)
    async with served(monkeypatch, lambda: Ended(0, whole), image=True) as (lease, _):
        await get_tar(lease, "/opt", tmp_path / "tar")
    assert (tmp_path / "tar").read_bytes() == whole
    async with served(monkeypatch, lambda: Ended(1, whole[:-1]), image=True) as (lease, _):
        with pytest.raises(InfraError, match="/opt: its tar was cut short"):
            await get_tar(lease, "/opt", tmp_path / "tar")


async def test_layers_are_fetched_whole_or_not_at_all(tmp_path: Path) -> None:
    layers = [b"lowest" + bytes(1024), b"middle" + bytes(1024), b"highest" + bytes(1024)]

    async def layer(request: web.Request) -> web.Response:
        return web.Response(body=layers[int(request.match_info["number"])], headers={LAYERS_HEADER: "3"})

    app = web.Application()
    app.router.add_get("/v1/checkpoints/c/layers/{number}", layer)
    async with TestServer(app) as server:
        container: Any = Lease(str(server.make_url("")).rstrip("/")).container
        for first in (0, 1):
            (tmp_path / str(first)).mkdir()
            paths = await download_layers(container, "c", tmp_path / str(first), first=first)
            assert [path.read_bytes() for path in paths] == layers[first:]
        layers[1] = b"middle" + bytes(1023)
        with pytest.raises(CheckpointError, match="cut short"):
            await download_layers(container, "c", tmp_path)


async def test_a_slot_that_is_lost_meanwhile_cuts_the_connection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(transfer, "_FIRST_PAUSE_S", 0.0)
    async with served(monkeypatch, lambda: Run(BEGUN, LeaseLostError("lost"))) as (lease, runs):
        with pytest.raises(ConnectionLostError):
            await asyncio.wait_for(download(lease, "f", tmp_path / "f"), 30)
    assert len(runs) == transfer._ATTEMPTS
