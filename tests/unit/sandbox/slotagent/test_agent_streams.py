"""What runs print and read passes through the agent: in order, whole, and held up by nobody but the slot's own."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import struct
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from agentenv.sandbox.slotagent.protocol import ANSWERS, SCRIPT_PIPE, STDIN, Kind, input_inode, spawn_text
from tests.unit.sandbox.slotagent.agent_box import ENV, AgentBox, Run

ENLARGED_BYTES = 900_900
PRINT_MUCH = (
    f"import fcntl, os; fcntl.fcntl(1, 1031, 1 << 20); os.write(1, b'x' * {ENLARGED_BYTES});"  # 1031: F_SETPIPE_SZ
)
HOLD = """
import os, socket, time
mine, other = socket.socketpair()
os.write(1, b"held\\n")
soon = time.monotonic() + 0.5
while time.monotonic() < soon: pass
os.splice(mine.fileno(), 1, 4096)
"""
"""Holds the lock of its standard output's pipe for as long as nothing comes over a socket of its own. Does not sleep
before that."""


@pytest.fixture
def agent() -> Iterator[AgentBox]:
    with AgentBox() as box:
        yield box


def _answering(agent: AgentBox, code: str) -> tuple[Run, socket.socket]:
    """A Python program with its standard input and its answers (descriptor 9) over sockets; our ends are one."""
    (told, theirs), (heard, nine) = socket.socketpair(), socket.socketpair()
    agent._last_run += 1
    payload = spawn_text(["python3", "-c", code], ENV, "/")
    agent.send(Kind.SPAWN, agent._last_run, STDIN | ANSWERS, payload, (theirs.fileno(), nine.fileno()))
    for end in (theirs, nine):
        end.close()
    spawned = agent.expect(Kind.SPAWNED, run=agent._last_run)
    assert input_inode(spawned.payload) > 0
    for fd in spawned.fds:
        os.set_blocking(fd, True)
    run = Run(spawned.run, spawned.arg, (*spawned.fds, told.detach()))
    agent._runs.append(run)
    return run, heard


def _waiting_bytes(fd: int) -> int:
    found: int = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0]
    return found


def test_all_that_was_printed_is_there_before_the_end_is_told(agent: AgentBox) -> None:
    run = agent.spawn("python3", "-c", PRINT_MUCH)
    reader = run.fds[0]
    read = 0
    while not select.select([agent.socket], [], [], 0)[0]:
        if select.select([reader], [], [], 0.01)[0]:
            read += len(os.read(reader, 10_000))
    os.set_blocking(reader, False)
    while chunk := os.read(reader, 65_536):
        read += len(chunk)
    assert read == ENLARGED_BYTES
    assert agent.status(run) == 0


def test_an_end_is_not_told_while_nobody_reads_what_came_before_it(agent: AgentBox) -> None:
    run = agent.spawn("python3", "-c", PRINT_MUCH)
    agent.wait_until(lambda: not agent.lives(run.pid), "the program has ended")
    agent.send(Kind.PING, arg=1)
    agent.expect(Kind.PONG)
    assert not any(message.kind is Kind.EXIT for message in agent._pending if message.run == run.id)
    assert len(run.output()) == ENLARGED_BYTES
    assert agent.status(run) == 0


def test_who_closes_its_end_is_told_at_once(agent: AgentBox) -> None:
    run = agent.spawn("python3", "-c", PRINT_MUCH)
    os.close(run.fds[0])
    assert agent.status(run) == 0


def test_what_was_printed_before_an_answer_arrives_before_it(agent: AgentBox) -> None:
    code = PRINT_MUCH + "os.write(9, b'done'); os.read(0, 1)"
    run, heard = _answering(agent, code)
    agent.wait_until(lambda: _waiting_bytes(run.fds[0]) > 0, "the output has begun to come")
    before_s = agent.cpu_s()
    time.sleep(0.5)  # time for what must not come
    assert agent.cpu_s() - before_s < 0.2, "it waits, and does not ask again and again"
    with pytest.raises(BlockingIOError):
        heard.recv(10, socket.MSG_DONTWAIT)
    read = 0
    while read < ENLARGED_BYTES:
        read += len(os.read(run.fds[0], 65_536))
    heard.settimeout(30)
    assert heard.recv(10) == b"done"
    os.write(run.fds[2], b"x")
    assert agent.status(run) == 0
    assert heard.recv(10) == b""
    heard.close()


def test_outputs_arrive_in_the_order_in_which_they_were_printed(agent: AgentBox) -> None:
    """Of a run that lasts: what is ready first is taken first, though both are ready by the time the agent looks."""
    for number, (first, second) in enumerate(((1, 2), (2, 1)) * 5):
        go = agent.directory / f"go-{number}"
        waits = f"read -u 9; echo up; until [ -e {go} ]; do sleep 0.01; done"
        run = agent.bash(f"{waits}; echo a >&{first}; echo b >&{second}", flags=SCRIPT_PIPE)
        os.write(run.fds[2], b"\n")
        assert run.line() == "up"  # the agent looks at its outputs by now
        arrived = select.epoll()
        for fd in run.fds[:2]:
            arrived.register(fd, select.EPOLLIN)
        go.touch()
        assert agent.status(run) == 0
        assert [fd for fd, _ in arrived.poll(10)] == [run.fds[first - 1], run.fds[second - 1]]
        arrived.close()


def test_input_of_any_size_is_taken_as_it_is_read_and_ends(agent: AgentBox) -> None:
    run, heard = _answering(agent, "import sys; print(len(sys.stdin.buffer.read()))")
    heard.close()
    sent = 0
    while sent < 3_000_000:
        sent += os.write(run.fds[2], b"x" * 100_000)
    os.close(run.fds[2])
    assert run.output() == b"%d\n" % sent
    assert agent.status(run) == 0


def test_who_reads_no_more_is_told_as_soon_as_that_is_so(agent: AgentBox) -> None:
    run, heard = _answering(agent, "import os, time; os.close(0); print('closed', flush=True); time.sleep(1000)")
    heard.close()
    assert run.line() == "closed"

    def refused() -> bool:
        try:
            os.write(run.fds[2], b"x")
        except (BrokenPipeError, ConnectionResetError):
            return True
        return False

    agent.wait_until(refused, "the input is closed")
    agent.kill(run)


def test_what_is_printed_after_the_end_goes_nowhere_and_its_program_goes_on(agent: AgentBox) -> None:
    script = "(trap '' PIPE; for i in $(seq 2000); do printf '%04096d' 0 || exit; done; touch went-on) & echo over"
    agent.directory.chmod(0o777)
    run = agent.bash(script, cwd=str(agent.directory))
    assert b"over" in run.output()  # read first: it may come after more than the pipes hold
    assert agent.status(run) == 0
    agent.wait_until(lambda: (agent.directory / "went-on").exists(), "8 MB were printed")


def test_a_pipe_whose_lock_is_held_holds_up_the_agent_and_nobody_here() -> None:
    with AgentBox("bwrap") as agent:
        run = agent.bash(f"python3 -c '{HOLD}' & read -u 9; exit 3", flags=SCRIPT_PIPE)
        assert run.line() == "held"
        agent.wait_until(lambda: _holders(agent), "it holds the lock")
        os.write(run.fds[2], b"\n")
        os.set_blocking(run.fds[0], False)
        with pytest.raises(BlockingIOError):
            os.read(run.fds[0], 10)
        assert _waiting_bytes(run.fds[0]) == 0
        os.close(run.fds[0])
        agent.wait_until(lambda: _silent(agent), "the agent waits for the holder")
        for pid in _holders(agent):
            os.kill(pid, signal.SIGKILL)
        assert agent.expect(Kind.EXIT, run=run.id).arg >> 8 == 3


def _silent(agent: AgentBox) -> bool:
    agent.send(Kind.PING)
    if not select.select([agent.socket], [], [], 0.3)[0]:
        return True
    agent.expect(Kind.PONG)
    return False


def _holders(agent: AgentBox) -> list[int]:
    """The processes of the box that run HOLD, once they sleep in its splice."""
    found = []
    bwrap = agent.process.pid
    (init,) = Path(f"/proc/{bwrap}/task/{bwrap}/children").read_text().split()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            asleep = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] == "S"
            same = (entry / "ns/pid").readlink() == Path(f"/proc/{init}/ns/pid").readlink()
            if arguments[0] == b"python3" and HOLD.encode() in arguments and asleep and same:
                found.append(int(entry.name))
    return found
