"""One real slot agent at the other end of a socket, plain or as PID 1 of a bubblewrap sandbox."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from agentenv.locks import locked
from agentenv.sandbox.slotagent.build import Binaries, build_sanitized, ensure_built
from agentenv.sandbox.slotagent.protocol import (
    SCRIPT_FD,
    STDIN,
    VERSION,
    Kind,
    Message,
    encode,
    receive,
    send,
    spawn_text,
)
from tests.unit.sandbox.identity import as_user
from tests.waiting import START_S

_libc = ctypes.CDLL(None, use_errno=True)
_RT_SIGACTION = {"x86_64": 13, "aarch64": 134}[platform.machine()]
UID = 2_000_000 + os.getpid() % 1_000_000
"""Nobody else's, not even another test run's: the kernel counts processes per user."""
WAIT_S = START_S
ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
Where = Literal["plain", "bwrap"]
BWRAP = (
    *("bwrap", "--unshare-all", "--as-pid-1", "--die-with-parent", "--uid", "20999", "--gid", "20999"),
    *("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--"),
)


@cache
def sanitized() -> Binaries:
    """The programs with AddressSanitizer, compiled once for all processes: they are named by their sources."""
    with locked(_SANITIZED / "lock"):
        return build_sanitized(_SANITIZED)


_SANITIZED = Path(__file__).parents[4] / ".cache/slotagent-sanitized"


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """The worst a parent can leave behind: signals ignored, one of them out of libc's own reach. They are inherited, so
    that no copy of this process has to be made to set them."""
    ignore, before = struct.pack("LLLQ", signal.SIG_IGN, 0, 0, 0), ctypes.create_string_buffer(32)
    usr1 = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert _libc.syscall(_RT_SIGACTION, 32, ignore, before, 8) == 0
    try:
        yield
    finally:
        assert _libc.syscall(_RT_SIGACTION, 32, before, None, 8) == 0
        signal.signal(signal.SIGUSR1, usr1)


@dataclass(frozen=True)
class Limits:
    """Rlimits of the agent and all it starts. Processes are counted per user, so a tester's own count too."""

    processes: int = 400 if os.geteuid() == 0 else 8192
    files: int = 512


@dataclass
class Run:
    """A spawned run: its pid inside the sandbox, and the sockets of its streams."""

    id: int
    pid: int
    fds: tuple[int, ...] = field(repr=False)

    def output(self, which: int = 0) -> bytes:
        """All of stdout (0) or stderr (1) up to the end of file."""
        chunks = []
        while chunk := os.read(self.fds[which], 65536):
            chunks.append(chunk)
        return b"".join(chunks)

    def line(self) -> str:
        """The next line of stdout."""
        found = b""
        while not found.endswith(b"\n"):
            byte = os.read(self.fds[0], 1)
            assert byte, f"end of output after {found!r}"
            found += byte
        return found.decode().strip()


class AgentBox:
    """Context manager: starts the agent, checks its HELLO, and at the end that it leaves cleanly."""

    def __init__(
        self, where: Where = "plain", *, limits: Limits = Limits(), binary: Path | None = None, uid: int = UID
    ) -> None:
        self._where = where
        self._limits = limits
        self._uid = uid
        self._binary = binary or ensure_built().agent
        self._pending: list[Message] = []
        self._runs: list[Run] = []
        self._last_run = 0
        self.directory = Path()
        self.stderr = b""

    def __enter__(self) -> Self:
        self._directory = tempfile.TemporaryDirectory(prefix="slotagent-test-")
        self.directory = Path(self._directory.name)
        self.directory.chmod(0o755)
        program = self.directory / "slotagent"
        shutil.copy(self._binary, program)  # a checkout may be where the other user cannot go
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(WAIT_S)
        command = [*(BWRAP if self._where == "bwrap" else ()), str(program), str(theirs.fileno())]
        limits = (f"--nproc={self._limits.processes}", f"--nofile={self._limits.files}", "--core=0")
        with theirs, _signals_ignored():
            self.process = subprocess.Popen(
                [*as_user(self._uid), "prlimit", *limits, *command],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                pass_fds=[theirs.fileno()],
                restore_signals=False,  # as a careless parent would: Python ignores SIGPIPE
                env={"ASAN_OPTIONS": "detect_leaks=0", **ENV},
            )
        try:
            hello = receive(self.socket)
            assert hello == Message(Kind.HELLO, arg=VERSION)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        code = self.close()
        if kind is None:
            assert code == 0, self.stderr

    def close(self) -> int:
        """Close the socket, which ends the agent, and return its exit code. Repeatable."""
        self.socket.close()
        try:
            _, self.stderr = self.process.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        except ValueError:
            pass  # closed before
        for run in self._runs:
            for fd in run.fds:
                with suppress(OSError):
                    os.close(fd)
        self._runs.clear()
        for message in self._pending:
            for fd in message.fds:
                os.close(fd)
        self._pending.clear()
        self._directory.cleanup()
        return self.process.returncode

    def cpu_s(self) -> float:
        """CPU time that the agent itself has used so far: it does not depend on what else the machine does."""
        fields = Path(f"/proc/{self._pid()}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _pid(self) -> int:
        """The agent's, outside the sandbox."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text()) if self._where == "bwrap" else pid

    # -- messages ----------------------------------------------------------------------------------

    def send(self, kind: Kind, run: int = 0, arg: int = 0, payload: bytes = b"", fds: Sequence[int] = ()) -> None:
        send(self.socket, encode(kind, run, arg, payload), fds)

    def expect(self, *kinds: Kind, run: int | None = None) -> Message:
        """The first message of one of these kinds (and this run), from what came before or next."""
        for at, message in enumerate(self._pending):
            if message.kind in kinds and run in (None, message.run):
                return self._pending.pop(at)
        while True:
            next_one = receive(self.socket)
            assert next_one is not None, "the agent ended"
            if next_one.kind in kinds and run in (None, next_one.run):
                return next_one
            self._pending.append(next_one)

    def ask(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] = ENV,
        cwd: str = "/",
        flags: int = 0,
        stdin: int | None = None,
        script_fd: int | None = None,
    ) -> int:
        """Send SPAWN; the run's number."""
        self._last_run += 1
        flags |= (STDIN if stdin is not None else 0) | (SCRIPT_FD if script_fd is not None else 0)
        fds = [fd for fd in (stdin, script_fd) if fd is not None]
        self.send(Kind.SPAWN, self._last_run, flags, spawn_text(argv, env, cwd), fds)
        return self._last_run

    def spawn(self, *argv: str, **more: Any) -> Run:
        """SPAWN that must succeed."""
        number = self.ask(argv, **more)
        answer = self.expect(Kind.SPAWNED, Kind.SPAWN_FAILED, run=number)
        assert answer.kind is Kind.SPAWNED, answer
        for fd in answer.fds:
            os.set_blocking(fd, True)
        run = Run(number, answer.arg, answer.fds)
        self._runs.append(run)
        return run

    def bash(self, script: str, **more: Any) -> Run:
        return self.spawn("bash", "-c", script, **more)

    def fail(self, *argv: str, **more: Any) -> tuple[int, int]:
        """SPAWN that must fail: errno and step."""
        answer = self.expect(Kind.SPAWNED, Kind.SPAWN_FAILED, run=self.ask(argv, **more))
        assert answer.kind is Kind.SPAWN_FAILED, answer
        return answer.arg, int.from_bytes(answer.payload, "little")

    def status(self, run: Run) -> int:
        """Wait for EXIT; as os.waitstatus_to_exitcode says it (negative: a signal)."""
        return os.waitstatus_to_exitcode(self.expect(Kind.EXIT, run=run.id).arg)

    def kill(self, run: Run) -> int:
        """KILL; how many processes the agent killed."""
        self.send(Kind.KILL, run.id)
        return self.expect(Kind.KILLED, run=run.id).arg

    def kill_all(self) -> int:
        self.send(Kind.KILL_ALL)
        return self.expect(Kind.KILLED, run=0).arg

    def run(self, script: str, **more: Any) -> str:
        """A bash script's stdout, once it has ended well."""
        run = self.bash(script, **more)
        output = run.output().decode()
        assert self.status(run) == 0, (output, run.output(1))
        return output

    def compiled(self, source: str) -> Path:
        """A C program that the sandbox can run, whatever libraries it has."""
        program = self.directory / "program"
        program.with_suffix(".c").write_text(source)
        subprocess.run(["cc", "-static", "-o", program, program.with_suffix(".c")], check=True, timeout=60)
        program.chmod(0o755)
        return program

    # -- looking -----------------------------------------------------------------------------------

    def state(self, pid: int) -> str:
        """The state letter of a process of the sandbox, or "" when there is none."""
        found = self.run(f"cat /proc/{pid}/stat 2>/dev/null || :")
        return found.rsplit(")", 1)[1].split()[0] if found else ""

    def lives(self, pid: int) -> bool:
        """Whether the process is there, and neither a zombie nor stopped."""
        return self.state(pid) in ("R", "S", "D")

    def others(self) -> set[int]:
        """What runs in the sandbox beside the agent, or was killed and is not dead yet: pids outside the sandbox."""
        found, looked = {self._pid()}, set[int]()
        living = set[int]()
        while found - looked:
            pid = (found - looked).pop()
            looked.add(pid)
            with suppress(OSError):  # it has ended
                if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X"):
                    living.add(pid)
                for children in Path(f"/proc/{pid}/task").glob("*/children"):
                    found.update(map(int, children.read_text().split()))
        return living - {self._pid()}

    def zombies(self) -> list[str]:
        """The zombies among the agent's children."""
        agent = "1" if self._where == "bwrap" else str(self.process.pid)
        script = f"cat /proc/[0-9]*/stat 2>/dev/null | grep -E '\\) Z {agent} ' || :"
        return self.run(script).splitlines()

    def wait_until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"still not: {what}"
            time.sleep(0.005)
