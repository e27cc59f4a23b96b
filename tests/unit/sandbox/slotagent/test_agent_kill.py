"""What belongs to a run dies with it at KILL, however it hides; what does not, lives on unharmed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from agentenv.sandbox.slotagent.protocol import SCRIPT_PIPE, Kind
from tests.unit.sandbox.slotagent.agent_box import AgentBox, Run, Where, sanitized

DAEMONISE = "setsid sleep 1000 >/dev/null 2>&1 </dev/null & echo $!; "
DAEMONISE_TWICE = "(setsid bash -c 'sleep 1000 & echo $!; wait' & ) | head -n1; "
DETACH = "(sleep 1000 >/dev/null 2>&1 & echo $!); "


@pytest.fixture(params=["plain", "bwrap", "bwrap sanitized"])
def agent(request: pytest.FixtureRequest) -> Iterator[AgentBox]:
    """The sanitized build also freezes the slot at each kill that finds anything."""
    name, _, build = str(request.param).partition(" ")
    where: Where = "bwrap" if name == "bwrap" else "plain"
    with AgentBox(where, binary=sanitized().agent if build else None) as box:
        yield box
        assert box.close() == 0
        assert box.stderr == b""


def _gone(agent: AgentBox, *pids: int) -> None:
    for pid in pids:
        agent.wait_until(lambda pid=pid: agent.state(pid) in ("", "Z"), f"{pid} is dead")


def _next_tick() -> None:
    """Start times are in ticks of 10 ms: what must be told apart by time must be that far apart."""
    time.sleep(0.03)


def test_a_plain_tree_is_killed(agent: AgentBox) -> None:
    run = agent.bash("sleep 1000 & (sleep 1000; :) & bash -c 'sleep 1000; :' & echo $!; wait")
    child = int(run.line())
    assert agent.kill(run) >= 4
    assert agent.status(run) == -9
    _gone(agent, child)


@pytest.mark.parametrize("hide", [DAEMONISE, DETACH, DAEMONISE_TWICE])
def test_what_hides_is_killed_with_its_run(agent: AgentBox, hide: str) -> None:
    run = agent.bash(hide + "sleep 1000")
    hidden = int(run.line())
    assert agent.kill(run) >= 2
    assert agent.status(run) == -9
    _gone(agent, hidden)


@pytest.mark.parametrize("hide", [DAEMONISE, DETACH, DAEMONISE_TWICE])
def test_what_an_earlier_run_left_lives_on(agent: AgentBox, hide: str) -> None:
    first = agent.bash(hide)
    earlier = int(first.line())
    assert agent.status(first) == 0
    _next_tick()
    second = agent.bash(hide + "sleep 1000")
    later = int(second.line())
    agent.kill(second)
    assert agent.status(second) == -9
    _gone(agent, later)
    assert agent.lives(earlier)


@pytest.mark.parametrize("hide", [DAEMONISE, DETACH])
def test_what_another_run_left_while_a_spare_shell_waited_lives_on(agent: AgentBox, hide: str) -> None:
    spare = agent.bash(f"read -u 9; {hide} sleep 1000", flags=SCRIPT_PIPE)
    _next_tick()
    between = agent.bash(hide)
    left = int(between.line())
    assert agent.status(between) == 0
    _next_tick()
    os.write(spare.fds[2], b"\n")
    own = int(spare.line())
    agent.kill(spare)
    assert agent.status(spare) == -9
    _gone(agent, own)
    assert agent.lives(left)


def test_runs_side_by_side_are_not_each_others(agent: AgentBox) -> None:
    session = agent.bash("read -u 9; echo session")
    younger = agent.bash(DAEMONISE + "sleep 1000", flags=0)
    daemon = int(younger.line())
    other = agent.bash("sleep 1000")
    agent.kill(other)
    assert agent.status(other) == -9
    assert agent.lives(younger.pid)
    assert agent.lives(daemon)
    agent.kill(younger)
    _gone(agent, daemon)
    assert session.output() == b"session\n"


def test_stopped_and_renamed_processes_are_killed(agent: AgentBox) -> None:
    odd = agent.directory / "a) Z 1 1 1"
    odd.symlink_to("/bin/sleep")
    run = agent.bash(f"'{odd}' 1000 & kill -STOP $!; echo $!; wait")
    pid = int(run.line())
    assert agent.kill(run) == 2
    _gone(agent, pid)


def test_a_process_whose_first_thread_ended_is_killed(agent: AgentBox) -> None:
    """It looks like a zombie, while its other thread lives."""
    script = (
        "import ctypes, os, threading, time\n"
        "threading.Thread(target=lambda: (print(os.getpid(), flush=True), time.sleep(1000))).start()\n"
        "ctypes.CDLL(None).syscall(60, 0)\n"
    )
    run = agent.bash(f"sleep 1000 & setsid /usr/bin/env python3 -c '{script}' & wait")
    pid = int(run.line())
    agent.wait_until(lambda: agent.state(pid) == "Z", "the first thread has ended")
    assert agent.kill(run) >= 3
    agent.wait_until(lambda: agent.state(pid) == "", "gone")


def test_killing_what_has_ended_or_never_was_kills_nothing(agent: AgentBox) -> None:
    run = agent.bash("true")
    assert agent.status(run) == 0
    assert agent.kill(run) == 0
    assert agent.kill(Run(4_000_000_000, 0, ())) == 0


def test_kill_all_leaves_nobody(agent: AgentBox) -> None:
    earlier = agent.bash(DAEMONISE)
    daemon = int(earlier.line())
    agent.status(earlier)
    run = agent.bash("sleep 1000 & echo ready; sleep 1000")
    assert run.line() == "ready"
    assert agent.kill_all() == 3
    assert agent.status(run) == -9
    _gone(agent, daemon)
    agent.wait_until(lambda: not agent.others(), "what was killed is dead")
    assert agent.kill_all() == 0


BOMBS = {
    "classic": ("b() { b | b & }; b; b; sleep 1000", 20),
    "chain": ("f() { (f) & }; f; sleep 1000", 2),
    "sessions": ("bash bomb; sleep 1000", 20),
    "hydra": ("for i in {1..300}; do sleep 1000 & done; wait", 20),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_fork_bomb_is_killed_quickly_and_alone(agent: AgentBox, bomb: str) -> None:
    script, at_least = BOMBS[bomb]
    (agent.directory / "bomb").write_text("setsid bash $0 & setsid bash $0 &")
    bystander = agent.bash(DAEMONISE)
    bystander_pid = int(bystander.line())
    assert agent.status(bystander) == 0
    _next_tick()
    for grow_s in (0.3, 2, 8):  # a busy machine takes its time
        run = agent.bash(f"exec 2>/dev/null; cd {agent.directory}; echo lit; {script}")
        assert run.line() == "lit"
        time.sleep(grow_s)
        before_s = agent.cpu_s()
        killed = agent.kill(run)
        assert agent.cpu_s() - before_s < 5
        assert agent.status(run) == -9
        if killed >= at_least:
            break
    assert killed >= at_least
    agent.wait_until(lambda: not agent.zombies(), "the dead are reaped")
    assert agent.lives(bystander_pid), "neither killed nor left stopped"
    agent.wait_until(lambda: len(agent.others()) <= 1, "what was killed is dead")
    assert agent.kill_all() == 1, "the bystander was the only one left"


QUICK_CHAIN = """
#include <unistd.h>
int main(void) {
    for (;;) {
        if (fork() > 0)
            _exit(0);
        setsid();
    }
}
"""


def test_a_chain_that_is_quicker_than_a_scan_is_killed(agent: AgentBox) -> None:
    """Each of its processes lives for less time than a scan takes, in a session and a group of its own."""
    program = agent.compiled(QUICK_CHAIN)
    for _ in range(20):
        run = agent.bash(f"{program}; echo lit; sleep 1000")
        assert run.line() == "lit"
        time.sleep(0.05)
        assert agent.kill(run) >= 1
        assert agent.status(run) == -9
        agent.wait_until(lambda: not agent.others(), "what was killed is dead")
        assert agent.kill_all() == 0, "the chain was killed with its run"


def test_a_kill_in_the_middle_of_many_messages_is_answered(agent: AgentBox) -> None:
    runs = [agent.bash("sleep 1000") for _ in range(30)]
    for run in runs:
        agent.send(Kind.KILL, run.id)
    for run in runs:
        agent.expect(Kind.KILLED, run=run.id)
        assert agent.status(run) == -9


TRACED = """
import ctypes, time
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1))  # PR_SET_PTRACER_ANY
print("ready", flush=True)
time.sleep(1000)
"""
TRACER = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
assert libc.ptrace(0x4206, int(sys.argv[1]), 0, 0) == 0, ctypes.get_errno()  # PTRACE_SEIZE
print("seized", flush=True)
print(sys.stdin.readline())
"""


def test_where_it_is_not_init_it_kills_no_tracer_from_outside() -> None:
    """A debugger that somebody has attached to a process of the slot's holds up its end, and is not the slot's."""
    with AgentBox("plain", uid=os.geteuid()) as box:  # as the user whose debugger it is
        run = box.spawn("python3", "-c", TRACED)
        assert run.line() == "ready"
        argv = [sys.executable, "-c", TRACER, str(run.pid)]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tracer:
            assert tracer.stdout is not None
            assert tracer.stdout.readline() == "seized\n"
            assert box.kill(run) == 1
            assert "alive" in tracer.communicate("alive\n")[0]
        assert box.status(run) == -signal.SIGKILL
