"""Files and directories of any size, to and from a slot, while everybody else goes on."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from agentenv.containers.transfer import download, upload
from agentenv.errors import InvalidArgumentsError, PolicyRefusalError, StaleLeaseError
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.sdk.tool_context import ToolContext
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.transfers import CHUNKED, LEASE_HEADER, Entry, chunk
from tests.contract.executor.farm import OWN, until_bash
from tests.waiting import START_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1024 * 1024


def big_file(path: Path, mib: int) -> Path:
    piece = os.urandom(MIB)
    with path.open("wb") as file:
        for number in range(mib):
            file.write(number.to_bytes(8, "little") + piece[8:])
    return path


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def bash(session: ToolSession, command: str) -> str:
    result = await session.call("bash", {"command": command})
    assert result.exit_code == 0, result
    return result.stdout


async def test_a_large_file_there_and_back_in_little_memory(session: ToolSession, tmp_path: Path) -> None:
    source = big_file(tmp_path / "big", 48)
    seen: list[tuple[int, int | None]] = []
    tracemalloc.start()
    try:
        sent = await upload(session.lease, source, "data/big", progress=lambda done, total: seen.append((done, total)))
        got = await download(session.lease, "data/big", tmp_path / "back")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sent == got
    assert (sent.files, sent.total_bytes, sent.sha256) == (1, 48 * MIB, sha256_of(source))
    assert (await bash(session, "sha256sum < data/big")).split()[0] == sent.sha256
    assert sha256_of(tmp_path / "back") == sent.sha256
    assert peak_bytes < 16 * MIB  # with the fake both sides are in this process
    assert seen == sorted(seen)
    assert seen[-1] == (48 * MIB, 48 * MIB)


async def test_a_directory_there_and_back(session: ToolSession, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub/empty").mkdir(parents=True)
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    (source / "sub/link").symlink_to("../run.sh")
    (source / os.fsdecode(b"caf\xe9")).write_bytes(b"latin")
    sent = await upload(session.lease, source, "there/tree")
    assert await bash(session, "cd there/tree && ./run.sh && sub/link && ls -d sub/empty") == "ran\nran\nsub/empty\n"
    await bash(session, "echo more > there/tree/more")
    assert await upload(session.lease, source, "there/tree") == sent  # again: nothing else goes
    got = await download(session.lease, "there/tree", tmp_path / "back")
    assert (got.files, got.total_bytes) == (sent.files + 1, sent.total_bytes + 5)
    assert (tmp_path / "back/sub/link").readlink() == Path("../run.sh")
    assert (tmp_path / "back" / os.fsdecode(b"caf\xe9")).read_bytes() == b"latin"
    assert os.access(tmp_path / "back/run.sh", os.X_OK)


async def test_what_cannot_be_done_is_an_error_as_of_local_files(session: ToolSession, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "dir").mkdir()
    await bash(session, "mkdir -p d; echo x > f; mkfifo pipe; ln -s /etc/passwd out; ln -s .. up")
    with pytest.raises(FileNotFoundError):
        await download(session.lease, "missing", tmp_path / "out")
    with pytest.raises(IsADirectoryError):
        await upload(session.lease, tmp_path / "file", "d")
    with pytest.raises(OSError, match="f"):
        await upload(session.lease, tmp_path / "dir", "f")
    with pytest.raises(FileNotFoundError):
        await upload(session.lease, tmp_path / "missing", "x")
    for path in ("../x", "/etc/x", "up/x"):
        with pytest.raises((OSError, PolicyRefusalError)):  # the fake refuses, a slot's root is read-only
            await upload(session.lease, tmp_path / "file", path)
        with pytest.raises((OSError, PolicyRefusalError)):
            await download(session.lease, path, tmp_path / "out")
    os.mkfifo(tmp_path / "dir/pipe")
    with pytest.raises(InvalidArgumentsError, match="pipe"):
        await upload(session.lease, tmp_path / "dir", "x")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "dir"}


@pytest.mark.parametrize("path", ["caf\udce9", "\ud800", "a\0b", "", "x" * 4097])
async def test_what_is_no_path_is_refused(session: ToolSession, tmp_path: Path, path: str) -> None:
    """And never shortened: of a query's text, what is not UTF-8 is dropped."""
    (tmp_path / "f").write_text("f")
    before = await bash(session, "find . | sort")
    for call in (upload(session.lease, tmp_path / "f", path), download(session.lease, path, tmp_path / "got")):
        with pytest.raises(InvalidArgumentsError, match="path"):
            await call
    assert await bash(session, "find . | sort") == before
    assert not (tmp_path / "got").exists()


async def test_nothing_a_slot_holds_leads_out_of_the_target(session: ToolSession, tmp_path: Path) -> None:
    await bash(session, "mkdir -p bad sparse; ln -s /etc bad/link; truncate -s 1T sparse/huge")
    with pytest.raises(PermissionError):
        await download(session.lease, "bad", tmp_path / "bad")
    with pytest.raises(OSError, match="more than"):
        await download(session.lease, "sparse", tmp_path / "sparse", max_bytes=4 * MIB)
    assert not any(path.name == "huge" or path.is_symlink() for path in tmp_path.rglob("*"))


async def raw(
    session: ToolSession, path: str, body: AsyncIterator[bytes] | bytes, **headers: str
) -> aiohttp.ClientResponse:
    lease = session.lease
    given = {"Authorization": f"Bearer {lease.container.token}", LEASE_HEADER: lease.key.model_dump_json(), **headers}
    url = f"{lease.container.base_url}/v1/slots/{lease.key.slot}/transfer"
    async with (
        aiohttp.ClientSession() as client,
        client.put(url, params={"path": path}, data=body, headers=given) as response,
    ):
        await response.read()
        return response


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_cut_upload_leaves_the_old_file_and_nothing_beside_it(session: ToolSession, stopped: bool) -> None:
    cut = f"cut{stopped}{OWN}"
    await bash(session, f"mkdir {cut}; echo old > {cut}/file")
    begun = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield Entry("f", size=CHUNKED, mode=0o644).encode() + chunk(b"half")
        begun.set()
        await asyncio.sleep(60)

    task = asyncio.ensure_future(raw(session, f"{cut}/file", body()))
    await begun.wait()
    if stopped:  # then it ends only when it is killed
        await until_bash(session, f"pkill -STOP -f '[s]lotfiles.*{cut}'")
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await until_bash(session, f"! pgrep -f '[s]lotfiles.*{cut}'")
    assert await bash(session, f"ls -A {cut}; cat {cut}/file") == "file\nold\n"


@pytest.mark.parametrize(
    "body", [b"", b"rubbish" * 100, Entry("f", size=CHUNKED).encode() + chunk(b"x"), Entry("d").encode()]
)
async def test_what_is_no_transfer_is_refused_and_leaves_nothing(session: ToolSession, body: bytes) -> None:
    await bash(session, "mkdir -p no")
    assert (await raw(session, "no/file", body)).status == 400
    assert await bash(session, "ls -A no") in ("", "file\n" if body == Entry("d").encode() else "")


async def test_it_needs_the_lease_and_the_token(session: ToolSession) -> None:
    stale = session.lease.key.model_copy(update={"secret": "x" * 32})
    assert (await raw(session, "x", b"", **{LEASE_HEADER: stale.model_dump_json()})).status == 409
    assert (await raw(session, "x", b"", **{LEASE_HEADER: "{}"})).status == 400
    assert (await raw(session, "x", b"", Authorization="Bearer no")).status == 401
    assert (await raw(session, "", b"")).status == 400


async def test_a_corrupted_upload_is_found_before_the_file_has_its_name(session: ToolSession) -> None:
    await bash(session, "mkdir -p corrupt")
    body = Entry("f", size=CHUNKED).encode() + chunk(b"data") + chunk(b"") + bytes(32) + Entry("e").encode()
    response = await raw(session, "corrupt/file", body)
    assert response.status in (200, 400)  # 200: told as data, by the slot that compared
    assert await bash(session, "ls -A corrupt") == ""


async def test_calls_go_on_beside_transfers(executor: ToolExecutor, session: ToolSession, tmp_path: Path) -> None:
    """Neither the slot's own calls nor a neighbour's wait for a transfer, even one that stands still."""
    began, go_on = asyncio.Event(), asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield Entry("f", size=CHUNKED, mode=0o644).encode() + chunk(b"first")
        began.set()
        await go_on.wait()
        digest = hashlib.sha256(b"first").digest()
        yield chunk(b"") + digest + Entry("e").encode()

    standing = asyncio.ensure_future(raw(session, "slow", body()))
    await began.wait()
    async with executor.open("neighbour", acquire_timeout_s=START_S) as neighbour:
        assert await bash(session, "echo mine") == "mine\n"
        assert await bash(neighbour, "echo theirs") == "theirs\n"
    go_on.set()
    assert (await standing).status == 200
    assert await bash(session, "cat slow") == "first"


async def test_a_transfer_ends_with_its_lease(executor: ToolExecutor, tmp_path: Path) -> None:
    async with executor.open("leaver", acquire_timeout_s=START_S) as leaver:
        lease = leaver.lease
    with pytest.raises(StaleLeaseError):
        await upload(lease, tmp_path, "x")


async def test_the_tool_context_moves_files_too(session: ToolSession, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("alpha")
    context = ToolContext(session)
    sent = await context.upload(tmp_path / "a", "up/a")
    assert await context.read_file("up/a") == "alpha"
    assert await context.download("up/a", tmp_path / "b") == sent
    assert (tmp_path / "b").read_text() == "alpha"


@pytest.mark.asyncio(loop_scope="function")
async def test_a_transfer_that_was_cut_is_done_again(tmp_path: Path) -> None:
    source = big_file(tmp_path / "big", 32)
    backend = FakeBackend()
    async with (
        SlotPool(backend) as pool,
        ToolExecutor(pool, ToolCatalog.builtin()) as executor,
        executor.open("t", acquire_timeout_s=START_S) as session,
    ):
        moved: list[int] = []

        def cut_once(done: int, total: int | None) -> None:
            assert total is None or done <= total
            if max(moved, default=0) < 16 * MIB <= done:
                backend.cut(session.lease.container.id)
            moved.append(done)

        sent = await upload(session.lease, source, "big", progress=cut_once)
        assert sent.sha256 == sha256_of(source)
        assert moved != sorted(moved), "it began again"
        assert (await download(session.lease, "big", tmp_path / "back")) == sent
