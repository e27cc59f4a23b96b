"""No call waits for another trajectory's call (promise 3): a neighbour's calls during each attack.

An attack goes on until the neighbour has made its calls. Each of these takes effect once, none fails or is sent again,
and they are late by no more than a loaded machine explains: how late exactly is measured by F11 of the benchmarks.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

import aiohttp
import pytest
import pytest_asyncio

from agentenv.errors import AgentEnvError
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.sdk.tool_context import ToolContext
from agentenv.wire.roots import RootSpec
from agentenv.wire.spec import MIB
from agentenv.wire.transfers import LEASE_HEADER
from tests.faults.bare_loop import bare_loop
from tests.security.conftest import executor_of, sh
from tests.security.image_slots import container, make_images
from tests.waiting import START_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

CALLS: Final = 25
ATTEMPTS: Final = 3
"""Another load of the machine may come and go; what an attack does is there each time."""
LEAST_S, LATER, LATER_THAN_BARE = 0.3, 10, 20
"""A call is some twenty turns of loops and processes, any of which may be as late as a bare loop was."""
NAMES: Final = 40_000

Act = Callable[[ToolSession], Awaitable[object]]


@dataclass(frozen=True)
class Attack:
    """``prepare`` is bash in the attacking slot. ``act`` is done again and again; what the slot's own calls get for it
    is not the question here."""

    name: str
    act: Act
    prepare: str = "true"


def bash(command: str, times: int = 1, **more: Any) -> Act:
    """So many calls at once."""
    return tool("bash", times, command=command, **more)


def tool(name: str, times: int = 1, /, **arguments: Any) -> Act:
    async def act(bad: ToolSession) -> None:
        calls = [bad.call(name, arguments, timeout_s=30) for _ in range(times)]
        await asyncio.gather(*calls, return_exceptions=True)

    return act


async def unread_streams(bad: ToolSession) -> None:
    """Programs print into streams that nobody reads."""
    programs = [await ToolContext(bad).start("yes", output="stream") for _ in range(8)]
    try:
        await asyncio.sleep(1)
    finally:
        for program in programs:
            await program.close()


async def stalled_transfers(bad: ToolSession) -> None:
    """Uploads that stop half way, and downloads that nobody takes."""
    handle, key = bad.lease.container, bad.lease.key
    headers = {"Authorization": f"Bearer {handle.token}", LEASE_HEADER: key.model_dump_json()}

    async def half() -> AsyncIterator[bytes]:
        yield b"x" * MIB
        await asyncio.Event().wait()

    attachment, transfer = f"{handle.base_url}/v1/attachments", f"{handle.base_url}/v1/slots/{key.slot}/transfer"

    async def download() -> None:
        async with http.get(transfer, params={"path": "large"}):
            await asyncio.Event().wait()

    async with aiohttp.ClientSession(headers=headers) as http:
        tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(download()) for _ in range(8)]
        for number in range(8):
            upload = http.put(f"{attachment}/stalled-{number}/stdin", data=half())
            tasks.append(asyncio.ensure_future(upload))
        try:
            await asyncio.sleep(1)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def seals(bad: ToolSession) -> None:
    await bad.seal()


async def checkpoints(bad: ToolSession) -> None:
    await bad.drop(await bad.checkpoint())


FLOOD: Final = "head -c 64M /dev/zero | tr '\\0' x"
NAMED: Final = f"mkdir d && cd d && python3 -c 'for n in range({NAMES}): open(str(n), \"x\")'"
TREE: Final = "mkdir t && for n in $(seq 2000); do echo a line of $n > t/$n; done"
PATCH: Final = "".join(f"--- a/t/{n}\n+++ b/t/{n}\n@@ -1 +1 @@\n-a line of {n}\n+b\n" for n in range(1, 1001))

TABLE: Final = [
    Attack("none", lambda _: asyncio.sleep(0.1)),
    Attack("output", bash(FLOOD)),
    Attack("output on stderr", bash(f"({FLOOD}) >&2")),
    Attack("small calls", bash("true", 64)),
    Attack("large calls", bash(": " + "x" * 200_000, 32)),
    Attack("big results", tool("read_file", 8, path="large"), "head -c 16M /dev/zero | tr '\\0' x > large"),
    Attack("a fork bomb", bash("bomb() { bomb | bomb & }; bomb; sleep 3")),
    Attack("memory hogs", bash("for n in 1 2 3 4; do tail /dev/zero & done; wait")),
    Attack("files", bash("mkdir -p f && cd f && seq 3000 | while read n; do : > $n; done; cd .. && rm -r f")),
    Attack("terminal output", tool("terminal", 4, command="timeout 2 yes || yes | head -c 32M", pty=True)),
    Attack("background output", tool("process", 4, action="start", command=FLOOD)),
    Attack("unread streams", unread_streams),
    Attack("stalled transfers", stalled_transfers, "head -c 16M /dev/zero > large"),
    Attack("seals", seals),
    Attack("checkpoints", checkpoints, "head -c 4M /dev/urandom > f || head -c 4M /dev/zero > f"),
    Attack("many names", tool("list_files", path="d", limit=100_000), NAMED),
    Attack("search", tool("search", 4, pattern="line", path="t", limit=10_000), TREE),
    Attack("patch", tool("patch", patch=PATCH), TREE),
]

Root = Literal["plain", "image"]


@dataclass(frozen=True)
class Neighbours:
    """A container of slots of one kind."""

    executor: ToolExecutor
    root: RootSpec | None

    def slot(self, name: str) -> ToolSession:
        return self.executor.open(name, root=self.root, acquire_timeout_s=START_S)


@pytest_asyncio.fixture(
    params=[(root, backend) for root in ("plain", "image") for backend in ("local", "nomad")],
    ids="-".join,
    scope="module",
    loop_scope="module",
)
async def neighbours(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Neighbours]:
    root, backend = request.param
    more = {"workspace_inodes": NAMES + 5_000, "workspace_bytes": 64 * MIB}
    async with AsyncExitStack() as stack:
        if root == "plain":
            yield Neighbours(await stack.enter_async_context(executor_of(backend, request, **more)), None)
            return
        if os.geteuid() != 0:
            pytest.skip("only root can give image slots their ids")
        images = make_images(tmp_path_factory.mktemp("images"))
        made = await stack.enter_async_context(container(images, request, kind=backend))
        yield Neighbours(made.executor, RootSpec(made.usual, writable_bytes=64 * MIB, writable_inodes=NAMES + 5_000))


@dataclass
class Good:
    """The neighbour. Each of its calls notes its number."""

    session: ToolSession
    made: int = 0

    async def calls_s(self) -> float:
        """The median time of so many calls, one after the other; any failure of one fails the test."""
        took_s: list[float] = []
        for _ in range(CALLS):
            began_s = time.monotonic()
            await sh(self.session, f"echo {self.made} >> ledger", timeout_s=60)
            took_s.append(time.monotonic() - began_s)
            self.made += 1
        return statistics.median(took_s)

    async def asked_again(self) -> int:
        """Calls that any client sent again."""
        handle = self.session.lease.container
        headers = {"Authorization": f"Bearer {handle.token}"}
        async with aiohttp.ClientSession(headers=headers) as http, http.get(f"{handle.base_url}/v1/statistics") as got:
            return int((await got.json())["calls_asked_again"])


@pytest.mark.parametrize("attack", TABLE, ids=lambda attack: attack.name)
async def test_a_neighbours_calls_during(neighbours: Neighbours, attack: Attack) -> None:
    async with neighbours.slot("bad") as bad, neighbours.slot("good") as session:
        prepared = await bad.call("bash", {"command": attack.prepare}, timeout_s=60)
        assert (prepared.fault, prepared.exit_code) == ("none", 0), prepared
        good = Good(session)
        before = await good.asked_again()
        late = ""
        for _ in range(ATTEMPTS):
            late = await lateness(good, attack.act, bad)
            if not late:
                break
        assert await sh(session, "cat ledger") == "".join(f"{number}\n" for number in range(good.made))
        assert await good.asked_again() == before
        assert session.lease.lost is None
        assert not late, late


async def lateness(good: Good, act: Act, bad: ToolSession) -> str:
    """Why the neighbour's calls during the attack were too late; empty if they were not."""
    quiet_s = await good.calls_s()
    bare_s: list[float] = []
    async with bare_loop(bare_s), again_and_again(act, bad):
        loud_s = await good.calls_s()
    if loud_s <= max(LEAST_S, LATER * quiet_s + LATER_THAN_BARE * bare_s[0]):
        return ""
    return f"{loud_s:.3f} s instead of {quiet_s:.3f} (a bare loop: {bare_s[0]:.3f})"


@asynccontextmanager
async def again_and_again(act: Act, bad: ToolSession) -> AsyncIterator[None]:
    begun = asyncio.Event()

    async def attacks() -> None:
        while True:
            begun.set()
            with suppress(AgentEnvError, aiohttp.ClientError):
                await act(bad)
            await asyncio.sleep(0)

    attacking = asyncio.create_task(attacks())
    try:
        await begun.wait()
        yield
    finally:
        attacking.cancel()
        with suppress(asyncio.CancelledError):
            await attacking
