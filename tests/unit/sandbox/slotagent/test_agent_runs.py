"""Spawning through the real agent: descriptors, environment, statuses, failures, bounds."""

from __future__ import annotations

import errno
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.sandbox.slotagent.protocol import PROGRAM, SCRIPT_PIPE, Kind, Message, SpawnStep, exit_usage
from tests.unit.sandbox.slotagent.agent_box import ENV, UID, WAIT_S, AgentBox, Limits, Where


@pytest.fixture(params=["plain", "bwrap"])
def where(request: pytest.FixtureRequest) -> Where:
    place: Where = request.param
    return place


@pytest.fixture
def agent(where: Where) -> Iterator[AgentBox]:
    with AgentBox(where) as box:
        yield box


def test_ping_is_answered(agent: AgentBox) -> None:
    agent.send(Kind.PING, arg=-12345)
    assert agent.expect(Kind.PONG) == Message(Kind.PONG, arg=-12345)


def test_output_status_and_usage(agent: AgentBox) -> None:
    run = agent.bash("echo out; echo err >&2; for i in {1..20000}; do :; done; exit 3")
    assert (run.output(0), run.output(1)) == (b"out\n", b"err\n")
    ended = agent.expect(Kind.EXIT, run=run.id)
    assert os.waitstatus_to_exitcode(ended.arg) == 3
    usage = exit_usage(ended.payload)
    assert 0 < usage.user_s + usage.system_s < 20
    assert 2**20 < usage.max_rss_bytes < 2**28


def test_what_the_agent_hands_over_are_sockets(agent: AgentBox) -> None:
    run = agent.bash("read -u 9", flags=SCRIPT_PIPE)
    assert len(run.fds) == 3
    assert all(stat.S_ISSOCK(os.fstat(fd).st_mode) for fd in run.fds)
    os.write(run.fds[2], b"\n")
    assert agent.status(run) == 0


@pytest.mark.parametrize(("flags", "expected"), [(0, "0 1 2"), (SCRIPT_PIPE, "0 1 2 9")])
def test_the_child_has_its_descriptors_and_no_others(agent: AgentBox, flags: int, expected: str) -> None:
    """Beside 3, which the shell reads the directory with."""
    assert agent.run("cd /proc/$$/fd; echo [0-9]*", flags=flags).replace(" 3", "").strip() == expected
    if flags:
        held = agent.bash("readlink /proc/self/fd/9", flags=flags)
        assert held.output().startswith(b"pipe:")
        agent.status(held)


def test_a_script_descriptor_becomes_number_9(agent: AgentBox) -> None:
    """Whatever number it has in the agent: several at once make it land on 9 itself, too."""
    for number in range(12):
        script = os.memfd_create("script")
        os.write(script, f"number {number}".encode())
        os.lseek(script, 0, os.SEEK_SET)
        source, sink = os.pipe()
        os.write(sink, b"stdin")
        os.close(sink)
        assert agent.run("cat <&9; cat", script_fd=script, stdin=source) == f"number {number}stdin"
        os.close(script)
        os.close(source)
        agent.bash("read -u 9", flags=SCRIPT_PIPE)  # stays, and with it its streams
    agent.kill_all()


def test_stdin_is_empty_unless_given(agent: AgentBox) -> None:
    assert agent.run("readlink /proc/self/fd/0; cat") == "/dev/null\n"


def test_environment_arguments_and_directory_are_exact(agent: AgentBox) -> None:
    run = agent.spawn("env", env={"PATH": "/usr/bin:/bin", "EMPTY": "", "ODD": "a=b\n\udcff"}, cwd="/usr")
    assert sorted(run.output().split(b"\n")) == sorted(b"PATH=/usr/bin:/bin\nEMPTY=\nODD=a=b\n\xff\n".split(b"\n"))
    run = agent.spawn("printf", "%s|", "", "a b", "\udcff", "x" * 60_000)
    assert run.output() == b"|a b|\xff|" + b"x" * 60_000 + b"|"
    assert agent.run("pwd", cwd="/usr/lib") == "/usr/lib\n"
    assert agent.spawn("/usr/bin/env", env={}).output() == b""


def test_a_program_may_differ_from_its_name(agent: AgentBox) -> None:
    run = agent.spawn("/usr/bin/bash", "sh", "-c", "echo $0 $1", "name", "one", flags=PROGRAM)
    assert run.output() == b"name one\n"
    assert agent.spawn("readlink", "x", "/proc/self/exe", flags=PROGRAM).output() == b"/usr/bin/readlink\n"
    assert agent.fail("/nowhere/bash", "bash", flags=PROGRAM) == (errno.ENOENT, SpawnStep.EXEC)


def test_every_run_leads_a_session_of_its_own(agent: AgentBox) -> None:
    stat_line = agent.spawn("cat", "/proc/self/stat")
    fields = stat_line.output().decode().rsplit(")", 1)[1].split()
    assert fields[2:4] == [str(stat_line.pid)] * 2


def test_signals_are_as_new_whatever_the_agents_parent_did(agent: AgentBox) -> None:
    shown = agent.spawn("grep", "-E", "Sig(Blk|Ign)", "/proc/self/status").output().split()
    assert shown == [b"SigBlk:", b"0" * 16, b"SigIgn:", b"0" * 16]


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("exit 0", 0),
        ("exit 255", 255),
        ("kill -9 $$", -9),
        ("kill -SEGV $$", -11),
        ("exec true", 0),
        ("kill -TERM $$", -15),
    ],
)
def test_statuses(agent: AgentBox, script: str, status: int) -> None:
    assert agent.status(agent.bash(script)) == status


def test_a_signal_reaches_the_group(agent: AgentBox) -> None:
    run = agent.bash("trap 'echo got; exit 7' USR1; sleep 1000 & echo ready; wait")
    assert run.line() == "ready"
    agent.send(Kind.SIGNAL, run.id, signal.SIGUSR1)
    assert agent.status(run) == 7
    agent.send(Kind.SIGNAL, run.id, signal.SIGUSR1)  # ended: nothing happens
    assert agent.run("echo on") == "on\n"


def test_an_exit_does_not_wait_for_background_processes(agent: AgentBox) -> None:
    run = agent.bash("sleep 1000 & echo $!")
    assert agent.status(run) == 0
    child = int(run.line())
    assert agent.lives(child)


def test_orphans_are_reaped(agent: AgentBox) -> None:
    for _ in range(5):
        agent.run("for i in {1..20}; do (setsid true & ) ; done")
    agent.wait_until(lambda: not agent.zombies(), "no zombies")


def test_runs_do_not_get_mixed_up(agent: AgentBox) -> None:
    runs = [agent.bash(f"read -u 9; echo {number}; exit {number}", flags=SCRIPT_PIPE) for number in range(50)]
    for run in reversed(runs):
        os.write(run.fds[2], b"\n")
    for number, run in enumerate(runs):
        assert agent.status(run) == number
        assert run.output() == f"{number}\n".encode()


# ---- failures ----


def test_what_cannot_be_executed_is_told_with_its_errno(agent: AgentBox) -> None:
    (agent.directory / "text").write_text("no program")
    (agent.directory / "text").chmod(0o755)
    (agent.directory / "plain").write_text("")
    (agent.directory / "locked").mkdir(mode=0o000)
    top = str(agent.directory)
    path = {"PATH": f"/nonexistent:{top}:/etc/passwd"}
    assert agent.fail("nosuchprogram") == (errno.ENOENT, SpawnStep.EXEC)
    assert agent.fail("plain", env=path) == (errno.EACCES, SpawnStep.EXEC)
    assert agent.fail("text", env=path) == (errno.ENOEXEC, SpawnStep.EXEC)
    assert agent.fail("true", env={"PATH": ""}) == (errno.ENOENT, SpawnStep.EXEC)
    assert agent.fail("/nonexistent/true") == (errno.ENOENT, SpawnStep.EXEC)
    assert agent.fail("/etc/passwd/true") == (errno.ENOTDIR, SpawnStep.EXEC)
    assert agent.fail("/usr") == (errno.EACCES, SpawnStep.EXEC)
    assert agent.fail("true", cwd=f"{top}/none") == (errno.ENOENT, SpawnStep.CWD)
    assert agent.fail("true", cwd=f"{top}/plain") == (errno.ENOTDIR, SpawnStep.CWD)
    if os.geteuid() == 0:  # else the directory is our own, and the agent has our uid
        assert agent.fail("true", cwd=f"{top}/locked/in") == (errno.EACCES, SpawnStep.CWD)
    assert agent.run("echo on") == "on\n"


def test_a_relative_path_entry_and_the_default_path_work(agent: AgentBox) -> None:
    (agent.directory / "tool").symlink_to("/bin/echo")
    assert agent.spawn("tool", "1", env={"PATH": "::"}, cwd=str(agent.directory)).output() == b"1\n"
    assert agent.spawn("./tool", "2", env={}, cwd=str(agent.directory)).output() == b"2\n"
    assert agent.spawn("echo", "3", env={}).output() == b"3\n"


def test_a_run_number_in_use_is_refused(agent: AgentBox) -> None:
    run = agent.bash("sleep 1000")
    agent._last_run -= 1
    assert agent.fail("true") == (errno.EEXIST, SpawnStep.RESOURCES)
    assert agent.kill(run) == 2 or agent.status(run) == -9


def test_too_few_descriptors_are_an_errno() -> None:
    # The agent holds 0-2, its socket, /proc, and the SIGCHLD descriptor.
    with AgentBox(limits=Limits(files=9)) as agent:
        assert agent.fail("true") == (errno.EMFILE, SpawnStep.RESOURCES)
        assert agent.fail("true", flags=SCRIPT_PIPE) == (errno.EMFILE, SpawnStep.RESOURCES)
        agent.send(Kind.PING)
        agent.expect(Kind.PONG)


@pytest.mark.skipif(os.geteuid() != 0, reason="processes are counted per user: it must be one with no others")
def test_too_few_processes_are_an_errno() -> None:
    with AgentBox(limits=Limits(processes=3), uid=UID + 1) as agent:
        first, second = agent.spawn("sleep", "1000"), agent.spawn("sleep", "1000")
        assert agent.fail("true") == (errno.EAGAIN, SpawnStep.RESOURCES)
        assert agent.kill(first) == 1
        assert agent.status(first) == -9
        assert agent.status(agent.spawn("true")) == 0
        assert agent.kill(second) == 1


def test_more_runs_than_the_table_holds_are_refused() -> None:
    with AgentBox(limits=Limits(processes=700 if os.geteuid() == 0 else 8192)) as agent:
        for _ in range(512):
            agent.spawn("sleep", "1000")
            for fd in agent._runs.pop().fds:
                os.close(fd)
        assert agent.fail("true") == (errno.EAGAIN, SpawnStep.RESOURCES)
        assert agent.kill_all() == 512
        for _ in range(512):
            assert agent.expect(Kind.EXIT).arg == 9
        assert agent.status(agent.spawn("true")) == 0


def test_a_thousand_rounds_leak_nothing() -> None:
    """The limit on open files is the proof: one descriptor lost per round would meet it at once."""
    with AgentBox(limits=Limits(files=24)) as agent:
        for number in range(1000):
            if number % 10 == 0:
                assert agent.fail("nosuch", flags=SCRIPT_PIPE)[0] == errno.ENOENT
            run = agent.spawn("true", flags=SCRIPT_PIPE if number % 2 else 0)
            assert agent.status(run) == 0
            for fd in run.fds:
                os.close(fd)
            agent._runs.clear()
        assert not agent.zombies()


def test_a_reader_that_is_slow_loses_nothing() -> None:
    """More descriptors and packets wait in the socket than the kernel lets be in flight at once."""
    with AgentBox(limits=Limits(files=96)) as agent:
        numbers = [agent.ask(["bash", "-c", f"exit {number % 200}"]) for number in range(80)]
        for number in numbers:
            for fd in agent.expect(Kind.SPAWNED, run=number).fds:
                os.close(fd)
        for at, number in enumerate(numbers):
            assert os.waitstatus_to_exitcode(agent.expect(Kind.EXIT, run=number).arg) == at % 200


# ---- who may do what to the agent ----


def test_commands_cannot_look_into_the_agent_or_end_it() -> None:
    with AgentBox("bwrap") as agent:
        script = """
            kill -9 1; kill -STOP 1; kill -TERM 1
            for what in environ mem maps; do head -c 1 /proc/1/$what >/dev/null 2>&1 && echo "read $what"; done
            ls /proc/1/fd/ >/dev/null 2>&1 && echo "read fd"
            true
        """
        assert agent.run(script) == ""
        assert agent.run("echo on") == "on\n"


def test_no_process_changes_the_limits_of_another(agent: AgentBox) -> None:
    """A CPU limit on the agent would end the slot as if we had failed."""
    tried = agent.run("prlimit --pid $PPID --cpu=1 2>&1; sleep 5 & prlimit --pid $! --nofile=9:9 2>&1; kill $!")
    assert tried.count("Operation not permitted") == 2, tried
    assert "NOFILE" in agent.run("prlimit --pid $PPID --nofile")  # looking is allowed
    assert agent.run("ulimit -n 33; ulimit -n; prlimit --nofile=22 bash -c 'ulimit -n'") == "33\n22\n"


def test_the_end_of_the_socket_ends_every_process(where: Where) -> None:
    with AgentBox(where) as agent:
        run = agent.bash("setsid sleep 1000 & sleep 1000 & echo ready; sleep 1000")
        assert run.line() == "ready"
        keep = os.dup(run.fds[0])
        agent.socket.close()
        agent.process.wait(WAIT_S)
        with open(keep, "rb") as output:  # noqa: PTH123
            assert output.read() == b"", "end of file: nobody holds the pipe any more"


def test_wrong_arguments_of_the_program_are_refused() -> None:
    import subprocess

    from agentenv.sandbox.slotagent.build import ensure_built

    agent = str(ensure_built().agent)
    for arguments in ([], ["0"], ["x"], ["3", "4"], ["999"], [""]):
        assert subprocess.run([agent, *arguments], env=ENV, timeout=WAIT_S).returncode == 64, arguments
    assert Path(agent).stat().st_size < 2**20


def test_a_run_gets_a_copy_of_a_file_and_not_the_file(agent: AgentBox) -> None:
    """What a process of the slot keeps is the slot's memory, and its locks are nobody else's."""
    content = os.urandom(3_000_000)
    ours = os.memfd_create("ours")
    os.write(ours, content)
    os.lseek(ours, 0, os.SEEK_SET)
    script = "stat -Lc %i /proc/self/fd/0; echo spoilt 1<>/proc/self/fd/0; exec cat >&2"
    run = agent.spawn("bash", "-c", script, stdin=ours)
    assert run.line() != str(os.fstat(ours).st_ino)
    assert run.output(1) == b"spoilt\n" + content[7:]
    assert agent.status(run) == 0
    assert os.pread(ours, len(content), 0) == content
    os.close(ours)


def test_what_is_no_file_is_handed_over_itself(agent: AgentBox) -> None:
    theirs, ours = os.pipe()
    run = agent.spawn("cat", stdin=theirs)
    os.close(theirs)
    os.write(ours, b"through a pipe")
    os.close(ours)
    assert run.output() == b"through a pipe"
