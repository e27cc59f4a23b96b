"""``python -m benchmarks.chaos``: cut, stall, kill and stop a farm's parts, and account for every side effect.

Sessions lease slots and make calls, each of which writes a word of its own into the slot. Meanwhile connections are
cut and stalled (for longer than the client waits for a new one), and servers, supervisors, launchers and slot agents
are killed and stopped. What must hold whatever happens is the list in :meth:`Account.wrongs`, and: every call ends in
time with a result or a typed error, a new lease finds a clean slot, no slot serves two, and nothing is left at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Final, Self, TypeGuard, TypeVar

from agentenv.config import ContainerSettings, ExecutorSettings, PoolSettings
from agentenv.errors import AgentEnvError
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.backends.base import ContainerEvent, ContainerStarted
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.calls import CallResult
from benchmarks.processes import process_tree, server_of
from tests.faults.proxy import Proxy
from tests.waiting import DEADLINE_S, START_S

CONTAINERS: Final = 2
SLOTS: Final = 3
SESSIONS: Final = 5
"""At once: fewer than there are slots, so that a container may be missing."""
RECONNECT_S: Final = 4.0
"""How long a client tries to reach a container; a stall lasts longer at times."""
LONGEST_STALL_S: Final = 7.0
LONGEST_PAUSE_S: Final = 3.0
"""Between two harms."""
HANG_S: Final = 60.0
"""A call that has not ended so long after its own deadline never will. The client gives up after far less."""

T = TypeVar("T")


@dataclass
class Account:
    """What one session asked for: each word, and whether its answer said that it was written."""

    asked: dict[str, bool] = field(default_factory=dict)

    def wrongs(self, log: str) -> list[str]:
        """What cannot be, given all the words in the slot's log: one written twice, one that was confirmed and is
        missing, one that this session never asked for."""
        seen = Counter(log.split())
        found = [f"{word} was written {count} times" for word, count in seen.items() if count > 1]
        found += [f"{word} is another session's" for word in seen if word not in self.asked]
        return found + [
            f"{word} was confirmed and is missing" for word, sure in self.asked.items() if sure and word not in seen
        ]


@dataclass
class Tally:
    """What happened, and what should not have."""

    counted: Counter[str] = field(default_factory=Counter)
    wrongs: list[str] = field(default_factory=list)
    serving: dict[tuple[str, int], ToolSession] = field(default_factory=dict)
    words: int = 0

    def word(self) -> str:
        """One that was never used before."""
        self.words += 1
        return f"word-{os.getpid()}-{self.words}"

    async def ended(self, what: str, awaitable: Awaitable[T], within_s: float) -> T | None:
        """Its result; None when it failed with a typed error. An untyped one, and one that hangs, are wrong."""
        task = asyncio.ensure_future(awaitable)
        done, _ = await asyncio.wait({task}, timeout=within_s)
        if not done:
            self.wrongs.append(f"{what} has not ended after {within_s:g} s")
            task.cancel()
        try:
            return await task
        except AgentEnvError as error:
            self.counted[type(error).__name__] += 1
        except asyncio.CancelledError:
            if done:
                raise
        except Exception as error:
            self.wrongs.append(f"{what}: {type(error).__name__}: {error}")
        return None


class ProxiedBackend(LocalBackend):
    """Local containers that are reached through a :class:`Proxy` each."""

    def __init__(self, settings: ContainerSettings) -> None:
        super().__init__(settings)
        self.proxies: list[Proxy] = []
        self._stack = AsyncExitStack()

    async def events(self) -> AsyncIterator[ContainerEvent]:
        """ContainerBackend."""
        async for event in super().events():
            if isinstance(event, ContainerStarted):
                proxy = await self._stack.enter_async_context(Proxy(int(event.handle.base_url.rpartition(":")[2])))
                self.proxies.append(proxy)
                event = ContainerStarted(replace(event.handle, base_url=f"http://127.0.0.1:{proxy.port}"))
            yield event

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        await self._stack.aclose()


# -- what sessions do ----------------------------------------------------------------------------------


class Visitor:
    """Leases one slot after the other until ``until_s`` (of time.monotonic), which may be changed meanwhile."""

    def __init__(self, executor: ToolExecutor, tally: Tally, dice: random.Random, until_s: float) -> None:
        self._executor = executor
        self._tally = tally
        self._dice = dice
        self.until_s = until_s

    async def run(self) -> None:
        while time.monotonic() < self.until_s:
            session = self._executor.open(self._tally.word(), acquire_timeout_s=30)
            if await self._tally.ended("a lease", session.__aenter__(), 30 + HANG_S) is None:
                await asyncio.sleep(0.2)
                continue
            try:
                await self._visit(session)
            finally:
                place = (session.lease.container.id, session.lease.key.slot)
                if self._tally.serving.get(place) is session:
                    del self._tally.serving[place]
                await self._tally.ended("a release", session.aclose(), HANG_S)

    async def _visit(self, session: ToolSession) -> None:
        tally, place = self._tally, (session.lease.container.id, session.lease.key.slot)
        other = tally.serving.get(place)
        if other is not None and other.lease.lost is None:
            tally.wrongs.append(f"slot {place} serves two")
        tally.serving[place] = session
        found = await self._call(session, "bash", "ls -A . /tmp | grep -v ':$' | grep .; pgrep -f 'sleep [1]234'; true")
        if _sure(found) and found.stdout.strip():
            tally.wrongs.append(f"slot {place} was not clean: {found.stdout[:100]!r}")
        account = Account()
        for _ in range(self._dice.randrange(2, 20)):
            if time.monotonic() > self.until_s or session.lease.lost is not None:
                break
            await self._dice.choice(self._deeds)(self, session, account)
        log = await self._call(session, "bash", "cat log; true")
        if _sure(log) and not log.truncated:
            tally.wrongs += account.wrongs(log.stdout)
            tally.counted["sessions verified"] += 1

    async def _call(self, session: ToolSession, tool: str, command: str, timeout_s: float = 10.0) -> CallResult | None:
        call = session.call(tool, {"command": command}, timeout_s=timeout_s)
        result = await self._tally.ended(f"{tool} {command[:60]!r}", call, timeout_s + HANG_S)
        self._tally.counted["calls"] += 1
        return result

    async def _write(self, session: ToolSession, account: Account, then: str = "true", tool: str = "bash") -> None:
        word = self._tally.word()
        account.asked[word] = False
        result = await self._call(session, tool, f"echo {word} >> log; {then}; echo {word}")
        account.asked[word] = _sure(result)
        if _sure(result) and not result.stdout.endswith(f"{word}\n"):
            self._tally.wrongs.append(f"{word} was answered with {result.stdout[-60:]!r}")

    async def _wait(self, session: ToolSession, account: Account) -> None:
        await self._write(session, account, f"sleep {self._dice.uniform(0.1, 2):.1f}")

    async def _print_much(self, session: ToolSession, account: Account) -> None:
        await self._write(session, account, "head -c 700000 /dev/zero | tr '\\0' x")

    async def _leave_something(self, session: ToolSession, account: Account) -> None:
        await self._write(session, account, "(setsid sleep 1234 &)")

    async def _type(self, session: ToolSession, account: Account) -> None:
        await self._write(session, account, tool="terminal")

    async def _several(self, session: ToolSession, account: Account) -> None:
        await asyncio.gather(*(self._write(session, account) for _ in range(8)))

    async def _give_up(self, session: ToolSession, account: Account) -> None:
        word = self._tally.word()
        account.asked[word] = False
        call = asyncio.ensure_future(session.call("bash", {"command": f"echo {word} >> log; sleep 3"}, timeout_s=10))
        await asyncio.sleep(self._dice.uniform(0, 0.3))
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    async def _seal(self, session: ToolSession, _: Account) -> None:
        await self._tally.ended("a seal", session.seal(), HANG_S)

    _deeds: tuple[Callable[[Visitor, ToolSession, Account], Awaitable[None]], ...]
    _deeds = (_write, _write, _write, _wait, _print_much, _leave_something, _type, _several, _give_up, _seal)


def _sure(result: CallResult | None) -> TypeGuard[CallResult]:
    """Whether a result says that the whole command ran."""
    return result is not None and result.fault == "none" and not result.timed_out and not result.cancelled


# -- what is done to them ------------------------------------------------------------------------------


class Harm:
    """Does something to the farm every now and then."""

    def __init__(self, backend: ProxiedBackend, tally: Tally, dice: random.Random) -> None:
        self._backend = backend
        self._tally = tally
        self._dice = dice

    async def run(self) -> None:
        kinds: tuple[Callable[[], None], ...] = (self._cut, self._cut, self._stall, self._kill, self._stop, self._stop)
        while True:
            await asyncio.sleep(self._dice.uniform(0.2, LONGEST_PAUSE_S))
            if self._backend.proxies and self._backend.pids:
                self._dice.choice(kinds)()

    def _cut(self) -> None:
        self._tally.counted["cuts"] += 1
        self._dice.choice(self._backend.proxies).cut()

    def _stall(self) -> None:
        self._tally.counted["stalls"] += 1
        proxy = self._dice.choice(self._backend.proxies)
        proxy.stall(self._dice.choice(("up", "down")))
        asyncio.get_running_loop().call_later(self._dice.uniform(0.5, LONGEST_STALL_S), proxy.resume)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _stop(self) -> None:
        if pid := self._signal(signal.SIGSTOP):
            asyncio.get_running_loop().call_later(self._dice.uniform(0.05, 5), send, pid, signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> int:
        name, pid = part_of(self._dice.choice(list(self._backend.pids.values())), self._dice)
        if send(pid, number):
            self._tally.counted[f"{number.name} {name}"] += 1
            return pid
        return 0


def part_of(launcher: int, dice: random.Random) -> tuple[str, int]:
    """A process of the container of this launcher; its server and agents more often than what the whole container
    depends on."""
    tree = process_tree(launcher)
    agents = [("agent", process.pid) for process in tree if process.command.startswith("slotagent")]
    servers = [("server", pid)] * 4 if (pid := server_of(launcher)) else []
    supervisors = [("supervisor", process.pid) for process in tree if process.parent == launcher]
    return dice.choice([("launcher", launcher), *supervisors, *servers, *agents])


def send(pid: int, number: signal.Signals) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


# -- all of it -----------------------------------------------------------------------------------------


@asynccontextmanager
async def _opened(backend: ProxiedBackend) -> AsyncIterator[ToolExecutor]:
    pool = SlotPool(backend, PoolSettings(min_containers=CONTAINERS, max_containers=CONTAINERS))
    settings = ExecutorSettings(reconnect_deadline_s=RECONNECT_S)
    async with pool, ToolExecutor(pool, ToolCatalog.builtin(), settings) as executor:
        async with executor.open("warm-up", acquire_timeout_s=START_S):
            pass
        yield executor


async def chaos(seconds: float, seed: int) -> Tally:
    """Run for so long; what happened is told by the seed alone only as far as timing allows."""
    tally, dice = Tally(), random.Random(seed)
    before = asyncio.all_tasks()
    backend = ProxiedBackend(ContainerSettings(slots_per_container=SLOTS))
    async with _opened(backend) as executor:
        until_s = time.monotonic() + seconds
        harm = asyncio.ensure_future(Harm(backend, tally, random.Random(dice.random())).run())
        try:
            visitors = [Visitor(executor, tally, random.Random(dice.random()), until_s) for _ in range(SESSIONS)]
            await asyncio.gather(*(visitor.run() for visitor in visitors))
        finally:
            harm.cancel()
            await asyncio.gather(harm, return_exceptions=True)
        for proxy in backend.proxies:
            proxy.resume()
        trees = [
            (process.pid, began)
            for launcher in backend.pids.values()
            for process in process_tree(launcher)
            if (began := _began(process.pid)) is not None
        ]
    tally.wrongs += [f"a task is left: {task.get_coro()}" for task in asyncio.all_tasks() - before]
    gives_up_s = time.monotonic() + DEADLINE_S  # what was killed ends when it next runs
    while left := [pid for pid, began in trees if _began(pid) == began]:
        if time.monotonic() > gives_up_s:
            break
        await asyncio.sleep(0.05)
    tally.wrongs += [f"process {pid} is left" for pid in left]
    return tally


def _began(pid: int) -> int | None:
    """When it was started, which tells it from a later one of the same number; None when it no longer runs."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def run_and_show(program: str, about: str, run: Callable[[float, int], Coroutine[None, None, Tally]]) -> int:
    """The command line of ``python -m program``: run, print the counts; the exit code, 1 when anything was wrong."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=about.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    tally = asyncio.run(run(arguments.seconds, arguments.seed))
    for name, count in sorted(tally.counted.items()):
        print(f"{count:7} {name}")
    print(f"{len(tally.wrongs):7} wrong")
    for wrong, count in Counter(tally.wrongs).most_common(20):
        print(f"   {wrong} ({count})")
    return 1 if tally.wrongs else 0


if __name__ == "__main__":
    sys.exit(run_and_show("benchmarks.chaos", __doc__ or "", chaos))
