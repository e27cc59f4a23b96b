"""``python -m agentenv.sandbox.machine``, with a stand-in for QEMU: what it is started with, what is passed on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentenv import shipped
from agentenv.errors import ConfigError, SandboxUnavailableError
from agentenv.sandbox.machine import qemu
from agentenv.wire.spec import SandboxSpec
from tests.waiting import wait_for

TOKEN = "a-token-of-forty-characters-for-the-test"
QEMU = """#!/usr/bin/python3
import json, os, re, socket, sys
words = " ".join(sys.argv)
line = socket.socket(fileno=int(re.search(r"socket,id=events,fd=([0-9]+)", words)[1]))
_, job = re.findall(r"file=(/proc/self/fd/[0-9]+)", words)
with open({place!r} + "/argv", "w") as file:
    json.dump(sys.argv, file)
with open(job, "rb") as source, open({place!r} + "/job.tar", "wb") as copy:
    copy.write(source.read())
print("the console", flush=True)
{rest}
"""
READY = """line.sendall(b'{"event": "ready", "port": 8642, "pid": 7, "isolation": "full", "weaker": []}\\n')\n"""
STOPS = "assert line.makefile().readline() == 'stop\\n'\n"


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that QEMU's user can reach and write to."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o777)
        yield Path(directory)


def run_with(place: Path, rest: str, *options: str, **changes: Any) -> subprocess.Popen[bytes]:
    """The process, with a QEMU that goes on as ``rest`` says."""
    image = place / "image"
    image.mkdir(exist_ok=True)
    for name in (qemu.KERNEL, qemu.INITRD, qemu.ROOT):
        (image / name).touch()
    (place / "token").touch(0o600)
    (place / "token").write_text(TOKEN)
    program = place / qemu.PROGRAM
    program.write_text(QEMU.format(place=str(place), rest=rest))
    program.chmod(0o755)
    spec = {"container": "c1", "slots": 3, "token_file": str(place / "token"), "data_dir": str(place / "data")}
    (place / "spec.json").write_text(json.dumps(spec | changes))
    environment = {
        **os.environ,
        "PATH": f"{place}:{os.environ['PATH']}",
        "PYTHONPATH": str(shipped.PACKAGE.parent),
        "AGENTENV_TIME_FACTOR": "10",
    }
    argv = [sys.executable, "-m", "agentenv.sandbox.machine", str(place / "spec.json"), "--image", str(image), *options]
    return subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )


def result(process: subprocess.Popen[bytes]) -> tuple[int, Sequence[dict[str, Any]], str]:
    """Its exit code, events and log."""
    out, log = process.communicate(timeout=60)
    return process.returncode, [json.loads(line) for line in out.splitlines()], log.decode()


def test_events_are_passed_on_and_the_port_is_that_of_the_host(place: Path) -> None:
    rest = f"""line.sendall(b'noise\\n[1]\\n{{"event": "other"}}\\n')\n{READY}{STOPS}
line.sendall(b'{{"event": "exited", "code": 0}}\\n')"""
    process = run_with(place, rest, port=18642)
    wait_for((place / "argv").exists)
    process.send_signal(signal.SIGTERM)

    code, seen, log = result(process)

    assert code == 0
    assert seen == [{"event": "ready", "port": 18642, "pid": process.pid, "isolation": "full", "weaker": []}]
    assert "the console" in log


def test_the_guest_has_the_specification_the_token_and_nothing_of_the_host(place: Path) -> None:
    code, _, _ = result(run_with(place, 'line.sendall(b\'{"event": "exited", "code": 3}\\n\')', uid_block=9))

    assert code == 3
    with tarfile.open(place / "job.tar") as tar:
        given = {member.name: tar.extractfile(member).read().decode() for member in tar}  # type: ignore[union-attr]
    spec = SandboxSpec.parse(json.loads(given["spec.json"]))
    assert (spec.container, spec.slots, spec.token_file, spec.port, spec.uid_block) == (
        "c1", 3, "/run/token", 8642, 0,
    )  # fmt: skip
    assert given["token"] == TOKEN
    assert given["init"].startswith("#!/bin/sh\n")
    argv = json.loads((place / "argv").read_text())
    assert TOKEN not in " ".join(argv)
    [network] = [word for word in argv if word.startswith("user,")]
    assert ",restrict=on," in network
    assert int(argv[argv.index("-m") + 1]) == 3 * 2048 + 4096 + 320 + 512
    assert "spawn=deny" in argv[argv.index("-sandbox") + 1]
    assert all("readonly=on" in word for word in argv if word.startswith("file="))


def test_the_first_program_is_a_shell_script_without_mistakes(place: Path) -> None:
    result(run_with(place, ""))
    with tarfile.open(place / "job.tar") as tar:
        script = tar.extractfile("init").read()  # type: ignore[union-attr]
    assert subprocess.run(["sh", "-n"], input=script, capture_output=True, check=True).stderr == b""


@pytest.mark.parametrize("rest", ["", "raise SystemExit(3)", READY, "line.sendall(b'x' * 1_000_000)"])
def test_a_machine_that_ends_by_itself_is_a_process_that_died(place: Path, rest: str) -> None:
    """Nothing is said that would keep others from being started: why is in the log."""
    code, seen, log = result(run_with(place, rest))

    assert code == 2
    assert [event["event"] for event in seen] == (["ready"] if rest == READY else [])
    assert "QEMU exited unexpectedly with" in log


def test_what_a_guest_says_is_believed_as_little_as_a_container(place: Path) -> None:
    lines = [
        *('{"event": []}', '{"event": {}}', "[" * 3000, "{}", '"ready"', '{"event": "exited", "code": "0"}'),
        '{"event": "ready", "port": 1, "isolation": ["full"], "weaker": "all", "more": 1}',
        '{"event": "ready", "isolation": "full", "weaker": [1, "b"]}',
        json.dumps({"event": "failed", "code": [], "message": "m" * 50_000, "next_step": None}),
        *['{"event": "failed"}'] * 100,
    ]
    said = "\n".join(lines) + "\n"
    code, seen, _ = result(run_with(place, f"line.sendall({said.encode()!r})"))

    assert code == 2
    ready, failed = seen
    assert ready.items() >= {"event": "ready", "isolation": "", "weaker": []}.items()
    assert ready["port"] != 1
    assert failed == {"event": "failed", "code": "", "message": "m" * 1000, "next_step": ""}


def test_addresses_that_qemu_cannot_forward_are_named(place: Path) -> None:
    code, [event], _ = result(run_with(place, "", host="::1"))
    assert (code, event["code"], event["message"][:5]) == (2, "config", "host:")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, [event], _ = result(run_with(place, "", port=taken.getsockname()[1]))
    assert (code, event["code"], event["message"][:5]) == (2, "config", "port:")


def test_eof_of_the_lifeline_stops_it(place: Path) -> None:
    process = run_with(place, f'{STOPS}line.sendall(b\'{{"event": "exited", "code": 0}}\\n\')', "--lifeline")

    assert result(process)[0] == 0  # which closes its standard input


def test_a_guest_that_does_not_stop_is_killed(place: Path) -> None:
    process = run_with(place, "import time; time.sleep(600)", "--lifeline")
    wait_for((place / "argv").exists)

    code, seen, log = result(process)

    assert (code, seen) == (2, [])
    assert "did not stop within" in log


def test_what_a_machine_cannot_have_is_refused_by_name(place: Path) -> None:
    bind = {"source": "/opt", "target": "/opt"}
    for name, value in {"store_dir": "/s", "binds": [bind], "allow_network": True, "isolation": "user"}.items():
        code, [event], _ = result(run_with(place, "", **{name: value}))
        assert (code, event["event"]) == (2, "failed")
        assert event["message"].startswith(name), event
        assert event["next_step"]
    assert not (place / "argv").exists()


def test_a_token_that_others_may_read_is_refused(place: Path) -> None:
    (place / "token").touch()
    (place / "token").chmod(0o644)
    code, [event], _ = result(run_with(place, ""))
    assert (code, "readable by others" in event["message"]) == (2, True)


def test_files_of_the_image_that_are_missing_are_named(place: Path) -> None:
    process = run_with(place, "")
    process.kill()
    process.communicate()
    image = place / "empty"
    image.mkdir()
    with pytest.raises(ConfigError, match=r"has no vmlinuz.*agentenv image machine"):
        qemu.check(image)


def test_emulation_is_accepted_by_name(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (qemu.KERNEL, qemu.INITRD, qemu.ROOT):
        (place / name).touch()
    machine = qemu.Machine(place, (7, 8, 9), 512, 1, "127.0.0.1", 1, 0, 0)
    monkeypatch.setattr(qemu, "why_emulated", lambda kernel: "/dev/kvm does not exist")
    monkeypatch.setattr(shutil, "which", lambda program: program)
    monkeypatch.setattr(qemu, "TIME_FACTOR", 9.0)
    with pytest.raises(
        SandboxUnavailableError, match=r"KVM does not work here.*/dev/kvm does not exist.*AGENTENV_TIME_FACTOR=10"
    ):
        qemu.check(place)
    monkeypatch.setattr(qemu, "TIME_FACTOR", 10.0)
    qemu.check(place)
    assert "tcg" in " ".join(machine.command)
    monkeypatch.setattr(qemu, "why_emulated", lambda kernel: "")
    assert "kvm" in machine.command
