"""The connection of a streamed program is cut anywhere: what was read is what it printed, and the rest is an error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.containers.handle import ContainerHandle
from agentenv.containers.programs import checked_order, start_program
from agentenv.errors import AgentEnvError, ConnectionLostError
from agentenv.executor.session import SessionLease, ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.leases import LeaseKey
from tests.faults.proxy import Direction, Proxy
from tests.waiting import START_S, eventually

PROGRAM = "echo $$ > pid; exec seq 1000000 9000000"


@dataclass(frozen=True)
class Through:
    """A lease whose container is reached through a proxy."""

    lease: SessionLease
    proxy: Proxy

    @property
    def key(self) -> LeaseKey:
        return self.lease.key

    @property
    def container(self) -> ContainerHandle:
        return replace(self.lease.container, base_url=f"http://127.0.0.1:{self.proxy.port}")

    async def wait_lost(self) -> AgentEnvError:
        return await self.lease.wait_lost()


@pytest.fixture
async def session() -> AsyncIterator[ToolSession]:
    backend = FakeBackend(ContainerSettings(slots_per_container=1, require_sandbox=False))
    pool = SlotPool(backend, PoolSettings(max_containers=1, acquire_timeout_s=START_S))
    async with pool, ToolExecutor(pool, ToolCatalog.builtin()) as executor, executor.open("t") as opened:
        yield opened


# The handshake is about 450 bytes up and 200 down.
@pytest.mark.parametrize(
    ("direction", "count"),
    [
        *(("down", count) for count in (300, 400, 1000, 65_536, 300_000, 1_048_576, 2_500_000)),
        *(("up", count) for count in (500, 600, 700, 900)),
    ],
)
async def test_what_was_read_is_what_it_printed(session: ToolSession, direction: Direction, count: int) -> None:
    read = bytearray()

    async def read_all(lease: Through) -> None:
        async with await start_program(lease, checked_order(command=PROGRAM)) as program:
            while piece := await program.stdout.read(50_000):
                read.extend(piece)
                await program.write(b"x")

    async with Proxy(int(session.lease.container.base_url.rpartition(":")[2])) as proxy:
        proxy.cut_after(direction, count)
        with pytest.raises(ConnectionLostError):
            await read_all(Through(session.lease, proxy))
    lines = range(1_000_000, 1_000_001 + len(read) // 8)
    assert "".join(f"{number}\n" for number in lines).encode().startswith(bytes(read))

    async def over() -> bool:
        return (await session.call("bash", {"command": "kill -0 $(cat pid)"})).exit_code != 0

    await eventually(over)
