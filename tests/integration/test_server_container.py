"""The whole container, as it ships: supervisor, server, slots with their limits. What a stub cannot show."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import pytest_asyncio

from agentenv.sandbox.server.tools.bash import CANNOT_START
from agentenv.wire.leases import LeaseKey
from agentenv.wire.spec import MIB, SandboxSpec, SlotLimits
from tests.integration.server_client import Client, sealing
from tests.integration.server_stub import descriptors
from tests.waiting import START_S

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = SlotLimits(
    processes=64,
    memory_bytes=128 * MIB,
    workspace_bytes=16 * MIB,
    workspace_inodes=500,
    tmp_bytes=8 * MIB,
    shm_bytes=8 * MIB,
)


class Container:
    """``python -m agentenv.sandbox`` with a lifeline."""

    def __init__(self, directory: Path, **spec: Any) -> None:
        self.token = secrets.token_hex(16)
        token_file = directory / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(self.token)
        name = f"test-{secrets.token_hex(4)}"
        self._spec_file = directory / "spec.json"
        whole = SandboxSpec(container=name, token_file=str(token_file), data_dir=str(directory / "state"), **spec)
        self._spec_file.write_text(whole.to_json())
        self.events: list[dict[str, Any]] = []
        self.url = ""
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        command = [sys.executable, "-m", "agentenv.sandbox", str(self._spec_file), "--lifeline"]
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        self._reader = asyncio.create_task(self._read())
        ready = await self.event("ready")
        self.url = f"http://127.0.0.1:{ready['port']}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._reader is not None
        self._process.stdin.close()
        async with asyncio.timeout(START_S):
            await self._process.wait()
            await self._reader

    async def event(self, name: str, timeout_s: float = START_S) -> dict[str, Any]:
        """The next such event; a container that failed says why."""
        async with asyncio.timeout(timeout_s):
            while True:
                for event in self.events:
                    if event["event"] == name:
                        self.events.remove(event)
                        return event
                    assert event["event"] != "failed", event
                await asyncio.sleep(0.005)

    def server_pid(self) -> int:
        """The server process among the container's descendants."""
        assert self._process is not None
        found = [pid for pid in _descendants(self._process.pid) if "agentenv.sandbox.serve" in _command_line(pid)]
        assert len(found) == 1, found
        return found[0]

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.events.append(json.loads(line))


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _pid_inside(pid: int) -> str:
    """Its number in its own namespace."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:"))


def _is_first_in(pid: int, namespace: str) -> bool:
    """Whether it is process 1 of that namespace; not if it has ended meanwhile."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink()) == namespace and _pid_inside(pid) == "1"
    except OSError:
        return False


def _descendants(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    found, seeking = [], [pid]
    while seeking:
        parent = seeking.pop()
        children = [child for child, its in parents.items() if its == parent]
        found += children
        seeking += children
    return found


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def container(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Container]:
    async with Container(tmp_path_factory.mktemp("container"), slots=3, limits=LIMITS) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def client(container: Container) -> AsyncIterator[Client]:
    async with Client(container.url, container.token) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def key(client: Client) -> AsyncIterator[LeaseKey]:
    async with client.leased() as made:
        yield made


async def test_the_handshake_says_what_holds(client: Client) -> None:
    info = await client.info()
    assert info.slots == 3
    assert info.proofs
    assert all(proof.holds for proof in info.proofs if proof.required)
    assert [(await client.slot(slot)).state for slot in range(3)] == ["free"] * 3


async def test_a_call_there_and_back(client: Client, key: LeaseKey) -> None:
    for _ in range(3):
        result = await client.run(key, "echo out; echo err >&2; pwd; cat; exit 4")
        assert (result.exit_code, result.stdout, result.stderr) == (4, "out\n/workspace\n", "err\n")
    result = await client.run(key, "cat; echo $A; pwd", stdin="in ", env={"A": "b"}, cwd="/usr")
    assert result.stdout == "in b\n/usr\n"
    result = await client.run(key, "# " + "x" * 300_000 + "\necho long")
    assert result.stdout == "long\n"
    result = await client.run(key, r"printf '\xff\x00'")
    assert result.stdout == "�\0"


async def test_files_there_and_back(client: Client, key: LeaseKey) -> None:
    assert (await client.run(key, tool="write_file", path="d/f", text="content\n")).exit_code == 0
    assert (await client.run(key, "cat d/f; stat -c %U:%a d/f")).stdout.splitlines()[0] == "content"
    read = await client.run(key, tool="read_file", path="/workspace/d/f")
    assert isinstance(read.content, dict)
    assert read.content["text"] == "content\n"
    listed = await client.run(key, tool="list_files", path=".", depth=2)
    assert isinstance(listed.content, dict)
    entries = listed.content["entries"]
    assert isinstance(entries, list)
    assert [entry["path"] for entry in entries if isinstance(entry, dict)] == ["d", "d/f"]
    packed = await client.run(key, tool="artifacts", action="archive", path="d")
    assert isinstance(packed.content, dict)
    assert packed.content["total_bytes"] == 8
    unpacked = await client.run(key, tool="artifacts", action="extract", path="e", data=packed.content["data"])
    assert unpacked.fault == "none", unpacked
    assert (await client.run(key, "cat e/f")).stdout == "content\n"


async def test_memory_beyond_the_limit_is_told_from_other_kills(client: Client, key: LeaseKey) -> None:
    killed = await client.run(key, "kill -9 $$")
    assert (killed.exit_code, killed.oom_killed) == (137, False)
    hog = "x=$(head -c 400000000 /dev/zero | tr '\\0' x); echo ${#x}"
    result = await client.run(key, hog, timeout_s=60)
    assert result.fault == "none"
    assert result.oom_killed, result
    assert result.exit_code != 0
    assert (result.peak_memory_bytes or 0) > 100 * MIB
    after = await client.run(key, "kill -9 $$")
    assert (after.exit_code, after.oom_killed) == (137, False), "an earlier kill is not this call's"
    assert (await client.run(key, "echo alive")).stdout == "alive\n"


async def test_a_fork_bomb_ends_at_its_deadline_and_the_neighbour_does_not_notice(
    client: Client, key: LeaseKey
) -> None:
    other = await client.lease(1)
    bomb = client.call(key, command="bomb() { bomb | bomb & }; bomb; sleep 1000", timeout_s=3)
    await client.ask(bomb)
    for _ in range(20):
        assert (await client.run(other, "echo quick")).stdout == "quick\n"
        await asyncio.sleep(0.05)
    result = await client.result(bomb)
    assert (result.fault, result.timed_out) == ("none", True)
    alive = await client.run(key, "echo alive")
    assert alive.fault == "none"
    assert await client.release(other) == "free"


async def test_a_slot_full_of_processes_is_data(client: Client) -> None:
    key = await client.lease(2)
    await client.run(key, "bomb() { bomb | bomb & }; bomb 2>/dev/null &", timeout_s=5)
    async with asyncio.timeout(60):
        while True:
            result = await client.run(key, "echo alive", cwd=".", timeout_s=1)
            assert result.fault == "none"
            if result.exit_code == CANNOT_START:
                break
    assert "process limit of the slot is reached" in result.stderr
    assert await client.release(key) == "free"


async def test_a_full_disk_is_data(client: Client, key: LeaseKey) -> None:
    full = await client.run(key, "head -c 100M /dev/zero > big; echo $?; ls -s big | cut -d' ' -f1")
    code, size_kib = full.stdout.split()
    assert code != "0"
    assert int(size_kib) <= LIMITS.workspace_bytes // 1024
    assert "No space left" in full.stderr
    written = await client.run(key, tool="write_file", path="more", text="x" * 100_000)
    assert (written.fault, written.exit_code) == ("none", 28)
    inodes = await client.run(key, "rm big; for ((n = 0; n < 600; n++)); do : > f$n || break; done; echo $n")
    assert int(inodes.stdout) <= LIMITS.workspace_inodes


async def test_release_leaves_nothing(client: Client) -> None:
    key = await client.lease(2)
    await client.run(key, "touch left /tmp/left /dev/shm/left; setsid sleep 1000 >/dev/null 2>&1 &")
    assert await client.release(key) == "free"
    key = await client.lease(2)
    assert (await client.run(key, "ls -A . /tmp /dev/shm; pgrep -c sleep")).stdout.endswith("\n0\n")
    assert "left" not in (await client.run(key, "ls -A . /tmp /dev/shm")).stdout
    assert await client.release(key) == "free"


async def test_seal_keeps_the_workspace_and_nothing_else(client: Client) -> None:
    key = await client.lease(2)
    await client.run(key, "echo kept > file; sleep 1000 >/dev/null 2>&1 &")
    status, reply = await client.post("/v1/leases/act", sealing(key))
    assert (status, reply["state"]) == (200, "leased")
    assert (await client.run(key, "cat file; pgrep -c sleep")).stdout == "kept\n0\n"
    assert await client.release(key) == "free"


async def test_a_lease_without_heartbeat_ends_in_a_clean_slot(client: Client) -> None:
    key = await client.lease(2, ttl_s=0.3)
    await client.run(key, "touch left")
    async with asyncio.timeout(START_S):
        while (await client.slot(2)).state != "free":
            await asyncio.sleep(0.01)
    assert (await client.run(key, "true")).error == "stale_lease"
    key = await client.lease(2)
    assert (await client.run(key, "ls")).stdout == ""
    await client.release(key)


async def test_a_killed_server_comes_back_to_living_slots(container: Container) -> None:
    async with Client(container.url, container.token) as client:
        key = await client.lease(0)
        await client.run(key, "echo kept > file")
        lost = client.call(key, command="echo ran >> log; sleep 1000")
        await client.ask(lost)
        await client.running(0, 1)
        os.kill(container.server_pid(), signal.SIGKILL)
        await container.event("server_restarted")
    async with Client(container.url, container.token) as client:
        await client.ask(lost)
        result = await client.result(lost)
        assert (result.fault, result.error) == ("infra", "call_lost")
        assert (await client.run(key, "cat file; pgrep -c sleep")).stdout == "kept\n0\n"
        assert await client.release(key) == "free"
        assert [(await client.slot(slot)).state for slot in range(3)] == ["free"] * 3


async def test_an_agent_that_dies_ends_its_lease_only(container: Container, client: Client) -> None:
    key, other = await client.lease(0), await client.lease(1)
    where = (await client.run(key, "readlink /proc/self/ns/pid")).stdout.strip()
    agent = [pid for pid in _descendants(os.getpid()) if _is_first_in(pid, where)]
    assert len(agent) == 1
    lost = client.call(key, command="sleep 1000")
    await client.ask(lost)
    await client.running(0, 1)
    os.kill(agent[0], signal.SIGKILL)
    assert (await client.result(lost)).error == "slot_destroyed"
    assert (await client.run(other, "echo safe")).stdout == "safe\n"
    async with asyncio.timeout(START_S):
        while (await client.slot(0)).state != "free":
            await asyncio.sleep(0.01)
    assert await client.release(other) == "free"


async def test_the_server_is_small_and_leaks_nothing(container: Container, client: Client, key: LeaseKey) -> None:
    pid = container.server_pid()
    for _ in range(20):
        await client.run(key, "sleep 100 & echo x")
    await client.run(key, "pkill sleep; true")
    before = await descriptors(pid)
    for _ in range(20):
        await client.run(key, "sleep 100 & echo x")
    await client.run(key, "pkill sleep; true")
    # A spare shell may be in the making at either moment: its three descriptors, not one for each of 20 rounds.
    assert abs(await descriptors(pid) - before) <= 3
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    pss_kib = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    assert pss_kib < 60 * 1024
