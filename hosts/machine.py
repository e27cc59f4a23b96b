"""A machine that runs: booted from a disk that is not changed, reached by ssh, as people reach theirs."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from agentenv.sandbox.machine.qemu import EMULATED, KVM, PROGRAM, accelerated
from agentenv.sandbox.supervisor import syscalls
from hosts.disk import Disk

MEMORY_MIB: Final = 6144
BOOT_S: Final = 600.0
_LOOK_S: Final = 2.0


@dataclass(frozen=True)
class Done:
    """A command that ended. ``output``: what it printed, on either stream, in order."""

    code: int
    output: str
    seconds: float


@dataclass
class Machine:
    """A context manager. What is written to the disk is gone afterwards. ``kernel``: more words of its command line;
    ``console``: where what the guest prints is kept; ``devices``: more words of QEMU's command line. Machines end with
    the thread that opened them."""

    disk: Disk
    console: Path
    kernel: str = ""
    devices: Sequence[str] = ()
    _port: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _space: tempfile.TemporaryDirectory[str] = field(default_factory=lambda: tempfile.TemporaryDirectory("-hosts"))

    @property
    def time_factor(self) -> int:
        """AGENTENV_TIME_FACTOR in it."""
        return 1 if accelerated(self.disk.kernel) else 10

    def __enter__(self) -> Self:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self._port = listening.getsockname()[1]
        command = [
            PROGRAM, *(KVM if self.time_factor == 1 else EMULATED),
            "-smp", "2", "-m", str(MEMORY_MIB), "-display", "none",
            "-kernel", str(self.disk.kernel), "-initrd", str(self.disk.initrd),
            "-append", f"console=ttyS0 root=/dev/vda rw quiet {self.kernel}",
            "-serial", f"file:{self.console}", "-snapshot",
            "-drive", f"file={self.disk.image},format=raw,if=virtio,cache=unsafe", "-device", "virtio-rng-pci",
            "-netdev", f"user,id=n,restrict=on,hostfwd=tcp:127.0.0.1:{self._port}-:22",
            "-device", "virtio-net-pci,netdev=n", *self.devices,
        ]  # fmt: skip
        environment = {**os.environ, "TMPDIR": self._space.name}  # where -snapshot keeps what is written
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=environment,
            preexec_fn=partial(syscalls.die_with_parent, signal.SIGKILL),  # noqa: PLW1509 - no lock is taken
        )
        try:
            self._wait()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def run(self, command: str, *, user: str = "root", within_s: float = 600.0, log: Path | None = None) -> Done:
        """In a login session of this user, with AGENTENV_TIME_FACTOR set for how slow the guest is. 124: not
        ``within_s``. What it prints is at the end of ``log`` as soon as it is printed."""
        assert self._process is not None
        began = time.monotonic()
        ssh = [
            "ssh", "-q", "-i", str(self.disk.key), "-p", str(self._port), "-o", "StrictHostKeyChecking=no",
            "-o", "UserKnownHostsFile=/dev/null", "-o", "ConnectTimeout=60", "-o", "ServerAliveInterval=30",
            "-o", "SendEnv=AGENTENV_TIME_FACTOR", f"{user}@127.0.0.1",
        ]  # fmt: skip
        environment = {**os.environ, "AGENTENV_TIME_FACTOR": str(self.time_factor)}
        limited = f"timeout --kill-after=30 {within_s:g} bash -c {shlex.quote(command)}"
        with tempfile.TemporaryFile() if log is None else log.open("ab+") as output:
            begins = output.seek(0, os.SEEK_END)
            done = subprocess.run(
                [*ssh, limited], stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, env=environment, check=False,
            )  # fmt: skip
            output.seek(begins)
            text = output.read().decode(errors="replace")
        return Done(done.returncode, text, time.monotonic() - began)

    def restart(self) -> None:
        """What was written is there afterwards. Raises RuntimeError as opening does."""
        boot_id = "cat /proc/sys/kernel/random/boot_id"
        before = self.run(boot_id).output
        self.run("systemctl reboot")
        ends = time.monotonic() + BOOT_S
        while time.monotonic() < ends:
            found = self.run(boot_id, within_s=60)
            if found.code == 0 and found.output != before:
                return
            time.sleep(_LOOK_S)
        raise RuntimeError(f"the machine did not start again within {BOOT_S:g} s")

    def _wait(self) -> None:
        """Until somebody can log in. Raises RuntimeError with the console's last lines."""
        assert self._process is not None
        ends = time.monotonic() + BOOT_S
        while time.monotonic() < ends and self._process.poll() is None:
            if self.run("true", within_s=60).code == 0:
                return
            time.sleep(_LOOK_S)
        last = self.console.read_text(errors="replace")[-2000:] if self.console.exists() else ""
        raise RuntimeError(f"nobody could log in within {BOOT_S:g} s. The console says:\n{last}")

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()  # its disk is thrown away
        self._process.wait()
        self._space.cleanup()
