"""A machine that runs: booted from a disk that is not changed, reached by ssh, as people reach theirs."""

from __future__ import annotations

import functools
import os
import shlex
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from hosts.disk import Disk

MEMORY_MIB: Final = 6144
BOOT_S: Final = 600.0
_LOOK_S: Final = 2.0
_TRY_S: Final = 20.0
_KVM: Final = ("-accel", "kvm", "-cpu", "max,-arch-capabilities")
_EMULATED: Final = ("-accel", "tcg,thread=multi,tb-size=1024", "-cpu", "max")


@functools.cache
def accelerated(kernel: Path) -> bool:
    """Whether this machine's processor runs guests; where it does not they are emulated, 10 to 20 times slower. Tried
    with this kernel, which has no disk and ends at once: a KVM that is there may not work."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    command = ["qemu-system-x86_64", *_KVM, "-m", "512", "-display", "none", "-no-reboot", "-kernel", str(kernel)]
    try:
        done = subprocess.run(
            [*command, "-append", "panic=-1"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TRY_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


@dataclass(frozen=True)
class Done:
    """A command that ended. ``output``: what it printed, on either stream, in order."""

    code: int
    output: str
    seconds: float


@dataclass
class Machine:
    """A context manager. What is written to the disk is gone afterwards. ``kernel``: more words of its command line;
    ``console``: where what the guest prints is kept."""

    disk: Disk
    console: Path
    kernel: str = ""
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
            "qemu-system-x86_64", *(_KVM if self.time_factor == 1 else _EMULATED),
            "-smp", "2", "-m", str(MEMORY_MIB), "-display", "none",
            "-no-reboot", "-kernel", str(self.disk.kernel), "-initrd", str(self.disk.initrd),
            "-append", f"console=ttyS0 root=/dev/vda rw panic=1 quiet {self.kernel}",
            "-serial", f"file:{self.console}", "-snapshot",
            "-drive", f"file={self.disk.image},format=raw,if=virtio,cache=unsafe", "-device", "virtio-rng-pci",
            "-netdev", f"user,id=n,restrict=on,hostfwd=tcp:127.0.0.1:{self._port}-:22",
            "-device", "virtio-net-pci,netdev=n",
        ]  # fmt: skip
        environment = {**os.environ, "TMPDIR": self._space.name}  # where -snapshot keeps what is written
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
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

    def run(self, command: str, *, user: str = "root", within_s: float = 600.0) -> Done:
        """In a login session of this user, with AGENTENV_TIME_FACTOR set for how slow the guest is. 124: not
        ``within_s``."""
        assert self._process is not None
        began = time.monotonic()
        ssh = [
            "ssh", "-q", "-i", str(self.disk.key), "-p", str(self._port), "-o", "StrictHostKeyChecking=no",
            "-o", "UserKnownHostsFile=/dev/null", "-o", "ConnectTimeout=60", "-o", "ServerAliveInterval=30",
            "-o", "SendEnv=AGENTENV_TIME_FACTOR", f"{user}@127.0.0.1",
        ]  # fmt: skip
        environment = {**os.environ, "AGENTENV_TIME_FACTOR": str(self.time_factor)}
        limited = f"timeout --kill-after=30 {within_s:g} bash -c {shlex.quote(command)}"
        done = subprocess.run(
            [*ssh, limited], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env=environment, check=False,
        )  # fmt: skip
        text = done.stdout.decode(errors="replace")
        return Done(done.returncode, text, time.monotonic() - began)

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
