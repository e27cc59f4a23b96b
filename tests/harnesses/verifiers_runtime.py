"""verifiers on slots of this machine, by examples/harnesses/verifiers_slots.py. Run in an environment that has it
(scripts/harnesses makes it)."""

from __future__ import annotations

import asyncio
import os
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from examples.harnesses.verifiers_slots import runtimes  # before verifiers
from tests.harnesses.lost_container import kill_container_of

from pydantic import TypeAdapter, ValidationError  # isort: skip
from verifiers.v1.errors import SandboxError  # isort: skip

IMAGE = "debian:bookworm-slim"
HTTP_GET = 'exec 3<>"/dev/tcp/127.0.0.1/$1"; printf "GET / HTTP/1.0\\r\\n\\r\\n" >&3; cat <&3'

SERVER = r"""
my $listener = IO::Socket::INET->new(LocalPort => 8000, Listen => 9, ReuseAddr => 1);
while (my $client = $listener->accept) {
    while (<$client>) { last if /^\r?$/ }
    print $client "HTTP/1.0 200 OK\r\n\r\nhere";
    close $client;
}
"""


@asynccontextmanager
async def runtime(**fields: Any) -> AsyncIterator[Any]:
    config = TypeAdapter(runtimes.RuntimeConfig).validate_python({"type": "agentenv", "image": IMAGE, **fields})
    async with runtimes.provision_runtime(config, env={"OF": "the task"}) as started:
        yield started


async def test_programs() -> None:
    async with runtime() as box:
        ended = await box.run(["sh", "-c", "echo $A $OF; pwd; echo e >&2; exit 3"], {"A": "b c"})
        assert (ended.exit_code, ended.stdout, ended.stderr) == (3, "b c the task\n/app\n", "e\n")
        assert (await box.run_program(["printf", "%s", "a'b\"$x"], {})).stdout == "a'b\"$x"
        assert (await box.run(["nosuch"], {})).exit_code in (126, 127)
        assert len((await box.run(["head", "-c", "5000000", "/dev/zero"], {})).stdout) == 5_000_000
        first, second = await asyncio.gather(
            box.run(["sh", "-c", "until [ -e /tmp/on ]; do sleep 0.1; done"], {}), box.run(["touch", "/tmp/on"], {})
        )
        assert (first.exit_code, second.exit_code) == (0, 0), "they run beside each other"
        assert await box.alive()


async def test_files() -> None:
    async with runtime() as box:
        data = os.urandom(3_000_000)
        await box.write("sub/x", data)
        assert await box.read("sub/x") == await box.read("/app/sub/x", max_bytes=3_000_000) == data
        for wrong in (box.read("nosuch"), box.read("sub/x", max_bytes=10), box.write("sub", b"")):
            with pytest.raises(SandboxError):
                await wrong


async def test_a_live_process_loses_nothing() -> None:
    async with runtime() as box:
        process = await box.open_process(["sh", "-c", "head -c 5000000 /dev/zero; echo log >&2; cat"], {})
        await process.write(b"\xff\0end")
        errors = asyncio.ensure_future(anext(process.stderr))
        seen = b""
        async for piece in process.stdout:
            seen += piece
            if seen.endswith(b"end"):
                break
        assert seen == bytes(5_000_000) + b"\xff\0end"
        assert (await errors, await process.poll()) == (b"log\n", None)
        await process.terminate()
        assert await process.wait() == 128 + 15
        assert await process.poll() == 128 + 15


async def test_a_program_without_a_network_reaches_a_server_of_this_machine() -> None:
    async def hello(_: web.Request) -> web.Response:
        return web.Response(text="from the host")

    app = web.Application()
    app.router.add_get("/", hello)
    server = web.AppRunner(app)
    await server.setup()
    site = web.TCPSite(server, "127.0.0.1", 0)
    await site.start()
    async with runtime(allow=[]) as box:
        url = box.host_url(f"http://127.0.0.1:{server.addresses[0][1]}/v1")
        assert box.host_url("https://example.org/v1") == "https://example.org/v1"
        await box.prepare_execution([url])
        port = url.rpartition(":")[2].partition("/")[0]
        for _ in range(3):
            ended = await box.run(["bash", "-c", HTTP_GET, "get", port], {})
            assert ended.stdout.endswith("\r\n\r\nfrom the host"), ended
        outside = await box.run(["bash", "-c", "echo >/dev/tcp/192.0.2.1/80"], {})
        assert (outside.exit_code, "unreachable" in outside.stderr) == (1, True), outside
    await server.cleanup()


async def test_a_server_of_the_slot_is_reached_from_here() -> None:
    async with runtime() as box:
        await box.run_background(["perl", "-MIO::Socket::INET", "-e", SERVER], {}, "logs/server")
        url = await box.expose(8000)
        for _ in range(100):
            try:
                seen = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read())
                break
            except OSError:
                await asyncio.sleep(0.1)
        assert seen == b"here"


async def test_other_users() -> None:
    async with runtime() as box:
        await box.run(["useradd", "-m", "ann"], {})
        ann = box.with_user("ann", "/home/ann")
        assert (await ann.run(["sh", "-c", "id -un; echo $HOME"], {})).stdout == "ann\n/home/ann\n"
        await ann.write("/home/ann/hers", b"x")
        assert (await box.run(["stat", "-c", "%U", "/home/ann/hers"], {})).stdout == "ann\n"


async def test_a_run_that_is_cancelled_ends() -> None:
    async with runtime() as box:
        running = asyncio.ensure_future(box.run(["sleep", "1234"], {}))
        await asyncio.sleep(1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        found = "for each in /proc/[0-9]*; do tr '\\0' ' ' <$each/cmdline; done 2>/dev/null | grep -c '^sleep 1234'"
        for _ in range(100):
            if (await box.run(["sh", "-c", found], {})).stdout == "0\n":
                return
            await asyncio.sleep(0.1)
        pytest.fail("it runs on")


async def test_a_lost_container_is_a_sandbox_error() -> None:
    async with runtime(slots=2) as box:
        running = asyncio.ensure_future(box.run(["sleep", "300.375"], {}))
        await asyncio.to_thread(kill_container_of, "sleep", "300.375")
        with pytest.raises(SandboxError):
            await running
        assert not await box.alive()


async def test_what_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="gpu"):
        TypeAdapter(runtimes.RuntimeConfig).validate_python({"type": "agentenv", "gpu": "A100"})
    with pytest.raises(SandboxError, match="block"):
        async with runtime(block=["example.org"]):
            pass
