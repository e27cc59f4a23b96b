"""The machine: QEMU, what it is started with, and whether this processor runs guests."""

from __future__ import annotations

import functools
import logging
import os
import platform
import shutil
import signal
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from agentenv.deadlines import TIME_FACTOR
from agentenv.errors import ConfigError, SandboxUnavailableError
from agentenv.sandbox.machine.guest import ADDRESS, KERNEL_WORDS, PORT
from agentenv.sandbox.supervisor import syscalls

PROGRAM: Final = "qemu-system-x86_64"
KVM: Final = ("-accel", "kvm", "-cpu", "max,-arch-capabilities,vmx=off,svm=off,pmu=off")
"""No machines within it and no counters of the processor, where most escapes were found. arch-capabilities: not every
host's KVM can show it, and then QEMU does not start."""
EMULATED: Final = ("-accel", "tcg,thread=multi,tb-size=1024", "-cpu", "max")
_MACHINE: Final = "q35,vmport=off,smbus=off,sata=off,usb=off,dump-guest-core=off"
"""Without the devices of an old PC; a QEMU that crashes leaves no memory of its guest on a disk."""
KERNEL, INITRD, ROOT = "vmlinuz", "initrd", "root.ext4"
FILES: Final = (KERNEL, INITRD, ROOT)
"""Of a machine's image, a directory."""
_TRY_S: Final = 20.0
_EMULATED_FACTOR: Final = 10.0
"""The time factor by which emulation is accepted: about what it costs."""

log = logging.getLogger("machine")


@functools.cache
def why_emulated(kernel: Path) -> str:
    """Why this machine's processor does not run guests, which then are emulated, 10 to 20 times slower; empty: it does.
    Tried with this kernel, which has no disk and ends at once: a KVM that is there may not work."""
    kvm = Path("/dev/kvm")
    if not kvm.exists():
        return f"{kvm} does not exist"
    if not os.access(kvm, os.R_OK | os.W_OK):
        return f"this user may not open {kvm} (its group is {kvm.stat().st_gid})"
    command = [PROGRAM, *KVM, "-m", "512", "-display", "none", "-no-reboot", "-kernel", str(kernel)]
    try:
        done = subprocess.run(
            [*command, "-append", "panic=-1"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TRY_S,
            check=False,
            preexec_fn=partial(syscalls.die_with_parent, signal.SIGKILL),
        )
    except OSError as error:
        return f"{PROGRAM} cannot be started: {error}"
    except subprocess.TimeoutExpired:
        return f"a test guest did not exit within {_TRY_S:g} s"
    words = done.stderr.decode(errors="replace").strip()[-300:]
    return f"{PROGRAM} ended with {done.returncode}: {words}" if done.returncode else ""


def accelerated(kernel: Path) -> bool:
    """Whether guests are not emulated."""
    return not why_emulated(kernel)


def check(image: Path) -> None:
    """Raise ConfigError or SandboxUnavailableError where a machine of this image could not run, or would be emulated
    and no setting says that this is expected."""
    for name in FILES:
        if not (image / name).is_file():
            raise ConfigError("image", f"{image} has no {name}", next_step=f"agentenv image machine {image}")
    if platform.machine() != "x86_64":
        raise SandboxUnavailableError(
            f"virtual machines need x86_64, and this is {platform.machine()}",
            next_step="use another driver",
        )
    if shutil.which(PROGRAM) is None:
        raise SandboxUnavailableError(f"{PROGRAM} is not installed", next_step="apt-get install qemu-system-x86")
    if why := why_emulated(image / KERNEL):
        if TIME_FACTOR < _EMULATED_FACTOR:
            raise SandboxUnavailableError(
                f"KVM does not work here, so a virtual machine would be emulated, 10 to 20 times slower: {why}",
                next_step="use another driver, or accept it: AGENTENV_TIME_FACTOR=10 (docs/machines.md)",
            )
        log.warning("this machine is emulated, 10 to 20 times slower: %s", why)


@dataclass(frozen=True)
class Machine:
    """``image``: the directory; ``files``: descriptors of what is in it, in the order of :data:`FILES`, because QEMU's
    user need not reach it. ``job`` and ``events``: descriptors, of the guest's second disk and of a connected socket
    that is its second serial line; the first one is QEMU's standard output."""

    image: Path
    files: tuple[int, ...]
    memory_mib: int
    cpus: int
    host: str
    port: int
    job: int
    events: int

    @property
    def command(self) -> list[str]:
        """Nothing of the host is in it: no shared directory, no network but the one port that is forwarded in."""
        kernel, initrd, root, job = (f"/proc/self/fd/{number}" for number in (*self.files, self.job))
        return [
            PROGRAM, *(KVM if accelerated(self.image / KERNEL) else EMULATED),
            "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
            "-machine", _MACHINE, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
            "-smp", str(self.cpus), "-m", str(self.memory_mib),
            "-kernel", kernel, "-initrd", initrd, "-append", KERNEL_WORDS,
            "-serial", "stdio",
            "-chardev", f"socket,id=events,fd={self.events}", "-serial", "chardev:events",
            "-drive", f"file={root},format=raw,if=virtio,readonly=on",
            "-drive", f"file={job},format=raw,if=virtio,readonly=on",
            "-device", "virtio-rng-pci",
            "-netdev", f"user,id=net,restrict=on,hostfwd=tcp:{self.host}:{self.port}-{ADDRESS}:{PORT}",
            "-device", "virtio-net-pci,netdev=net",
        ]  # fmt: skip
