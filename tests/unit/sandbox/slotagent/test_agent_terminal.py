"""Terminals of the slot's own, and what a server that came back after a crash has killed."""

from __future__ import annotations

import errno
import os
import select
import signal
from collections.abc import Iterator

import pytest

from agentenv.sandbox.slotagent.protocol import SCRIPT_PIPE, TERMINAL, Kind, spawn_text
from tests.unit.sandbox.slotagent.agent_box import ENV, WAIT_S, AgentBox, Run, Where, sanitized


@pytest.fixture(params=["plain", "bwrap", "sanitized"])
def agent(request: pytest.FixtureRequest) -> Iterator[AgentBox]:
    where: Where = "bwrap" if request.param == "bwrap" else "plain"
    with AgentBox(where, binary=sanitized().agent if request.param == "sanitized" else None) as box:
        yield box


def shown(run: Run, text: bytes = b"") -> bytes:
    """What is on the terminal: until ``text`` is, or until everybody has closed it."""
    seen = b""
    while not text or text not in seen:
        assert select.select([run.fds[0]], [], [], WAIT_S)[0], seen
        try:
            chunk = os.read(run.fds[0], 65_536)
        except OSError:  # EIO
            return seen
        seen += chunk
    return seen


def test_the_child_leads_a_session_on_a_terminal_of_its_own(agent: AgentBox) -> None:
    script = "tty; [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo all; cd /proc/$$/fd; echo [0-9]*"
    run = agent.bash(script, flags=TERMINAL)
    assert len(run.fds) == 1
    seen = shown(run)
    assert seen.startswith(b"/dev/pts/")
    assert seen.replace(b" 3", b"").endswith(b"all\r\n0 1 2\r\n")
    assert agent.status(run) == 0


def test_keys_of_the_terminal_reach_its_foreground(agent: AgentBox) -> None:
    run = agent.bash("echo ready; read line; echo got $line; sleep 60", flags=TERMINAL)
    shown(run, b"ready")
    os.write(run.fds[0], b"word\n")
    shown(run, b"got word")
    os.write(run.fds[0], b"\x03")
    assert agent.status(run) == -signal.SIGINT


def test_stdin_may_be_something_else(agent: AgentBox) -> None:
    read, write = os.pipe()
    os.write(write, b"piped\n")
    run = agent.bash(
        "[ -t 0 ] || echo no; cat; tty </dev/tty >/dev/null && echo controlled", flags=TERMINAL, stdin=read
    )
    os.close(read)
    os.close(write)
    assert shown(run) == b"no\r\npiped\r\ncontrolled\r\n"
    assert agent.status(run) == 0


def test_terminals_come_and_go_without_a_trace(agent: AgentBox) -> None:
    for _ in range(100):  # more than the agent may have open
        run = agent.bash("exit 4", flags=TERMINAL)
        assert agent.status(run) == 4
        os.close(run.fds[0])
    assert agent.fail("no-such-program", flags=TERMINAL)[0] == errno.ENOENT


def test_a_terminal_and_a_script_pipe_are_malformed() -> None:
    box = AgentBox().__enter__()  # not `with`: that wants a clean end
    try:
        box.send(Kind.SPAWN, 1, TERMINAL | SCRIPT_PIPE, spawn_text(["true"], ENV, "/"))
        assert box.process.wait(WAIT_S) == 65
    finally:
        box.close()


def test_what_ran_before_is_killed_and_the_rest_is_not(agent: AgentBox) -> None:
    old = [agent.bash("sleep 60 & sleep 60") for _ in range(3)]
    young = agent.bash("read -u 9; exit 7", flags=SCRIPT_PIPE)
    agent.send(Kind.KILL_BEFORE, young.id)
    assert agent.expect(Kind.KILLED, run=young.id).arg >= len(old)
    assert [agent.status(run) for run in old] == [-signal.SIGKILL] * 3
    os.write(young.fds[2], b"\n")
    assert agent.status(young) == 7
