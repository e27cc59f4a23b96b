"""The command over real containers: output, refusals, and what is left after any ending (nothing)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

DEADLINE_S = 30.0
ISOLATION = ("--isolation", "full" if os.geteuid() == 0 else "user")
"""An ordinary user has to ask for less by name (the commands refuse otherwise)."""


class Machine:
    """Runs the command with a state directory of its own."""

    def __init__(self, state: Path) -> None:
        self.state = state

    async def start(self, *arguments: str, stdin: int = asyncio.subprocess.DEVNULL) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from agentenv.cli import main; main()", *arguments,
            stdin=stdin, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
            env={**os.environ, "AGENTENV_STATE_DIR": str(self.state)},
        )  # fmt: skip

    async def run(self, *arguments: str, stdin: bytes | None = None) -> tuple[int | None, str, str]:
        kind = asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE
        process = await self.start(*arguments, stdin=kind)
        stdout, stderr = await asyncio.wait_for(process.communicate(stdin), DEADLINE_S)
        return process.returncode, stdout.decode(errors="replace"), stderr.decode(errors="replace")

    def processes(self) -> list[str]:
        """Command lines that name our state directory (the container's do: its spec file lies there)."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and entry.name != str(os.getpid()):
                with suppress(OSError):
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if str(self.state) in line:
                        found.append(line)
        return found

    def containers(self) -> list[str]:
        directory = self.state / "containers"
        return sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []

    async def until_a_command_runs(self, process: asyncio.subprocess.Process, marker: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while process.returncode is None and not _running(marker):
                await asyncio.sleep(0.02)
        assert process.returncode is None, await process.communicate()

    async def until_nothing_is_left(self, marker: str) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                while self.processes() or _running(marker):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pytest.fail(f"left behind: {self.processes()} {_running(marker)}")


def _running(marker: str) -> list[str]:
    """Processes whose whole command line is ``sleep <marker>``."""
    wanted = f"sleep\0{marker}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if (entry / "cmdline").read_bytes() == wanted:
                    found.append(entry.name)
    return found


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path / "state")
    yield machine
    assert machine.processes() == []


async def test_exec_runs_in_a_slot_not_here(machine: Machine) -> None:
    code, stdout, stderr = await machine.run("exec", *ISOLATION, "id -u; pwd; ls -A; echo err >&2; exit 7")
    uid, *rest = stdout.splitlines()
    assert int(uid) != 0
    assert (rest, stderr, code) == (["/workspace"], "err\n", 7)


async def test_doctor_starts_a_real_slot_and_shows_its_proofs(machine: Machine) -> None:
    code, stdout, _ = await machine.run("doctor", "--json")
    told = json.loads(stdout)
    assert code in (0, 1)
    assert next(f for f in told["findings"] if f["name"] == "a real slot")["level"] != "broken"
    assert {proof["name"] for proof in told["proofs"] if not proof["holds"] and proof["required"]} == set()
    assert len(told["proofs"]) >= 10


async def test_shell_keeps_where_it_is(machine: Machine) -> None:
    code, stdout, stderr = await machine.run(
        "shell", *ISOLATION, stdin=b"cd /tmp\nexport A='x  y'\npwd; echo \"$A\"\n(exit 4)\n"
    )
    assert (stdout, code) == ("/tmp\nx  y\n", 4)
    assert "A new slot" in stderr


async def test_shell_writes_a_result_for_each_line(machine: Machine) -> None:
    code, stdout, stderr = await machine.run("shell", *ISOLATION, "--json", stdin=b"echo one; cd /tmp\npwd; (exit 3)\n")
    told = [json.loads(line) for line in stdout.splitlines()]
    assert [(result["stdout"], result["exit_code"]) for result in told] == [("one\n", 0), ("/tmp\n", 3)]
    assert (code, stderr) == (3, "")


async def test_upload_and_binary_output_pass_through(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "a b.txt").write_text("content")
    code, stdout, _ = await machine.run(
        "exec", *ISOLATION, "--upload", str(tmp_path / "up"), "cat 'up/a b.txt'; printf '\\377'"
    )
    assert (code, stdout) == (0, "content\ufffd")


async def test_an_unwritable_state_directory_is_a_message(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    machine.state = tmp_path / "file" / "below"
    code, stdout, stderr = await machine.run("exec", *ISOLATION, "true")
    assert (code, stdout) == (125, "")
    assert "Traceback" not in stderr
    assert "AGENTENV_STATE_DIR" in stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
async def test_however_exec_ends_nothing_is_left(machine: Machine, number: signal.Signals) -> None:
    marker = f"7{os.getpid()}.{int(number)}"
    process = await machine.start("exec", *ISOLATION, "--", "sleep", marker)
    await machine.until_a_command_runs(process, marker)
    process.send_signal(number)
    await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    await machine.until_nothing_is_left(marker)
    if number == signal.SIGKILL:  # what a killed parent could not remove, the sweep does
        code, _, _ = await machine.run("gc")
        assert code == 0
    assert machine.containers() == []
    assert list(machine.state.glob("launch-*")) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_however_shell_ends_nothing_is_left(machine: Machine, number: signal.Signals) -> None:
    marker = f"8{os.getpid()}.{int(number)}"
    process = await machine.start("shell", *ISOLATION, "--quiet", stdin=asyncio.subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(f"sleep {marker}\n".encode())
    await process.stdin.drain()
    await machine.until_a_command_runs(process, marker)
    process.send_signal(number)
    await asyncio.wait_for(process.communicate(), DEADLINE_S)
    await machine.until_nothing_is_left(marker)


async def test_ctrl_c_ends_the_line_and_not_the_shell(machine: Machine) -> None:
    marker = f"9{os.getpid()}"
    process = await machine.start("shell", *ISOLATION, "--quiet", stdin=asyncio.subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(f"touch here; sleep {marker}\n".encode())
    await process.stdin.drain()
    await machine.until_a_command_runs(process, marker)
    process.send_signal(signal.SIGINT)
    stdout, stderr = await asyncio.wait_for(process.communicate(b"ls; pwd\n"), DEADLINE_S)
    assert (stdout, process.returncode) == (b"here\n/workspace\n", 0), stderr
    await machine.until_nothing_is_left(marker)
