"""Programs whose output is a stream, over the whole path, on every backend: against the same program run by plain
subprocess on this machine."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentenv.containers.programs import StreamedProgram, checked_order, start_program
from agentenv.errors import ConnectionLostError, InvalidArgumentsError, LeaseLostError, SandboxUnavailableError
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.wire.base import LARGE_BYTES
from agentenv.wire.programs import MAX_PROGRAMS, WINDOW_BYTES
from tests.contract.executor.farm import UNTIL_GO, go, sh
from tests.waiting import START_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOURCE = """import random, sys
chosen = random.Random(int(sys.argv[1]))
streams = (sys.stdout.buffer, sys.stderr.buffer)
rest = [int(size) for size in sys.argv[2:]]
while any(rest):
    at = chosen.randrange(2)
    count = min(rest[at], chosen.choice((1, 3, 100, 4095, 4096, 65537, 200000)))
    streams[at].write(chosen.randbytes(count))
    streams[at].flush()
    rest[at] -= count
sys.exit(7)
"""
"""Prints so many random bytes on stdout and on stderr, in pieces of many sizes, in any order."""

SERVER = """import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    print("log: answering", asked["id"], "x" * asked["log"], file=sys.stderr, flush=True)
    print(json.dumps({"id": asked["id"], "result": "é" * asked["size"]}, ensure_ascii=False), flush=True)
print("log: the end", file=sys.stderr)
"""


@asynccontextmanager
async def started(slot: ToolSession, command: str | list[str], **given: Any) -> AsyncIterator[StreamedProgram]:
    argv = None if isinstance(command, str) else command
    order = checked_order(command=command if isinstance(command, str) else "a program", argv=argv, **given)
    async with asyncio.timeout(100), await start_program(slot.lease, order) as program:
        yield program


async def all_of(program: StreamedProgram) -> tuple[bytes, bytes, int]:
    stdout, stderr = await asyncio.gather(program.stdout.read(), program.stderr.read())
    return stdout, stderr, await program.wait()


@pytest.mark.parametrize(
    "sizes",
    [
        (0, 0),
        (1, 4096),
        (4097, 65_535),
        (65_536, 65_537),
        (LARGE_BYTES - 1, LARGE_BYTES + 1),
        (200_001, 212_992),
        (WINDOW_BYTES, WINDOW_BYTES + 1),
        (5_000_000, 3),
    ],
)
async def test_the_bytes_are_those_of_a_plain_process(session: ToolSession, sizes: tuple[int, int]) -> None:
    arguments = [str(each) for each in (sum(sizes), *sizes)]
    here = subprocess.run([sys.executable, "-c", SOURCE, *arguments], capture_output=True, check=False)
    async with started(session, ["python3", "-c", SOURCE, *arguments]) as program:
        assert await all_of(program) == (here.stdout, here.stderr, here.returncode)
    assert (len(here.stdout), len(here.stderr)) == sizes


async def test_what_is_written_is_what_it_reads(session: ToolSession) -> None:
    data = bytes(range(256)) * 20_000
    async with started(session, ["cat"]) as program:

        async def write() -> None:
            for begin in (0, 1, 4096, 70_000):
                end = {0: 1, 1: 4096, 4096: 70_000, 70_000: len(data)}[begin]
                await program.write(data[begin:end])
            await program.close_stdin()
            await program.close_stdin()

        _, (stdout, stderr, code) = await asyncio.gather(write(), all_of(program))
        assert (stdout == data, stderr, code) == (True, b"", 0)
        with pytest.raises(BrokenPipeError):
            await program.write(b"late")


async def test_a_server_over_its_streams_with_a_log_beside(session: ToolSession) -> None:
    """JSON lines, as language servers and tools over stdio speak them; nobody reads the log until the end."""
    async with started(session, ["python3", "-X", "utf8", "-c", SERVER]) as program:
        for number, (size, log) in enumerate([(10, 10), (1_500_000, 1000), (0, 200_000), (600_000, 10)]):
            await program.write(json.dumps({"id": number, "size": size, "log": log}) + "\n")
            assert json.loads(await program.stdout.readline()) == {"id": number, "result": "é" * size}
        await program.close_stdin()
        log_lines = [line async for line in program.stderr]
        assert [line.split()[:2] for line in log_lines] == [[b"log:", b"answering"]] * 4 + [[b"log:", b"the"]]
        assert await program.wait() == 0


async def test_the_writer_waits_for_a_slow_reader(session: ToolSession) -> None:
    """20 MB, of which a reader takes little by little. Meanwhile the slot answers others."""
    blocks = 20
    command = f"for n in $(seq {blocks}); do head -c 1000000 /dev/zero | tr '\\0' x; echo $n >> written; done"
    async with started(session, command) as program:
        read = len(await program.stdout.readexactly(100_000))
        for _ in range(3):
            before = int(await sh(session, "tail -n 1 written 2>/dev/null || echo 0") or 0)
        assert before < 6, "a window, and what pipes and sockets hold"
        while piece := await program.stdout.read(100_000):
            assert not piece.strip(b"x")
            read += len(piece)
            await asyncio.sleep(0)
        assert (read, await program.wait()) == (blocks * 1_000_000, 0)


async def test_no_stream_waits_for_another(session: ToolSession) -> None:
    """Nobody reads its errors, of which it prints as much as fits, nor its output until it has taken its input."""
    command = "head -c 1000000 /dev/zero >&2; wc -c; head -c 900000 /dev/zero"
    async with started(session, command) as program:
        await program.write(bytes(3_000_000))
        await program.close_stdin()
        assert await program.stdout.readline() == b"3000000\n"
        assert await program.wait() == 0
        assert (len(await program.stdout.read()), len(await program.stderr.read())) == (900_000, 1_000_000)


async def test_what_it_printed_before_its_end_arrives(session: ToolSession) -> None:
    async with started(session, "echo err >&2; head -c 700000 /dev/zero; exit 5") as program:
        assert await program.wait(60) == 5
        assert (await program.stderr.readline(), len(await program.stdout.read())) == (b"err\n", 700_000)
        assert (await program.stdout.read(), await program.stderr.readline()) == (b"", b"")


async def test_killed_in_the_middle_it_ends_though_nobody_reads(session: ToolSession) -> None:
    async with started(session, "exec python3 -c 'while 1: print(1234567)'") as program:
        assert await program.stdout.readline() == b"1234567\n"
        with pytest.raises(TimeoutError):
            await program.wait(0.01)
        await program.kill()
        assert await program.wait(60) == 137
        rest = await program.stdout.read()
        assert rest == (b"1234567\n" * (len(rest) // 8 + 1))[: len(rest)]
        await program.kill()


async def test_a_signal_it_handles_and_a_deadline(session: ToolSession) -> None:
    command = "trap 'echo caught; exit 3' TERM; echo ready; while :; do read -t 1; done"
    async with started(session, command) as program:
        assert await program.stdout.readline() == b"ready\n"
        await program.kill("TERM")
        assert await all_of(program) == (b"caught\n", b"", 3)
    async with started(session, "echo begun; sleep 600", timeout_s=8) as program:
        assert (await all_of(program), program.timed_out) == ((b"begun\n", b"", 137), True)


async def test_it_starts_as_it_is_told(session: ToolSession) -> None:
    command = 'echo $$ "$X" "$PWD"; cat; ' + "# " + "x" * 40_000
    async with started(session, command, env={"X": "a b"}, workdir="/tmp", input=False) as program:
        assert await all_of(program) == (f"{program.pid} a b /tmp\n".encode(), b"", 0)
    async with started(session, ["nonsense"]) as program:
        stdout, stderr, code = await all_of(program)
        assert (stdout, code, program.pid) == (b"", 126, 0)
        assert stderr.startswith(b"nonsense: cannot start")
    with pytest.raises(InvalidArgumentsError, match="argv"):
        checked_order(command="x", argv=[])
    async with started(session, ["echo", *["x" * 1000] * 1000]) as program:
        assert await all_of(program) == (" ".join(["x" * 1000] * 1000).encode() + b"\n", b"", 0)
    async with started(session, ["echo", "x" * 131_072]) as program:
        stdout, stderr, code = await all_of(program)
        assert (stdout, stderr, code) == (b"", b"echo: cannot start: Argument list too long\n", 126)


async def test_it_ends_with_its_handle(session: ToolSession) -> None:
    async with started(session, f"echo $$; {UNTIL_GO}; touch gone-on") as program:
        pid = int(await program.stdout.readline())
    async with asyncio.timeout(30):
        while await sh(session, f"kill -0 {pid} 2>/dev/null && echo runs"):
            await asyncio.sleep(0.05)
    await go(session)
    assert await sh(session, "ls gone-on 2>/dev/null; rm go") == ""
    with pytest.raises(ConnectionLostError, match="was closed"):
        await program.wait()


async def test_a_slot_that_is_sealed_ends_it_and_says_so(executor: ToolExecutor) -> None:
    async with executor.open("t", acquire_timeout_s=START_S) as slot:
        async with started(slot, "echo begun; sleep 600") as program:
            assert await program.stdout.readline() == b"begun\n"
            await slot.seal()
            for use in (program.stdout.read, program.stderr.readline, program.wait):
                with pytest.raises(LeaseLostError):
                    await use()
        async with started(slot, "echo again") as program:
            assert (await all_of(program))[0] == b"again\n"


async def test_so_many_at_once_and_no_more(session: ToolSession) -> None:
    programs = [
        await start_program(session.lease, checked_order(command="cat", argv=["cat"])) for _ in range(MAX_PROGRAMS)
    ]
    try:
        with pytest.raises(SandboxUnavailableError, match="streamed programs"):
            async with started(session, "true"):
                pass
        for number, program in enumerate(programs):
            await program.write(f"{number}\n")
        assert [await program.stdout.readline() for program in programs] == [
            f"{number}\n".encode() for number in range(MAX_PROGRAMS)
        ]
    finally:
        await asyncio.gather(*(program.close() for program in programs))
