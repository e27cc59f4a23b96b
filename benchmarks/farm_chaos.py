"""``python -m benchmarks.farm_chaos``: kill the parts of a farm in turn, all of them in one run: the service, the
relay, the clients (some reach containers directly, some through the relay), and each process of the containers.

The clients are processes whose sessions do what those of :mod:`benchmarks.chaos` do, and keep the same account of every
side effect. What must hold besides: a client that is killed gives its slots back by the end of its leases, and at the
end every slot is free.

``python -m benchmarks.farm_chaos client URL TOKEN ROUTE SEED`` is one client; it ends its sessions when its input ends,
and prints its tally every second, so that a client that is killed has said what it saw.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Literal

from agentenv.config import ExecutorSettings, PoolSettings
from agentenv.errors import AgentEnvError
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.farm_client.access import FarmAccess
from agentenv.farm_client.pool import FarmPool
from agentenv.tools.catalog import ToolCatalog
from benchmarks.chaos import Tally, Visitor, part_of, run_and_show, send
from benchmarks.service import FarmService, farm_service, free_port
from tests.farm_process import COMMAND

CONTAINERS: Final = 2
SLOTS: Final = 4
ROUTES: Final[tuple[Literal["direct", "relay"], ...]] = ("direct", "relay", "relay")
"""Of the clients."""
VISITORS: Final = 2
"""Sessions of a client at once: with all clients fewer than there are slots, so that a container may be missing."""
LEASE_TTL_S: Final = 15.0
RECONNECT_S: Final = 10.0
"""How long a client tries to reach a container: longer than a relay takes to start."""
LONGEST_PAUSE_S: Final = 8.0
"""Between two harms."""
LONGEST_REIGN_S: Final = 24.0
"""Of a service."""
LEFT_WITHIN_S: Final = 60.0
SEEN_EVERY_S: Final = 1.0


# -- a client ------------------------------------------------------------------------------------------


async def client(url: str, token: str, route: Literal["direct", "relay"], seed: int) -> None:
    """Sessions until standard input ends; prints the tally as a line of JSON every second, and at the end."""
    tally, dice = Tally(), random.Random(seed)
    access = FarmAccess((url,), token, f"client-{route}", route)
    settings = PoolSettings(acquire_timeout_s=60, lease_ttl_s=LEASE_TTL_S)
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    showing = asyncio.create_task(_show(tally))
    async with (
        FarmPool(access, settings=settings) as pool,
        ToolExecutor(pool, ToolCatalog.builtin(), ExecutorSettings(reconnect_deadline_s=RECONNECT_S)) as executor,
    ):
        visitors = [Visitor(executor, tally, random.Random(dice.random()), float("inf")) for _ in range(VISITORS)]
        visiting = [asyncio.create_task(visitor.run()) for visitor in visitors]
        await ended
        for visitor in visitors:
            visitor.until_s = time.monotonic()
        await asyncio.gather(*visiting)
    showing.cancel()
    _print(tally)


async def _show(tally: Tally) -> None:
    while True:
        _print(tally)
        await asyncio.sleep(SEEN_EVERY_S)


def _print(tally: Tally) -> None:
    print(json.dumps({"counted": tally.counted, "wrongs": tally.wrongs}), flush=True)


# -- what is killed ------------------------------------------------------------------------------------


@dataclass
class Part:
    """A process that is started anew whenever it was killed. ``lines``: the last one that each of them printed."""

    name: str
    command: Sequence[str]
    lines: list[str] = field(default_factory=list)
    process: Process | None = None
    _reading: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> None:
        """Returns at once."""
        self.process = await asyncio.create_subprocess_exec(
            *self.command, stdin=PIPE, stdout=PIPE, limit=16 * 1024 * 1024
        )
        self.lines.append("")
        self._reading.append(asyncio.create_task(self._read(self.process, len(self.lines) - 1)))

    async def _read(self, process: Process, place: int) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            if line.endswith(b"\n"):  # or it was killed while it wrote
                self.lines[place] = line.decode()

    async def kill(self) -> None:
        """SIGKILL, and at once the next."""
        assert self.process is not None
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        await self.start()

    async def end(self) -> int:
        """Its input ends, and then it does; SIGTERM for one that does not read. Returns how it ended."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self.name == "relay":
            self.process.terminate()
        code = await self.process.wait()
        await asyncio.gather(*self._reading)
        return code


class Harm:
    """Kills or stops a part every now and then."""

    def __init__(self, service: FarmService, parts: Sequence[Part], tally: Tally, dice: random.Random) -> None:
        self._service = service
        self._parts = parts
        self._tally = tally
        self._dice = dice
        self._roots: set[int] = set()

    async def run(self, until_s: float) -> None:
        """Until then. The service is killed beside everything else, so that the rest also happens while it is away;
        it leads when this returns."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._every_now_and_then(until_s, LONGEST_REIGN_S, self._kill_service))
            group.create_task(
                self._every_now_and_then(
                    until_s, LONGEST_PAUSE_S, self._kill_part, self._kill_inside, self._stop_inside
                )
            )

    async def _every_now_and_then(
        self, until_s: float, longest_s: float, *kinds: Callable[[], Awaitable[None]]
    ) -> None:
        while (left_s := until_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, self._dice.uniform(1.0, longest_s)))
            await self._dice.choice(kinds)()

    async def _kill_service(self) -> None:
        self._tally.counted["SIGKILL service"] += 1
        await self._service.restart()

    async def _kill_part(self) -> None:
        part = self._dice.choice(self._parts)
        self._tally.counted[f"SIGKILL {part.name}"] += 1
        await part.kill()

    async def _kill_inside(self) -> None:
        await self._signal(signal.SIGKILL)

    async def _stop_inside(self) -> None:
        if pid := await self._signal(signal.SIGSTOP):
            asyncio.get_running_loop().call_later(self._dice.uniform(0.05, 5), send, pid, signal.SIGCONT)

    async def _signal(self, number: signal.Signals) -> int:
        """To a process of a container; which, 0 if there was none."""
        with suppress(AgentEnvError):
            self._roots = await self._service.roots() or self._roots
        if not self._roots:
            return 0
        name, pid = part_of(self._dice.choice(sorted(self._roots)), self._dice)
        if not send(pid, number):
            return 0
        self._tally.counted[f"{number.name} {name}"] += 1
        return pid


# -- all of it -----------------------------------------------------------------------------------------


@asynccontextmanager
async def _started(service: FarmService, relay_port: int, directory: Path, seed: int) -> AsyncIterator[list[Part]]:
    token_file = directory / "token"
    token_file.touch(0o600)
    token_file.write_text(service.token)
    relay = ("--url", service.url, "--token", f"file:{token_file}", "--port", str(relay_port), "--json")
    parts = [Part("relay", (*COMMAND, "farm", "relay", *relay))]
    for number, route in enumerate(ROUTES):
        asked = ("client", service.url, service.token, route, str(seed + number))
        parts.append(Part(f"{route} client", (sys.executable, "-m", "benchmarks.farm_chaos", *asked)))
    async with AsyncExitStack() as stack:
        for part in parts:
            await part.start()
            stack.push_async_callback(_killed, part)
        yield parts


async def _killed(part: Part) -> None:
    if part.process is not None and part.process.returncode is None:
        part.process.kill()
        await part.process.wait()


def _add(tally: Tally, part: Part) -> None:
    """What a client and those before it that were killed have seen."""
    for line in filter(None, part.lines):
        seen = json.loads(line)
        tally.counted += Counter(seen["counted"])
        tally.wrongs += seen["wrongs"]


async def farm_chaos(seconds: float, seed: int) -> Tally:
    """Run for so long; what happened is told by the seed alone only as far as timing allows."""
    tally, port = Tally(), free_port()
    with TemporaryDirectory(prefix="agentenv-chaos-") as directory:
        async with (
            farm_service("local", CONTAINERS, SLOTS, relay_url=f"http://127.0.0.1:{port}") as service,
            _started(service, port, Path(directory), seed) as parts,
        ):
            await Harm(service, parts, tally, random.Random(seed)).run(time.monotonic() + seconds)
            for part in reversed(parts):  # the relay last
                if code := await part.end():
                    tally.wrongs.append(f"a {part.name} ended with {code}")
                if part.name != "relay":
                    _add(tally, part)
            try:
                await service.settled(LEFT_WITHIN_S)
            except TimeoutError:
                async with service.client() as asked:
                    tally.wrongs.append(f"slots are left: {(await asked.info()).load.slots}")
    return tally


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"]:
        asyncio.run(client(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5])))  # type: ignore[arg-type]
    else:
        sys.exit(run_and_show("benchmarks.farm_chaos", __doc__ or "", farm_chaos))
