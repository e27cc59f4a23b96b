"""The command over real containers: output, refusals, and what is left after any ending (nothing)."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from agentenv.store import Store
from tests import cli
from tests.small_image import small_image
from tests.waiting import START_S, wait_for

ISOLATION = ("--isolation", "full" if os.geteuid() == 0 else "user")
"""An ordinary user has to ask for less by name (the commands refuse otherwise)."""


class Machine(cli.Command):
    """Runs the command with a state directory of its own: here, or where it is sent signals as a process."""

    def __init__(self, state: Path) -> None:
        self.state = state
        super().__init__({"AGENTENV_STATE_DIR": str(state)})

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

    def until_a_command_runs(self, process: subprocess.Popen[str], marker: str) -> None:
        wait_for(lambda: process.poll() is not None or _looked(bool(_running(marker))), START_S)
        assert process.returncode is None, process.communicate()

    def until_nothing_is_left(self, marker: str) -> None:
        wait_for(
            lambda: _looked(not self.processes() and not _running(marker)),
            START_S,
            lambda: f"left behind: {self.processes()} {_running(marker)}",
        )


def _looked(found: bool) -> bool:
    """To look through all processes costs milliseconds: not as often as others look."""
    time.sleep(0 if found else 0.1)
    return found


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


def test_exec_runs_in_a_slot_not_here(machine: Machine) -> None:
    with machine.started("exec", *ISOLATION, "id -u; pwd; ls -A; echo err >&2; exit 7") as process:
        stdout, stderr = process.communicate(timeout=START_S)
    uid, *rest = stdout.splitlines()
    assert int(uid) != 0
    assert (rest, stderr, process.returncode) == (["/workspace"], "err\n", 7)


def test_output_that_cannot_be_written_is_a_line_and_no_success(machine: Machine) -> None:
    with (
        Path("/dev/full").open("wb") as full,
        machine.started("exec", *ISOLATION, "yes | head -c 300000", stdout=full.fileno()) as process,
    ):
        _, stderr = process.communicate(timeout=START_S)
    assert (process.returncode, stderr.splitlines()[0]) == (
        125, "error what the command printed cannot be written: No space left on device"
    )  # fmt: skip


def test_doctor_starts_a_real_slot_and_shows_its_proofs(machine: Machine) -> None:
    code, stdout, _ = machine.run("doctor", "--json")
    told = json.loads(stdout)
    assert code in (0, 1)
    assert next(f for f in told["findings"] if f["name"] == "a real slot")["level"] != "broken"
    assert {proof["name"] for proof in told["proofs"] if not proof["holds"] and proof["required"]} == set()
    assert len(told["proofs"]) >= 10


def test_shell_keeps_where_it_is(machine: Machine) -> None:
    code, stdout, stderr = machine.run(
        "shell", *ISOLATION, stdin="cd /tmp\nexport A='x  y'\npwd; echo \"$A\"\n(exit 4)\n"
    )
    assert (stdout, code) == ("/tmp\nx  y\n", 4)
    assert "A new slot" in stderr


def test_shell_writes_a_result_for_each_line(machine: Machine) -> None:
    code, stdout, stderr = machine.run("shell", *ISOLATION, "--json", stdin="echo one; cd /tmp\npwd; (exit 3)\n")
    told = [json.loads(line) for line in stdout.splitlines()]
    assert [(result["stdout"], result["exit_code"]) for result in told] == [("one\n", 0), ("/tmp\n", 3)]
    assert (code, stderr) == (3, "")


def test_upload_and_binary_output_pass_through(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "a b.txt").write_text("content")
    command = ("exec", *ISOLATION, "--upload", str(tmp_path / "up"), "cat 'up/a b.txt'; printf '\\377\\0\\200'")
    with machine.started(*command) as process:
        assert printed(process) == b"content\xff\0\x80"
    assert process.returncode == 0


def test_bytes_of_any_length_go_in_and_come_out(machine: Machine, tmp_path: Path) -> None:
    data = bytes(range(256)) * 40_000
    (tmp_path / "in").write_bytes(data)
    command = ("exec", *ISOLATION, "--stdin", "tee /dev/stderr | gzip -1n")
    with (
        (tmp_path / "in").open("rb") as given,
        machine.started(*command, stdin=given.fileno()) as process,
        ThreadPoolExecutor() as threads,
    ):
        stderr = threads.submit(printed, process, errors=True)
        assert gzip.decompress(printed(process)) == data
        assert stderr.result() == data
    assert process.returncode == 0


def printed(process: subprocess.Popen[str], *, errors: bool = False) -> bytes:
    """All that it prints, unchanged."""
    stream = process.stderr if errors else process.stdout
    assert stream is not None
    with os.fdopen(os.dup(stream.fileno()), "rb") as raw:
        return raw.read()


def test_an_unwritable_state_directory_is_a_message(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    machine.env["AGENTENV_STATE_DIR"] = str(tmp_path / "file" / "below")
    code, stdout, stderr = machine.run("exec", *ISOLATION, "true")
    assert (code, stdout) == (125, "")
    assert "Traceback" not in stderr
    assert "AGENTENV_STATE_DIR" in stderr


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="image slots need root, or ids of its own")


@pytest.fixture
def image(machine: Machine, tmp_path: Path) -> str:
    """An image that this machine's store has under a name, as agentenv.tasks.base_image makes one."""
    machine.env["AGENTENV_CACHE_DIR"] = str(tmp_path / "cache")
    store = Store.open(tmp_path / "cache" / "store")
    store.name("small:1", store.ensure(small_image(tmp_path / "layout")))
    return "small:1"


@as_root
def test_exec_with_an_image_is_root_in_it(machine: Machine, image: str) -> None:
    command = "id -u; echo x > /etc/new; cat /etc/new; pwd"
    assert machine.run("exec", "--image", image, command) == (0, "0\nx\n/\n", "")
    limited = ("--user", "app", "--workdir", "/home/app", "--cpus", "0.5", "--memory", "3000", "--storage", "64")
    code, stdout, stderr = machine.run("exec", "--image", image, *limited, "--", "bash", "-c", "id -un; pwd; ls /etc")
    assert (code, stdout.split()[:2], stderr) == (0, ["app", "/home/app"], "")
    assert "new" not in stdout.split(), "what the first command changed has gone with its slot"
    allowed = machine.run("exec", "--image", image, "--allow", "example.org", "echo ${http_proxy%:*}")
    assert allowed == (0, "http://127.0.0.1\n", "")


@as_root
def test_exec_builds_a_dockerfile_once(machine: Machine, image: str, tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task/data").write_text("of the context")
    (tmp_path / "task/Dockerfile").write_text(f"FROM {image}\nRUN echo built; echo made > /opt/f\nCOPY data /opt/\n")
    run = ("exec", "--dockerfile", str(tmp_path / "task"), "cat /opt/f /opt/data")
    code, stdout, shown = machine.run(*run)
    assert (code, stdout) == (0, "made\nof the context")
    assert "RUN echo built" in shown
    assert machine.run(*run) == (0, stdout, ""), "and from then on nothing is built, or told"
    as_file = machine.run("exec", "--dockerfile", str(tmp_path / "task/Dockerfile"), "cat /opt/f")
    assert as_file == (0, "made\n", "")
    (tmp_path / "task/Dockerfile").write_text(f"FROM {image}\nRUN exit 3\n")
    code, stdout, stderr = machine.run(*run)
    assert (code, stdout) == (2, "")
    assert "Dockerfile:2" in stderr


@as_root
def test_a_dockerfile_has_its_base_s_shell_and_is_refused_where_its_base_begins_with_more(
    machine: Machine, image: str, tmp_path: Path
) -> None:
    store = Store.open(tmp_path / "cache" / "store")
    store.name("bash:1", store.ensure(small_image(tmp_path / "shell", Shell=["/bin/bash", "-c"])))
    store.name("more:1", store.ensure(small_image(tmp_path / "more", OnBuild=["RUN echo x >/opt/x"])))

    def built(base: str) -> tuple[int, str, str]:
        (tmp_path / "Dockerfile").write_text(f"FROM {base}\nRUN echo ${{BASH_VERSINFO[0]}} $0 >/opt/f\n")
        return machine.run("exec", "--dockerfile", str(tmp_path / "Dockerfile"), "cat /opt/f")

    code, stdout, _ = built("bash:1")
    assert (code, stdout.split()[1:]) == (0, ["/bin/bash"])
    code, _, stderr = built("more:1")
    assert code == 2
    assert "ONBUILD" in stderr


@as_root
def test_shell_with_an_image_starts_where_it_says(machine: Machine, image: str) -> None:
    typed = "pwd; id -un; cd /opt\npwd\n"
    code, stdout, stderr = machine.run("shell", "--image", image, "--workdir", "/home", stdin=typed)
    assert (code, stdout) == (0, "/home\nroot\n/opt\n")
    assert "network none" in stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_however_exec_ends_nothing_is_left(machine: Machine, number: signal.Signals) -> None:
    marker = f"7{os.getpid()}.{int(number)}"
    with machine.started("exec", *ISOLATION, "--", "sleep", marker) as process:
        machine.until_a_command_runs(process, marker)
        process.send_signal(number)
        process.communicate(timeout=START_S)
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    machine.until_nothing_is_left(marker)
    if number == signal.SIGKILL:  # what a killed parent could not remove, the sweep does
        code, _, _ = machine.run("gc")
        assert code == 0
    assert machine.containers() == []
    assert list(machine.state.glob("launch-*")) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_however_shell_ends_nothing_is_left(machine: Machine, number: signal.Signals) -> None:
    marker = f"8{os.getpid()}.{int(number)}"
    with machine.started("shell", *ISOLATION, "--quiet", stdin=subprocess.PIPE) as process:
        _type(process, f"sleep {marker}\n")
        machine.until_a_command_runs(process, marker)
        process.send_signal(number)
        process.communicate(timeout=START_S)
    machine.until_nothing_is_left(marker)


def test_ctrl_c_ends_the_line_and_not_the_shell(machine: Machine) -> None:
    marker = f"9{os.getpid()}"
    with machine.started("shell", *ISOLATION, "--quiet", stdin=subprocess.PIPE) as process:
        _type(process, f"touch here; sleep {marker}\n")
        machine.until_a_command_runs(process, marker)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate("ls; pwd\n", START_S)
    assert (stdout, process.returncode) == ("here\n/workspace\n", 0), stderr
    machine.until_nothing_is_left(marker)


def _type(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.flush()
