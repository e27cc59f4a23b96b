"""Starts a container with the fake server and speaks to both; used by the supervisor's tests."""

from __future__ import annotations

import fcntl
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from agentenv.sandbox.supervisor import sweep
from agentenv.wire.spec import SandboxSpec
from tests.waiting import START_S, wait_for

FAKE_SERVER = Path(__file__).with_name("supervisor_fake_server.py")
REPOSITORY = Path(__file__).resolve().parents[2]

_LAUNCH = """
import sys
from agentenv.sandbox.supervisor.launch import main
sys.exit(main(sys.argv[2:], server_argv={argv!r}))
"""


class Lines:
    """JSON lines off a descriptor, with a deadline."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = b""
        self._ended = False
        self.seen: list[dict[str, Any]] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(fd, selectors.EVENT_READ)

    def next(self, deadline_s: float = START_S) -> dict[str, Any] | None:
        ends = time.monotonic() + deadline_s
        while b"\n" not in self._buffer:
            if self._ended:
                return None
            if not self._selector.select(max(0.0, ends - time.monotonic())):
                raise TimeoutError(f"no line within {deadline_s} s; so far {self.seen}")
            try:
                chunk = os.read(self._fd, 65536)
            except ConnectionResetError:
                chunk = b""
            self._buffer += chunk
            self._ended = not chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        self.seen.append(found)
        return found

    def until(self, wanted: Callable[[dict[str, Any]], bool], deadline_s: float = START_S) -> dict[str, Any]:
        ends = time.monotonic() + deadline_s
        while True:
            line = self.next(max(0.0, ends - time.monotonic()))
            if line is None:
                raise EOFError(f"ended without the wanted line; saw {self.seen}")
            if wanted(line):
                return line

    def close(self) -> None:
        self._selector.close()


class Container:
    """One container under test. A context manager: leaving it kills what still runs."""

    def __init__(
        self,
        directory: Path,
        *,
        python: tuple[str, ...] = (sys.executable,),
        prefix: tuple[str, ...] = (),
        lifeline: bool = False,
        env: dict[str, str] | None = None,
        fake: tuple[str, ...] = (),
        **fields: Any,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        token = directory / "token"
        if not token.exists():
            token.write_text("a-token-for-tests-only")
            token.chmod(0o600)
        given: dict[str, Any] = {"container": f"t{os.getpid()}-{directory.name[-20:]}", "slots": 2} | fields
        given = {"token_file": str(token), "data_dir": str(directory / "state")} | given
        self.spec = SandboxSpec(**given)
        self.spec_file = directory / "spec.json"
        self.spec_file.write_text(self.spec.to_json())
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(START_S)
        report = f"127.0.0.1:{self._listener.getsockname()[1]}"
        server = [*python, "-P", "-s", "-B", str(FAKE_SERVER), "--report", report, *fake]
        options = ["--lifeline"] if lifeline else []
        self._errors: IO[bytes] = (directory / "stderr").open("ab")
        self.process = subprocess.Popen(
            [*prefix, *python, "-B", "-c", _LAUNCH.format(argv=server), "-", str(self.spec_file), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY / "src"), "SECRET_OF_HOST": "1"}
            | (env or {}),
        )
        assert self.process.stdout is not None
        self.events = Lines(self.process.stdout.fileno())
        self._server: socket.socket | None = None
        self.server_lines: Lines | None = None

    @property
    def state(self) -> Path:
        return Path(self.spec.data_dir) / self.spec.container

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(START_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        sweep.sweep(Path(self.spec.data_dir))  # what a test that killed it left behind
        self.events.close()
        self._drop_server()
        self._listener.close()
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            assert stream is not None
            stream.close()

    def _drop_server(self) -> None:
        if self._server is not None and self.server_lines is not None:
            self.server_lines.close()
            self._server.close()

    def errors(self) -> str:
        return (self.directory / "stderr").read_text(errors="replace")

    def goes_on(self) -> bool:
        """Wait until there is another server process, or the container has ended; whether there is one."""
        ends = time.monotonic() + START_S
        while not select.select([self._listener], [], [], 0.05)[0]:
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < ends, f"neither a server nor an end\n{self.errors()}"
        return True

    def accept(self) -> Lines:
        """The next server process's report connection."""
        self._drop_server()
        if not self.goes_on():
            raise AssertionError(f"no server: {self.process.stdout.read()!r}\n{self.errors()}")  # type: ignore[union-attr]
        self._server, _ = self._listener.accept()
        self.server_lines = Lines(self._server.fileno())
        return self.server_lines

    def order(self, **fields: Any) -> None:
        assert self._server is not None
        self._server.sendall(json.dumps(fields).encode() + b"\n")

    def send(self, **packet: Any) -> None:
        """A request; about a slot it is by default of the epoch that the slot was last said to be in."""
        if "slot" in packet:
            packet.setdefault("epoch", self._epoch(packet["slot"]))
        self.order(send=packet)

    def _epoch(self, slot: int) -> int:
        lines = self.server_lines.seen if self.server_lines is not None else []
        told = [line["packet"] for line in lines if line.get("packet", {}).get("slot") == slot]
        return max((packet["epoch"] for packet in told if "epoch" in packet), default=0)

    def event(self, name: str) -> dict[str, Any]:
        try:
            return self.events.until(lambda line: line["event"] == name)
        except (EOFError, TimeoutError) as error:
            raise AssertionError(f"no {name} event: {error}\n{self.errors()}") from error

    def ready(self) -> dict[str, Any]:
        """Wait until the container is ready and the server has all its slots."""
        self.accept()
        found = self.event("ready")
        self.slots(*range(self.spec.slots))
        return found

    def packet(self, op: str, **fields: Any) -> dict[str, Any]:
        """Wait for one packet of the supervisor's with this op and these fields."""
        assert self.server_lines is not None
        line = self.server_lines.until(
            lambda line: "packet" in line and {"op": op, **fields}.items() <= line["packet"].items()
        )
        packet: dict[str, Any] = line["packet"]
        return packet

    def slots(self, *numbers: int) -> dict[int, dict[str, Any]]:
        """Wait until each of these slots has been handed over (or been so before)."""
        assert self.server_lines is not None

        def found() -> dict[int, dict[str, Any]]:
            lines = self.server_lines.seen if self.server_lines else []
            packets = [line["packet"] for line in lines if line.get("packet", {}).get("op") == "slot_ready"]
            return {packet["slot"]: packet for packet in packets}

        if not set(numbers) <= set(found()):
            self.server_lines.until(lambda _: set(numbers) <= set(found()))
        return found()

    def server_pid(self) -> int:
        """As this machine counts."""
        supervisor = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().strip()
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        (found,) = (int(child) for child in children if FAKE_SERVER.name.encode() in _command_line(int(child)))
        return found

    def bash(self, slot: int, script: str) -> str:
        """Run a script in a slot; its output."""
        self.order(bash=slot, script=script)
        assert self.server_lines is not None
        output: str = self.server_lines.until(lambda line: line.get("ran") == slot)["output"]
        return output

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(START_S)


def _command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def processes_with(text: str) -> list[int]:
    """Pids of this machine whose command line contains ``text`` (ours excluded)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in words:
                found.append(int(entry.name))
    return found


def cgroups_of(name: str) -> list[Path]:
    """Cgroup directories of this container anywhere below the usual mount."""
    # os.walk, not rglob: cgroups of others come and go while we look.
    parents = (Path(root) for root, _, _ in os.walk("/sys/fs/cgroup") if root.endswith("/agentenv"))
    return [parent / name for parent in parents if (parent / name).is_dir()]


def members(base: Path) -> set[int]:
    """Pids in a cgroup and all below it."""
    found: set[int] = set()
    for root, _, _ in os.walk(base):
        try:
            found |= {int(pid) for pid in (Path(root) / "cgroup.procs").read_text().split()}
        except FileNotFoundError:
            continue
    return found


def living(container: Container) -> set[int]:
    """Every process of the container this machine still has."""
    found = set(processes_with(str(container.directory))) | set(processes_with(container.spec.container))
    for base in cgroups_of(container.spec.container):
        found |= members(base)
    return found


def wait_for_death(container: Container) -> None:
    """Until no process of the container lives and none holds its lock.

    A dying process shows no command line some moments before its descriptors are closed: until then
    a sweep rightly takes its container for a living one.
    """
    wait_for(lambda: not living(container), explain="every process of the container is gone")
    wait_for(lambda: not _is_locked(container.state / sweep.LOCK_FILE), explain="the container's lock is free")


def _is_locked(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False  # it died before it made one, or was tidied up
    except BlockingIOError:
        return True
    return False


def assert_nothing_left(container: Container) -> None:
    """No process, no cgroup, no mount, no data directory."""
    name = container.spec.container
    wait_for(lambda: not living(container), explain="every process of the container is gone")
    assert cgroups_of(name) == []
    assert not container.state.exists()
    assert name not in Path("/proc/self/mountinfo").read_text()
