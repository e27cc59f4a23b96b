"""Nothing a slot does holds an event loop of its container: every tool with huge and hostile input, really run.

Server and supervisor say themselves how long their loops were held (``GET /v1/stalls``). A bare event loop beside
them says how late this machine was in the same seconds, and what all suffer from is allowed. A stall of ours is there
each time, so the best of a few attempts counts.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.errors import AgentEnvError
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.sandbox.loop_watch import STALL_S
from agentenv.sdk.tool_context import ToolContext
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from tests.faults.bare_loop import bare_loop, this_loop
from tests.waiting import START_S, eventually

MIB = 1024 * 1024
ATTEMPTS = 6
LATER_THAN_BARE = 4
NEIGHBOUR = 3
SUPERVISOR_TELLS_S = 4.5
"""It answers the server's ping every 2 s, and the answer to one of before may be on its way."""
LEAST_P99_S = 0.5
"""Of few calls p99 is the slowest."""

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Attack:
    """``prepare`` is bash in the attacking slot; ``calls`` are made one after the other, or all at once."""

    name: str
    calls: tuple[Call, ...]
    prepare: str = "true"
    at_once: bool = False
    timeout_s: float = 20.0


def bash(command: str, **more: Any) -> Call:
    return ("bash", {"command": command, **more})


def patch(lines: str, at: str = "@@ -1,9 +1,9 @@\n") -> Call:
    return ("patch", {"patch": "--- a/f\n+++ b/f\n" + at + lines})


def search(pattern: str, **more: Any) -> Call:
    return ("search", {"pattern": pattern, **more})


def tmux(action: str, **more: Any) -> Call:
    return ("tmux", {"action": action, **more})


def nested(depth: int) -> Any:
    made: Any = []
    for _ in range(depth):
        made = [made]
    return made


WIDE = "[!-\uffff]"
LONG_LINE = "head -c 1M /dev/zero | tr '\\0' a > f"
HALF_MARKERS = "yes $'\\x1e/0123456789abcdef' | tr -d '\\n' | head -c 32M"
ARCHIVED = tuple(("artifacts", {"action": action, "path": "d"}) for action in ("list", "archive"))
FILES_20K = "mkdir d && cd d && seq 20000 | xargs touch"
HISTORY = "seq 40000 | sed 's/.*/same/'; sleep 1; seq 40000 | sed 's/.*/same/'; sleep 60"
ZEROS = "head -c 3M /dev/zero | tr '\\0' 0"
CLIENT = "/proc/$(pgrep -f 'tmux.*-C start-server' | head -n 1)/fd/1"


def forged(script: str) -> tuple[Call, ...]:
    """What ``script`` prints, in place of tmux."""
    return (tmux("start"), bash(f"({script}) > {CLIENT}"), tmux("stop"))


TABLE = [
    # patch
    Attack("patch: equal lines", (patch(" a\n" * 2000 + "-b\n+y\n"),), "yes a | head -c 1M > f"),
    Attack("patch: 8 MiB of empty lines", (patch(" \n" * 2000 + "-b\n+y\n"),), "yes '' | head -c 8M > f"),
    Attack("patch: an ordinary hunk in a matrix", (patch(" 0,\n" * 3 + "-0,\n+1,\n"),), "yes 0, | head -1000000 > f"),
    Attack("patch: 2 MiB of text", (patch("+\n" * MIB, "@@ -0,0 +1 @@\n"),)),
    Attack("patch: 20,000 hunks", (patch("-a\n+b\n" + "@@ -9 +9 @@\n-a\n+b\n" * 20_000),), "yes a | head -c 1M > f"),
    Attack("patch: names", (("patch", {"patch": "--- a/" + "x/" * 100_000 + "\n+++ b/y\n@@\n-a\n+b\n"}),)),
    # search
    Attack("search: wide classes", tuple(search("(?i)" + WIDE * (180 + n)) for n in range(5))),
    Attack("search: ASCII classes", tuple(search("(?i)" + "[ -~]" * (190 + n)) for n in range(5))),
    Attack("search: backtracking", (search("(a*)*(a|b)*b\\w*c$"),), LONG_LINE, timeout_s=2),
    Attack("search: every line", (search(".", limit=10_000),), "yes 0123456789 | head -c 4M > f"),
    # the text of commands
    Attack("bash: set set set", tuple(bash(": " + "set " * 8000) for _ in range(3))),
    Attack("bash: -o-o-o", tuple(bash(": " + "-o" * 16_000) for _ in range(3))),
    Attack("bash: 6 MiB of command", (bash(": " + "x" * 6 * MIB),)),
    Attack("bash: 6 MiB of stdin", (bash("cat > /dev/null", stdin="x" * 6 * MIB),)),
    Attack("arguments that nest", (("bash", {"command": "true", "env": nested(150)}),)),
    Attack("many calls queued", tuple(bash(f": {'x' * 10_000}") for _ in range(400)), at_once=True),
    # output
    Attack("bash: 512 MiB of zeros", (bash("head -c 256M /dev/zero"), bash("head -c 256M /dev/zero >&2"))),
    Attack("bash: lines without an end", (bash("timeout 2 yes"),)),
    Attack("bash: bytes that are not UTF-8", (bash("head -c 64M /dev/urandom"),)),
    Attack("bash: orphans that print", (bash("for n in $(seq 100); do (timeout 2 yes &) ; done"), bash("sleep 2"))),
    # files
    Attack("read_file: 60 MiB of NULs", (("read_file", {"path": "f"}),), "truncate -s 60M f"),
    Attack("read_file: 60 MiB of text", (("read_file", {"path": "f"}),), "yes 'a line' | head -c 60M > f"),
    Attack("read_file: 60 MiB of bytes", (("read_file", {"path": "f", "binary": True}),), "head -c 60M /dev/zero > f"),
    Attack("read_file: no UTF-8", (("read_file", {"path": "f"}),), "head -c 16M /dev/urandom > f"),
    Attack("write_file: 30 MiB", (("write_file", {"path": "f", "text": "é" * 15 * MIB}),)),
    Attack("list_files: 20,000", (("list_files", {"path": "d", "limit": 100_000}),), FILES_20K),
    Attack("artifacts: 20,000", ARCHIVED, FILES_20K),
    Attack("artifacts: 40 MiB", (("artifacts", {"action": "archive", "path": "."}),), "head -c 40M /dev/zero > f"),
    # sessions
    Attack("terminal: a flood", (("terminal", {"command": "timeout 3 yes"}),)),
    Attack("terminal: no newline", (("terminal", {"command": "head -c 64M /dev/zero | tr '\\0' /"}),)),
    Attack("terminal: half markers", (("terminal", {"command": HALF_MARKERS}),)),
    Attack("terminal: a PTY", (("terminal", {"command": "timeout 3 yes", "session": "p", "pty": True}),)),
    Attack(
        "process: floods",
        (
            *(("process", {"action": "start", "command": "timeout 4 yes"}) for _ in range(8)),
            *(("process", {"action": action, "process": f"p{n}"}) for n in range(1, 9) for action in ("poll", "log")),
        ),
    ),
    Attack(
        "tmux: equal lines of history",
        (
            tmux("start", command=HISTORY),
            *(tmux("capture", what=what) for what in ("difference", "difference", "scrollback", "difference")),
            bash("sleep 2"),
            *(tmux("capture", what=what) for what in ("difference", "scrollback", "difference")),
        ),
    ),
    Attack("tmux: forged notices", forged("timeout 4 yes %")),
    Attack("tmux: a forged answer of empty lines", forged("echo %begin 1 1 1; timeout 4 yes ''")),
    Attack("tmux: a forged number", forged(f"printf '%%begin '; {ZEROS}; echo; timeout 4 yes ''")),
    Attack("tmux: forged escapes", forged("printf '%%output %%0 '; yes '\\000' | head -c 4M | tr -d '\\n'; echo")),
    Attack("tmux: a flood", (tmux("start", command="timeout 3 yes"), tmux("wait", until="exit", max_wait_s=6))),
]  # fmt: skip


@dataclass
class Container:
    """One container with an attacker and a neighbour."""

    executor: ToolExecutor
    bad: ToolSession
    good: ToolSession

    async def stalls(self, process: str = "server") -> dict[str, Any]:
        handle = self.good.lease.container
        async with httpx.AsyncClient(trust_env=False) as client:
            told = await client.get(
                f"{handle.base_url}/v1/stalls", headers={"Authorization": f"Bearer {handle.token}"}, timeout=60
            )
        assert told.status_code == 200, told.text
        found: dict[str, Any] = json.loads(told.text)[process]
        return found

    async def neighbour_p99_s(self, until: Callable[[], bool]) -> float:
        """Of `true` in the other slot, over and over."""
        took_s: list[float] = []
        while len(took_s) < 20 or not until():
            began_s = time.monotonic()
            result = await self.good.call("bash", {"command": "true"}, timeout_s=60)
            took_s.append(time.monotonic() - began_s)
            assert result.fault == "none", result
            await asyncio.sleep(0.01)
        return sorted(took_s)[int(len(took_s) * 0.99)]


@asynccontextmanager
async def opened() -> AsyncIterator[ToolExecutor]:
    settings = PoolSettings(min_containers=1, max_containers=1, acquire_timeout_s=START_S)
    backend = LocalBackend(ContainerSettings(slots_per_container=3))
    async with SlotPool(backend, settings) as pool, ToolExecutor(pool, ToolCatalog.builtin()) as executor:
        yield executor


@dataclass
class Kept:
    """The container of the last test, for as long as nothing held its loops: then a new stall is its longest."""

    stack: AsyncExitStack
    executor: ToolExecutor | None = None


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept() -> AsyncIterator[Kept]:
    async with AsyncExitStack() as stack:
        yield Kept(stack)


@pytest_asyncio.fixture(loop_scope="module")
async def container(kept: Kept) -> AsyncIterator[Container]:
    if kept.executor is None:
        kept.executor = await kept.stack.enter_async_context(opened())
    executor = kept.executor
    async with (
        executor.open("bad", acquire_timeout_s=START_S) as bad,
        executor.open("good", acquire_timeout_s=START_S) as good,
    ):
        made = Container(executor, bad, good)
        yield made
        held_s = [(await made.stalls(process))["longest_s"] for process in ("server", "supervisor")]
    if max(held_s) > STALL_S:
        kept.executor = None
        await kept.stack.aclose()


async def made(container: Container, attack: Attack) -> None:
    """The attack's calls. What the tools say to them is not the question here."""

    async def one(call: Call) -> None:
        with suppress(AgentEnvError):
            await container.bad.call(call[0], call[1], timeout_s=attack.timeout_s)

    if attack.at_once:
        await asyncio.gather(*map(one, attack.calls))
    else:
        for call in attack.calls:
            await one(call)


async def attempt(container: Container, act: Callable[[], Awaitable[None]], process: str) -> list[str]:
    """What is wrong with how the process and the neighbour lived through it."""
    bare_s: list[float] = []
    own_s: list[float] = []
    quiet_s = await container.neighbour_p99_s(lambda: True)
    before = await container.stalls(process)
    async with bare_loop(bare_s), this_loop(own_s):
        acting = asyncio.ensure_future(act())
        busy_s = await container.neighbour_p99_s(acting.done)
        await acting
    after = await container.stalls(process)
    wrong: list[str] = []
    longest_s = after["longest_s"] if after["longest_s"] > before["longest_s"] else 0.0
    if longest_s > max(STALL_S, LATER_THAN_BARE * bare_s[0]):
        wrong.append(f"the loop was held for {longest_s:.3f} s (a bare one: {bare_s[0]:.3f} s)\n{after['stack']}")
    late_s = max(bare_s[0], own_s[0])
    if busy_s > max(LEAST_P99_S, NEIGHBOUR * (quiet_s + late_s)):
        wrong.append(f"the neighbour's p99 went from {quiet_s:.3f} to {busy_s:.3f} s (loops beside it: {late_s:.3f} s)")
    return wrong


async def lived_through(container: Container, act: Callable[[], Awaitable[None]], process: str = "server") -> None:
    wrong: list[str] = []
    for _ in range(ATTEMPTS):
        wrong = await attempt(container, act, process)
        if not wrong:
            return
    pytest.fail("\n".join(wrong))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("attack", TABLE, ids=lambda attack: attack.name)
async def test_no_tool_holds_the_loop(container: Container, attack: Attack) -> None:
    prepared = await container.bad.call("bash", {"command": attack.prepare}, timeout_s=60)
    assert prepared.exit_code == 0, prepared
    await lived_through(container, lambda: made(container, attack))


def test_every_tool_is_attacked() -> None:
    assert {tool for attack in TABLE for tool, _ in attack.calls} == set(ToolCatalog.builtin().names)


@pytest.mark.asyncio(loop_scope="module")
async def test_no_transfer_holds_the_loop(container: Container, tmp_path: Path) -> None:
    for number in range(2000):
        (tmp_path / str(number)).write_text("x")
    (tmp_path / "large").write_bytes(b"x" * 64 * MIB)
    context = ToolContext(container.bad)

    async def act() -> None:
        await context.upload(tmp_path, "up")
        await context.download("up", tmp_path / "down")

    await lived_through(container, act)


@pytest.mark.asyncio(loop_scope="module")
async def test_no_reset_holds_the_supervisors_loop(container: Container) -> None:
    """A slot that is as full as it may be: 900 MiB, 100,000 files, 300 processes."""
    fill = "head -c 900M /dev/zero > f; seq 100000 | xargs touch; for n in $(seq 300); do sleep 1000 & done"

    async def act() -> None:
        async with container.executor.open("third", acquire_timeout_s=START_S) as third:
            filled = await third.call("bash", {"command": fill}, timeout_s=120)
            assert filled.exit_code == 0, filled
        async with container.executor.open("next", acquire_timeout_s=START_S):  # that slot, after its reset
            await asyncio.sleep(SUPERVISOR_TELLS_S)

    await lived_through(container, act, "supervisor")


@pytest.mark.asyncio(loop_scope="module")
async def test_the_watch_would_tell(container: Container) -> None:
    """A bare loop and the processes' watches see what holds the whole machine's Python up: a check of the checks."""
    bare_s: list[float] = []
    async with bare_loop(bare_s):
        await container.neighbour_p99_s(lambda: True)
    assert 0 < bare_s[0] < 60
    for process in ("server", "supervisor"):

        async def told_of(process: str = process) -> bool:
            return (await container.stalls(process))["longest_s"] > 0  # type: ignore[no-any-return]

        await eventually(told_of)
        told = await container.stalls(process)
        assert set(told) == {"count", "longest_s", "recent_s", "stack"}
