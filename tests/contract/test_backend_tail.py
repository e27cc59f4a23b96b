"""The tail of a slot: what its calls print, for somebody who looks on and disturbs nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

import pytest

from agentenv.containers.control import ContainerControl
from agentenv.errors import StaleLeaseError
from agentenv.wire.leases import EndRequest, LeaseKey
from agentenv.wire.tails import TAIL_BYTES, TailBeat, TailCall, TailEnd, TailLine, TailOutput, TailOver, tail_line
from tests.contract.conftest import Client
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Followed:
    """What a tail has said."""

    def __init__(self) -> None:
        self.lines: list[TailLine] = []

    async def read(self, container: Client, slot: int, epoch: int) -> None:
        rest = b""
        async with aclosing(ContainerControl(container.handle, container.session).tail(slot, epoch)) as pieces:
            async for piece in pieces:
                *whole, rest = (rest + piece).split(b"\n")
                self.lines += [tail_line.validate_json(line) for line in whole]

    def text(self, stream: str = "stdout") -> str:
        return "".join(line.text for line in self.lines if isinstance(line, TailOutput) and line.stream == stream)

    def calls(self) -> list[TailCall]:
        return [line for line in self.lines if isinstance(line, TailCall)]

    def ends(self) -> list[TailEnd]:
        return [line for line in self.lines if isinstance(line, TailEnd)]


@asynccontextmanager
async def following(container: Client, key: LeaseKey) -> AsyncGenerator[Followed, None]:
    followed = Followed()
    reading = asyncio.create_task(followed.read(container, key.slot, key.epoch))
    try:
        yield followed
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_it_begins_with_the_calls_that_have_ended(container: Client) -> None:
    key = await container.lease()
    await container.run(key, "echo out; echo err >&2; exit 3")
    async with following(container, key) as followed:
        await until(followed.ends)
        assert [(call.tool, call.about) for call in followed.calls()] == [("bash", "echo out; echo err >&2; exit 3")]
        assert (followed.text(), followed.text("stderr")) == ("out\n", "err\n")
        (end,) = followed.ends()
        assert (end.exit_code, end.note) == (3, "")


async def test_a_running_call_is_seen_while_it_runs_and_each_byte_once(container: Client) -> None:
    key = await container.lease()
    async with following(container, key) as followed:
        running = asyncio.create_task(container.run(key, "echo début; read -t 30 < <(sleep 30); :", timeout_s=60))
        await until(lambda: followed.text() == "début\n")
        assert not followed.ends()
        running.cancel()
    async with following(container, key) as again:
        await until(lambda: again.text() == "début\n")
        assert len(again.calls()) == 1


async def test_output_continues_where_it_was_when_the_call_ends(container: Client) -> None:
    key = await container.lease()
    async with following(container, key) as followed:
        command = "for i in $(seq 300); do echo line $i; sleep 0.003; done"
        result = await container.run(key, command)
        await until(followed.ends)
        assert followed.text() == result.stdout
        assert len(followed.calls()) == 1


async def test_a_flood_is_cut_and_counted(container: Client) -> None:
    key = await container.lease()
    await container.run(key, "head -c 3000000 /dev/zero | tr '\\0' x; echo the end")
    async with following(container, key) as followed:
        await until(followed.ends)
        (output,) = [line for line in followed.lines if isinstance(line, TailOutput)]
        assert output.text.endswith("xthe end\n")
        assert output.skipped_bytes + len(output.text) == 3_000_008
        assert len(output.text) <= TAIL_BYTES


async def test_session_calls_are_seen_too_and_so_is_how_a_call_ended(container: Client) -> None:
    key = await container.lease()
    await container.run(key, "echo from a terminal", tool="terminal")
    await container.run(key, "sleep 60", timeout_s=0.2)
    async with following(container, key) as followed:
        await until(lambda: len(followed.ends()) == 2)
        assert "from a terminal" in followed.text()
        assert [end.note for end in followed.ends()] == ["", "timed out"]


async def test_it_ends_with_the_lease_and_the_next_lease_shows_nothing_of_it(container: Client) -> None:
    key = await container.lease()
    await container.run(key, "echo secret")
    async with following(container, key) as followed:
        await until(followed.ends)
        await container.control.end(EndRequest(slot=key.slot, epoch=key.epoch))
        await until(lambda: isinstance(followed.lines[-1], TailOver))
    with pytest.raises(StaleLeaseError):
        await Followed().read(container, key.slot, key.epoch)
    after = await container.lease()
    async with following(container, after) as followed:
        await until(lambda: followed.lines)
        assert set(followed.lines) == {TailBeat()}
