"""``python -m benchmarks.fuzz``: hostile arguments for every tool; no infrastructure failure, no hang, nobody hurt.

What a model can write into a call is drawn at random: the wrong types, numbers without measure, texts that are no text,
commands that turn on their own slot. Each call must end in time with a result or with an error that is the model's own,
and a neighbour's calls in the same container must go on.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.errors import InfraError
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.calls import CallResult
from benchmarks.chaos import HANG_S, Tally, run_and_show
from tests.waiting import START_S

ATTACKERS: Final = 2
CALLS_PER_SLOT: Final = 60
NEIGHBOUR_S: Final = 30.0
"""A neighbour's `echo` is answered within so long; that others wait at all is measured elsewhere."""

TEXTS: Final = (
    "", "a", "\0", "a\0b", "\ud800", "é" * 100, "\u2028", "\xff", "x" * 100_000, "x" * 9_000_000,
    "'", '"', "$(", "`", "if", "{", "((", "<<EOF", "\\", "*", "[", "(", "a{1000}", "(a*)*b", "[!-\uffff]" * 90,
    ".", "..", "../..", "/etc/passwd", "/workspace/../x", "/proc/1/mem", "/dev/zero", "f", "d/e", "~", "-rf", "--help",
    "p1", "p99", "default", "s1", "C-c", "C-\\", "C-z", "Enter", "M-", "F99", "\x1b[2J", "\r\n",
)  # fmt: skip
COMMANDS: Final = (
    "true", "exit 3", "kill -9 $$", "kill -9 -1", "kill -STOP $$", "exec sleep 100", "exec 1>&-; echo x", "exec 9>&-",
    "set -x; false", "set -o vi", "trap 'echo t' EXIT", "alias for=:", "exec 2>&1 >/dev/null", "stty raw",
    "sleep 3 &", "(sleep 2; echo late) &", "cat", "read -p '? ' x", "yes | head -c 3000000", "printf '\\x80\\xff'",
    "head -c 4M /dev/urandom", "ulimit -n 3; ls", "ulimit -v 1000; ls", "cd /tmp; rm -rf /workspace/*",
    "mkfifo p; cat p", "ln -s / root; ls root", "mount",
    "unshare -Ur true", "dd if=/dev/zero of=/dev/shm/x bs=1M count=200",
    "head -c 2000M /dev/zero > big", "rm -f big; chmod 000 .", "chmod 700 .",
    "seq 2000 | xargs -P 50 -n 1 sleep 0.01",
)  # fmt: skip
NUMBERS: Final = (
    0, 1, -1, 2, 10, 1e9, 2**31, 2**63, 10**30, -(10**30), 0.0, 0.5, 1e-9, float("nan"), float("inf"), True, None, "1",
)  # fmt: skip
ENVIRONMENT: Final = ("A", "PATH", "LD_PRELOAD", "BASH_ENV", "", "=", "\0")


class Hostile:
    """Draws tool calls."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], dice: random.Random) -> None:
        self._schemas = schemas
        self._dice = dice

    def call(self) -> tuple[str, dict[str, Any]]:
        """A tool's name (as a rule one that exists) and arguments for it."""
        dice = self._dice
        tool = dice.choice([*self._schemas]) if dice.random() < 0.97 else dice.choice(TEXTS)[:30]
        properties = self._schemas.get(tool, {})
        given = {
            name: self._fitting(schema) if dice.random() < 0.8 else self._anything()
            for name, schema in properties.items()
            if dice.random() < 0.5
        }
        for name, likely in (("command", COMMANDS), ("action", properties.get("action", {}).get("enum", ()))):
            if name in properties and likely and dice.random() < 0.8:
                given[name] = dice.choice(likely)
        if dice.random() < 0.05:
            given[dice.choice(TEXTS)[:10]] = self._anything()
        return tool, given

    def _fitting(self, schema: Mapping[str, Any]) -> Any:
        """Of the type that the schema asks for."""
        dice = self._dice
        if "enum" in schema:
            return dice.choice(schema["enum"])
        drawn: dict[str, Callable[[], Any]] = {
            "string": lambda: dice.choice(TEXTS),
            "integer": lambda: dice.choice([0, 1, 2, 100, dice.choice(NUMBERS)]),
            "number": lambda: dice.choice([0, 0.5, 2, 100, dice.choice(NUMBERS)]),
            "boolean": lambda: dice.random() < 0.5,
            "array": lambda: [dice.choice(TEXTS)[:40] for _ in range(dice.randrange(4))],
            "object": lambda: {dice.choice(ENVIRONMENT): dice.choice(TEXTS)},
        }
        return drawn.get(schema.get("type", ""), self._anything)()

    def _anything(self, depth: int = 0) -> Any:
        dice = self._dice
        kind = dice.random()
        if kind < 0.45:
            return dice.choice((*TEXTS, *COMMANDS))
        if kind < 0.75:
            return dice.choice(NUMBERS)
        if kind < 0.85 and depth < 3:
            return [self._anything(depth + 1) for _ in range(dice.randrange(4))]
        if kind < 0.95 and depth < 3:
            return {dice.choice(TEXTS)[:20]: self._anything(depth + 1) for _ in range(dice.randrange(3))}
        nested: Any = []
        for _ in range(dice.choice([5, 500])):
            nested = [nested]
        return nested


class Attacker:
    """Makes calls in one slot after the other until ``until_s`` (monotonic)."""

    def __init__(self, executor: ToolExecutor, tally: Tally, dice: random.Random, until_s: float) -> None:
        schemas = [tool["function"] for tool in executor.catalog.openai_tools()]
        self._hostile = Hostile({tool["name"]: tool["parameters"]["properties"] for tool in schemas}, dice)
        self._executor = executor
        self._tally = tally
        self._dice = dice
        self._until_s = until_s

    async def run(self) -> None:
        while time.monotonic() < self._until_s:
            async with self._executor.open(self._tally.word(), acquire_timeout_s=START_S) as session:
                for _ in range(CALLS_PER_SLOT):
                    if time.monotonic() > self._until_s or session.lease.lost is not None:
                        break
                    await self._call(session)

    async def _call(self, session: ToolSession) -> None:
        tool, given = self._hostile.call()
        what = f"{tool} {str(given)[:200]}"
        timeout_s = self._dice.choice([0.2, 1.0, 2.0])
        made = _mine(self._tally, what, session.call(tool, given, timeout_s=timeout_s))
        result = await self._tally.ended(what, made, timeout_s + HANG_S)
        self._tally.counted["calls" if result is None else f"calls, fault {result.fault}"] += 1


async def _mine(tally: Tally, what: str, made: Awaitable[CallResult]) -> CallResult:
    """An infrastructure failure is wrong: nothing a model writes may cause one."""
    try:
        return await made
    except InfraError as error:
        tally.wrongs.append(f"{what}: {type(error).__name__}: {error}")
        raise


async def _neighbour(executor: ToolExecutor, tally: Tally, until_s: float) -> None:
    async with executor.open("neighbour", acquire_timeout_s=START_S) as session:
        while time.monotonic() < until_s:
            made = _mine(tally, "the neighbour", session.call("bash", {"command": "echo ok"}, timeout_s=NEIGHBOUR_S))
            result = await tally.ended("the neighbour's call", made, HANG_S)
            if result is None or result.stdout != "ok\n":
                tally.wrongs.append(f"the neighbour was told {result}")
                return
            tally.counted["neighbour's calls"] += 1
            await asyncio.sleep(0.02)


async def fuzz(seconds: float, seed: int) -> Tally:
    """Run for so long over one container."""
    tally, dice = Tally(), random.Random(seed)
    settings = PoolSettings(min_containers=1, max_containers=1, acquire_timeout_s=START_S)
    backend = LocalBackend(ContainerSettings(slots_per_container=ATTACKERS + 1))
    async with SlotPool(backend, settings) as pool, ToolExecutor(pool, ToolCatalog.builtin()) as executor:
        until_s = time.monotonic() + seconds
        attackers = [Attacker(executor, tally, random.Random(dice.random()), until_s) for _ in range(ATTACKERS)]
        await asyncio.gather(_neighbour(executor, tally, until_s), *(attacker.run() for attacker in attackers))
    return tally


if __name__ == "__main__":
    sys.exit(run_and_show("benchmarks.fuzz", __doc__ or "", fuzz))
