"""What shares the agent's uid cannot hold it up, nor keep the end of a run from it."""

from __future__ import annotations

import errno
import os
import platform
import select
import subprocess
import time
from collections.abc import Iterator

import pytest

from agentenv.sandbox.slotagent.build import ensure_built
from agentenv.sandbox.slotagent.protocol import Kind, foreground_payload
from tests.unit.sandbox.slotagent.agent_box import WAIT_S, AgentBox, Run, Where, sanitized

PTRACE = """
import ctypes, os, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
TRACEME, SEIZE, EXIT = 0, 0x4206, 0x40
"""
SIGINT, SIGCONT, SIGWINCH = 2, 18, 28
EXIT_SYSTEM = 71


@pytest.fixture(params=["plain", "bwrap", "bwrap sanitized"])
def agent(request: pytest.FixtureRequest) -> Iterator[AgentBox]:
    name, _, build = str(request.param).partition(" ")
    where: Where = "bwrap" if name == "bwrap" else "plain"
    with AgentBox(where, binary=sanitized().agent if build else None) as box:
        yield box
        assert box.close() == 0
        assert box.stderr == b""


def _python(agent: AgentBox, script: str) -> Run:
    return agent.spawn("python3", "-c", PTRACE + script)


def test_a_run_that_makes_the_agent_its_tracer_goes_on_as_any_other(agent: AgentBox) -> None:
    run = _python(
        agent,
        "print(libc.ptrace(TRACEME, 0, None, None), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSTOP); print('went on', flush=True); sys.exit(7)\n",
    )
    assert run.line() == "0"
    agent.wait_until(lambda: agent.state(run.pid) == "T", "it is stopped, and not for a tracer")
    agent.send(Kind.SIGNAL, run.id, SIGCONT)
    assert run.line() == "went on"
    assert agent.status(run) == 7


def test_a_traced_run_that_executes_another_program_ends_as_that_does(agent: AgentBox) -> None:
    run = _python(agent, "libc.ptrace(TRACEME, 0, None, None); os.execvp('sh', ['sh', '-c', 'exit 5'])")
    assert agent.status(run) == 5


def test_a_traced_run_can_be_killed(agent: AgentBox) -> None:
    run = _python(agent, "libc.ptrace(TRACEME, 0, None, None); print(1, flush=True); time.sleep(1000)")
    run.line()
    assert agent.kill(run) == 1
    assert agent.status(run) == -9


SEIZED = "libc.ptrace(SEIZE, int(sys.argv[1]), None, int(sys.argv[2]))"
HOLDS = f"print({SEIZED}, flush=True)\nlibc.prctl(15, b'tracer')\nwhile True: time.sleep(1000)\n"


def test_a_tracer_cannot_keep_the_dead_from_the_agent(agent: AgentBox) -> None:
    victim = agent.bash("read -u 9; exit 3", flags=2)
    tracer = agent.spawn("python3", "-c", PTRACE + HOLDS, str(victim.pid), "0")
    assert tracer.line() == "0"
    os.write(victim.fds[2], b"\n")
    agent.wait_until(lambda: agent.state(victim.pid) == "Z", "it ended, and its tracer has it")
    agent.kill(victim)
    assert agent.status(victim) == 3
    assert agent.status(tracer) == -9


def test_nobody_is_held_at_its_exit(agent: AgentBox) -> None:
    """Two processes that hold each other there could not be killed."""
    victim = agent.bash("sleep 1000")
    seize = f"print({SEIZED}, ctypes.get_errno(), flush=True)\n"
    seized = f"libc.ptrace(SEIZE, {victim.pid}, None, 0)\n"
    options = f"print(libc.ptrace(0x4200, {victim.pid}, None, EXIT), ctypes.get_errno(), flush=True)\n"
    tracer = agent.spawn("python3", "-c", PTRACE + seize + seized + options, str(victim.pid), "64")
    assert (tracer.line(), tracer.line()) == ("-1 1", "-1 1")
    assert agent.status(tracer) == 0
    agent.kill(victim)
    assert agent.status(victim) == -9


def test_a_tracer_of_the_tracer_cannot_either(agent: AgentBox) -> None:
    victim = agent.bash("sleep 1000")
    first = agent.spawn("python3", "-c", PTRACE + HOLDS, str(victim.pid), "0")
    assert first.line() == "0"
    second = agent.spawn("python3", "-c", PTRACE + HOLDS, str(first.pid), "0")
    assert second.line() == "0"
    agent.kill(victim)
    assert agent.status(victim) == -9
    assert agent.status(first) == agent.status(second) == -9


def test_a_tracer_that_lets_go_lives_on(agent: AgentBox) -> None:
    victim = agent.bash("sleep 1000")
    script = f"print({SEIZED}, flush=True); print(os.waitpid(-1, 0)[1], flush=True); time.sleep(1000)"
    tracer = agent.spawn("python3", "-c", PTRACE + script, str(victim.pid), "0")
    assert tracer.line() == "0"
    agent.kill(victim)
    assert agent.status(victim) == -9
    assert tracer.line() == "9"
    assert agent.lives(tracer.pid)


STORM = """
import os, signal, sys
print(1, flush=True)
while True:
    try:
        os.kill(-1, signal.SIGSTOP)
    except ProcessLookupError:  # nobody else is there
        pass
    if sys.argv[1:] and os.fork():
        os._exit(0)
"""


def _serves_others(agent: AgentBox) -> None:
    runs = [agent.spawn("true") for _ in range(20)]
    agent.send(Kind.PING, arg=1)
    assert agent.expect(Kind.PONG).arg == 1
    for run in runs:
        agent.kill(run)
        assert agent.status(run) in (0, -9)


def test_stopping_everybody_from_ever_new_processes_does_not_stop_the_agent() -> None:
    with AgentBox("bwrap") as agent:
        storm = agent.spawn("python3", "-c", STORM, "forks")
        storm.line()
        _serves_others(agent)
        agent.kill(storm)
        assert agent.status(storm) in (0, -9)  # 0 unless its child stopped it before it could end


@pytest.mark.parametrize("build", ["", "sanitized"])
def test_stopping_everybody_again_and_again_does_not_stop_the_agent(build: str) -> None:
    with AgentBox("bwrap", binary=sanitized().agent if build else None) as agent:
        storm = agent.spawn("python3", "-c", STORM)
        storm.line()
        _serves_others(agent)
        agent.kill(storm)
        assert agent.status(storm) == -9
        assert agent.run("echo whole") == "whole\n"


# ---- what the kernel would allow by uid alone ----


@pytest.mark.parametrize(
    "attempt",
    [
        "renice -n 19 -p 1",
        'renice -n 19 -u "$(id -u)"',
        "taskset -p 1 1",
        "chrt --idle -p 0 1",
        "ionice -c 3 -p 1",
        "prlimit --pid 1 --cpu=1",
        "unshare -U true",
        "dmesg",
    ],
)
def test_the_agent_and_the_machine_are_out_of_reach(attempt: str) -> None:
    with AgentBox("bwrap") as agent:
        run = agent.bash(f"{attempt} 2>&1")
        output = run.output().decode()
        assert agent.status(run) != 0
        assert "not permitted" in output


@pytest.mark.parametrize(
    "attempt",
    [
        'sleep 9 & renice -n 5 -p $!; kill $!; [ "$(nice -n 3 nice)" = 3 ]',
        "sleep 9 & taskset -p 1 $!; kill $!; taskset 1 true",
        "sleep 9 & chrt --batch -p 0 $!",
        "ionice -c 3 true; sleep 9 & ionice -c 2 -n 7 -p $!",
        "unshare --help; ulimit -n 10; prlimit",
        "python3 -c 'import threading; t = threading.Thread(target=print); t.start(); t.join()'",
    ],
)
def test_what_programs_do_to_themselves_they_may(attempt: str) -> None:
    with AgentBox("bwrap") as agent:
        agent.run(f"set -e; {attempt}")


def test_every_call_of_the_table_is_refused() -> None:
    with AgentBox("bwrap") as agent:
        said = agent.run(f"{agent.directory}/slotagent prove").splitlines()
    assert [line for line in said if line.startswith("allowed")] == []
    assert int(said[-1].removeprefix("refused ")) > 60
    unguarded = subprocess.run(
        [ensure_built().agent, "prove"], capture_output=True, text=True, check=True, timeout=WAIT_S
    )
    assert {"allowed keyctl", "allowed io_setup"} <= {*unguarded.stdout.splitlines()}, "the proof must be able to fail"


if platform.machine() == "x86_64":
    I386 = {"getpid": 20, "add_key": 286, "bpf": 357, "io_setup": 245, "socketcall": 102, "keyctl": 288}

    @pytest.mark.parametrize("name", I386)
    def test_there_are_no_calls_of_i386(name: str) -> None:
        source = (
            "#include <stdio.h>\n"
            'int main(void) { long r; __asm__ volatile("int $0x80" : "=a"(r) '
            f': "a"({I386[name]}L), "b"(1L), "c"(0L), "d"(0L) : "r8", "r9", "r10", "r11", "memory");\n'
            ' printf("%d\\n", (int)-r); }\n'
        )
        with AgentBox("bwrap") as agent:
            run = agent.bash(str(agent.compiled(source)))
            assert run.output().decode() in (f"{errno.ENOSYS}\n", ""), "nothing is printed by a kernel without i386"


def test_without_its_filter_the_agent_does_not_start() -> None:
    """As where the machine has no memory left for the machine code of filters: here, a slot may have no further one."""
    script = (
        "import socket, subprocess, sys; ours, its = socket.socketpair(type=socket.SOCK_SEQPACKET);"
        "print(subprocess.run([sys.argv[1], str(its.fileno())], pass_fds=[its.fileno()]).returncode)"
    )
    with AgentBox("bwrap") as agent:
        run = agent.spawn("python3", "-c", script, f"{agent.directory}/slotagent")
        assert run.output() == f"{EXIT_SYSTEM}\n".encode()


# ---- the foreground of a shell ----

BACKGROUND = {
    "simple": "sleep 1000 &",
    "list": "true && python3 -c 'import time; time.sleep(1000)' &",
    "replaced": "(exec sleep 1000) &",
    "group": "{ sleep 1000; :; } &",
    "orphan": "(sleep 1000 & sleep 1000 &);",
    "tree": "bash -c 'sleep 1000 & sleep 1000; :' &",
}


def _sleepers(agent: AgentBox) -> int:
    arguments = r"100[0]|import time; time.slee[p]\(1000\)"
    return int(agent.run(f"grep -lzxE '{arguments}' /proc/[0-9]*/cmdline 2>/dev/null | wc -l"))


@pytest.mark.parametrize("form", BACKGROUND)
@pytest.mark.parametrize("foreground", ["sleep 77", "sleep 77 | cat", "(sleep 77; :) | cat", "sh -c 'sleep 77; :'"])
def test_an_interrupt_is_for_the_foreground(form: str, foreground: str) -> None:
    with AgentBox("bwrap") as agent:
        script = f"trap : INT; {BACKGROUND[form]} echo up; read -u 9; {foreground}; echo over; sleep 1000"
        shell = agent.bash(script, flags=2)
        assert shell.line() == "up"
        count = 2 if form in ("orphan", "tree") else 1
        agent.wait_until(lambda: _sleepers(agent) >= count, "the background is up")
        before = _sleepers(agent)
        time.sleep(0.03)  # start times are in ticks of 10 ms
        began_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        os.write(shell.fds[2], b"\n")
        agent.wait_until(lambda: agent.run("grep -lzx '7[7]' /proc/[0-9]*/cmdline || :"), "begun")
        agent.send(Kind.SIGNAL, shell.id, SIGINT, foreground_payload(began_s))
        assert shell.line() == "over"
        agent.wait_until(lambda: _sleepers(agent) == before + 1, "the shell went on, and nothing of before is gone")
        agent.kill(shell)
        assert agent.status(shell) == -9


@pytest.mark.parametrize("form", ["simple", "list", "group", "tree"])
def test_what_the_same_line_has_put_into_the_background_is_spared(form: str) -> None:
    with AgentBox("bwrap") as agent:
        began_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        shell = agent.bash(f"trap : INT; {BACKGROUND[form]} sleep 77; echo over; sleep 1000")
        count = 2 if form == "tree" else 1
        agent.wait_until(lambda: _sleepers(agent) >= count, "the background is up")
        agent.wait_until(lambda: agent.run("grep -lzx '7[7]' /proc/[0-9]*/cmdline || :"), "begun")
        before = _sleepers(agent)
        agent.send(Kind.SIGNAL, shell.id, SIGINT, foreground_payload(began_s))
        assert shell.line() == "over"
        agent.wait_until(lambda: _sleepers(agent) == before + 1, "the shell went on, the background is there")
        agent.kill(shell)
        agent.status(shell)


FORKS = """
import mmap, os
memory = mmap.mmap(-1, 1 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
memory[0] = 1
memory[::mmap.PAGESIZE]  # no memory, but a table of pages, which a fork takes milliseconds to copy
while True:
    print("next", flush=True)
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
"""


def _forks_again(run: Run) -> None:
    assert select.select([run.fds[0]], [], [], WAIT_S)[0], "the child is stopped"
    assert run.line() == "next"


def test_a_child_that_is_being_forked_during_an_interrupt_goes_on() -> None:
    with AgentBox("bwrap") as agent:
        run = agent.bash(f"sleep 1000 & exec python3 -c '{FORKS}'")
        _forks_again(run)
        began = foreground_payload(time.clock_gettime(time.CLOCK_BOOTTIME))
        for _ in range(50):
            agent.send(Kind.SIGNAL, run.id, SIGWINCH, began)
            _forks_again(run)
        agent.kill(run)
        agent.status(run)


def test_a_child_that_is_being_forked_while_the_slot_is_frozen_goes_on() -> None:
    with AgentBox("bwrap", binary=sanitized().agent) as agent:
        run = agent.spawn("python3", "-c", FORKS)
        for _ in range(50):
            other = agent.spawn("sleep", "1000")
            _forks_again(run)
            agent.kill(other)
            agent.status(other)
        agent.kill(run)
        agent.status(run)


def test_what_was_stopped_before_the_slot_was_frozen_stays_so() -> None:
    with AgentBox("bwrap", binary=sanitized().agent) as agent:
        stopped = agent.bash("kill -STOP $$; echo on; sleep 1000")
        agent.wait_until(lambda: agent.state(stopped.pid) == "T", "it has stopped itself")
        for _ in range(5):
            other = agent.spawn("sleep", "1000")
            agent.kill(other)
            agent.status(other)
        agent.wait_until(lambda: agent.state(stopped.pid) == "T", "as it wished")
        agent.run(f"kill -CONT {stopped.pid}")
        assert stopped.line() == "on"
        agent.kill(stopped)
        agent.status(stopped)
