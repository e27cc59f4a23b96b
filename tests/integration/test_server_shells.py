"""The server's shells, spare and new: a command cannot tell them from ``bash -c``, and they cost the server little.
What a call's result says is the same on every backend: ``tests/contract/executor/test_executor_bash.py``."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agentenv.sandbox.server.tools.bash import MAX_ARGV_SCRIPT_BYTES, MAX_SPARE_SCRIPT_BYTES
from agentenv.sandbox.slot_env import command_env
from agentenv.wire.leases import LeaseKey
from tests.integration.server_client import Client
from tests.integration.server_stub import StubSupervisor
from tests.waiting import DEADLINE_S, START_S

pytestmark = pytest.mark.asyncio(loop_scope="module")
MIB = 1024 * 1024


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stub() -> AsyncIterator[StubSupervisor]:
    async with StubSupervisor(slots=1, env={"FROM_SPEC": "yes"}) as made:
        yield made


async def spare_ready(client: Client, key: LeaseKey) -> None:
    """Until a call would be taken by a spare shell."""
    async with asyncio.timeout(START_S):
        while True:
            cold = (await client.statistics())["calls_cold"]
            await client.run(key, "true")
            if (await client.statistics())["calls_cold"] == cold:
                return


SCRIPTS = [
    "echo $$ >/dev/null; echo $0 $# $- $SHLVL $((SECONDS / 2))",
    "exit 7",
    "false",
    "trap 'echo bye' EXIT; exit 3",
    "trap 'echo err $LINENO' ERR\nfalse\ntrue",
    "set -e; false; echo not reached",
    "set -u; echo $undefined; echo not reached",
    "set -euo pipefail; false | true; echo not reached",
    "nosuchcommand",
    "echo a\n\nnosuchcommand",
    "kill -TERM $$",
    "kill -9 $$; echo not reached",
    "cat <<END\nhello $((1 + 1))\nEND",
    "f() { echo $LINENO ${FUNCNAME[0]}; return 5; }\nf",
    "cat; read line; echo $?",
    "echo out; echo err >&2",
    "ls /proc/self/fd | wc -l",
    "exec 3>&1; echo three >&3",
    "exec echo replaced",
    "local x",
    "return 4",
    "break",
    "[ -t 0 ] || echo no terminal",
    "set -x; echo traced",
    "echo ${PIPESTATUS[@]}",
    "echo '  spaces  '  ",
    "x=$(printf 'a\\n\\n'); echo \"[$x]\"",
    "ulimit -c; umask",
    "! true",
    "(exit 9)",
    "wait; jobs",
    "echo \"$BASH_EXECUTION_STRING\"",
    "declare -p | grep -v PIPESTA[T]US | cut -d= -f1 | sort",  # which the bootstrap has set
    "cd /; pwd",
    "echo é ‱ 𝄞",
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("path", ["spare", "cold"])
async def test_a_script_behaves_as_under_bash_c(client: Client, key: LeaseKey, script: str, path: str) -> None:
    env = command_env({"FROM_SPEC": "yes"})
    bare = subprocess.run(["bash", "-c", script], env=env, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    expected = bare.returncode if bare.returncode >= 0 else 128 - bare.returncode
    if path == "spare":
        await spare_ready(client, key)
    result = await client.run(key, script, cwd="." if path == "cold" else None)
    stdout = bare.stdout.decode()
    assert (result.exit_code, result.stdout, result.stderr) == (expected, stdout, bare.stderr.decode())
    assert result.fault == "none"


async def test_every_call_has_a_shell_of_its_own(client: Client, key: LeaseKey) -> None:
    for _ in range(2):
        first = await client.run(key, "echo $$; cd /tmp; export LEFT=1; left() { :; }; set -f; umask 0; alias a=b")
        second = await client.run(key, "echo $$; pwd; echo ${LEFT-unset}; type left; echo $-; umask; alias")
        pid, where, left, *rest = second.stdout.split("\n")
        assert pid != first.stdout.strip()
        assert (where, left) == ("/workspace", "unset")
        assert "f" not in rest[0]
        assert rest[1] == "0022"
        assert "left: not found" in second.stderr


async def test_the_environment_is_ours_the_specs_and_the_calls(client: Client, key: LeaseKey) -> None:
    plain = await client.run(key, "env | sort")
    names = {line.split("=")[0] for line in plain.stdout.splitlines()}
    assert names == {
        "FROM_SPEC", "GIT_PAGER", "HOME", "LC_CTYPE", "LESS", "LOGNAME", "MANPAGER", "PAGER", "PATH",
        "PIP_BREAK_SYSTEM_PACKAGES", "PWD", "SHELL", "SHLVL", "TERM", "TMPDIR", "USER", "_",
    }  # fmt: skip
    more = await client.run(key, 'echo "$A|$FROM_SPEC|$HOME"', env={"A": "with spaces\nand é", "FROM_SPEC": "no"})
    assert more.stdout == "with spaces\nand é|no|/workspace\n"
    assert (await client.run(key, "echo ${A-gone}")).stdout == "gone\n"


async def test_environments_that_no_packet_holds_leave_nothing_behind(client: Client, key: LeaseKey) -> None:
    calls = [client.call(key, command="true", env={"A": "x" * 70_000}) for _ in range(200)]
    for at in range(0, len(calls), 50):
        await client.ask(*calls[at : at + 50])
    for call in calls:
        result = await client.result(call)
        assert (result.fault, result.exit_code) == ("none", 0)
    assert (await client.run(key, "echo alive")).stdout == "alive\n"


@pytest.mark.parametrize(
    "size", [MAX_SPARE_SCRIPT_BYTES - 60, MAX_SPARE_SCRIPT_BYTES + 60, MAX_ARGV_SCRIPT_BYTES, 300_000, 4 * MIB]
)
async def test_scripts_of_any_size(client: Client, key: LeaseKey, size: int) -> None:
    script = "n=$((n + 1)) # padding é\n" * (size // 26) + "echo $n"
    result = await client.run(key, script, timeout_s=60)
    assert (result.stdout, result.stderr) == (f"{size // 26}\n", "")


async def test_a_flood_costs_the_server_little_memory(stub: StubSupervisor, client: Client, key: LeaseKey) -> None:
    assert stub.server is not None
    status = Path(f"/proc/{stub.server.pid}/status")

    def peak_kib() -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))

    await client.run(key, "yes | head -c 3000000")
    before = peak_kib()
    result = await client.run(key, "yes | head -c 1073741824", timeout_s=START_S)
    assert result.stdout_dropped_bytes == 2**30 - MIB
    assert peak_kib() - before <= 8 * 1024


async def test_a_spare_shell_that_the_slot_killed_costs_nothing_but_time(client: Client, key: LeaseKey) -> None:
    await spare_ready(client, key)
    await client.run(key, "(exec sh -c 'sleep 0.1; pkill -9 -x bash; touch killed') & disown")
    async with asyncio.timeout(DEADLINE_S):
        while (await client.run(key, tool="read_file", path="killed")).exit_code != 0:
            await asyncio.sleep(0.02)
    assert (await client.run(key, "echo alive")).stdout == "alive\n"


async def test_nul_bytes_and_bad_environments_are_refused(client: Client, key: LeaseKey) -> None:
    wrong: list[dict[str, Any]] = [
        {"command": "a\0b"},
        {"command": "true", "cwd": "\0"},
        {"command": "true", "env": {"A=B": "c"}},
        {"command": "true", "env": {"": "c"}},
        {"command": 5},
    ]
    for arguments in wrong:
        call = client.call(key, **arguments)
        await client.ask(call)
        result = await client.result(call)
        assert (result.fault, result.error) == ("infra", "protocol")  # a client refuses them first
