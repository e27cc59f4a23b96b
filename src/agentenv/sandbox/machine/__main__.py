"""``python -m agentenv.sandbox.machine SPEC.json --image DIR [--lifeline]``: one container, in a virtual machine.

It reads the same file, prints the same `ready` or `failed` and ends on the same requests as ``python -m
agentenv.sandbox``, which it runs in the guest. However it dies, the kernel then kills QEMU and with it everything in
the container.
"""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

from agentenv.errors import AgentEnvError, ConfigError, SandboxUnavailableError
from agentenv.sandbox.machine import guest
from agentenv.sandbox.machine.qemu import FILES, Machine, check
from agentenv.sandbox.machine.running import Running
from agentenv.sandbox.supervisor import events, isolation, syscalls
from agentenv.sandbox.supervisor.launch import check_lifeline, listen, read_token
from agentenv.wire.spec import MIB, SandboxSpec, check_machine

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_OWN_MIB: Final = 512
"""Of a guest's memory: kernel, supervisor, server."""
_KERNEL_PART: Final = 32
"""A kernel describes each page of 4096 bytes in 64, which is 1/64; twice that, for what else grows with memory."""
_NOBODY: Final = 65534
_MOST_CPUS: Final = 64
"""Of a guest, whatever the host has: more are of no use to one container, and each takes memory of the kernel's."""


def main(arguments: Sequence[str]) -> int:
    """Run one container to its end; returns its exit code (0 stopped on request, 2 failed)."""
    parser = argparse.ArgumentParser(prog="python -m agentenv.sandbox.machine")
    parser.add_argument("spec", type=Path, help="the container's specification (JSON)")
    parser.add_argument("--image", type=Path, required=True, help="the directory that `agentenv image machine` made")
    parser.add_argument("--lifeline", action="store_true", help="stop when standard input reaches EOF")
    options = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s machine %(levelname)s %(message)s")
    try:
        if options.lifeline:
            check_lifeline()
        spec = SandboxSpec.load(options.spec)
        check_machine(spec)
        return _run(spec, options.image, lifeline=options.lifeline)
    except AgentEnvError as error:
        return events.emit_failure(error)
    except OSError as error:
        return events.emit_failure(SandboxUnavailableError(f"the machine could not be started: {error}"))


def _run(spec: SandboxSpec, image: Path, *, lifeline: bool) -> int:
    try:
        ipaddress.IPv4Address(spec.host)
    except ValueError as error:
        raise ConfigError("host", str(error), next_step="QEMU forwards a port of an IPv4 address") from error
    token = read_token(Path(spec.token_file))
    stops = _signalled()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        job = guest.job(spec, token)
        with listen(spec.host, spec.port) as tried:  # so that a port that is taken is named; QEMU listens itself
            port: int = tried.getsockname()[1]
        check(image)
        files = tuple(os.open(image / name, os.O_RDONLY | os.O_CLOEXEC) for name in FILES)
        machine = Machine(image, files, _memory_mib(spec), _cpus(), spec.host, port, job, theirs.fileno())
        process = _start(machine, _user(spec))
        for descriptor in (job, *files):
            os.close(descriptor)
        theirs.close()
        return Running(process, ours, port).until_its_end(stops, lifeline=lifeline)


def _memory_mib(spec: SandboxSpec) -> int:
    """What all slots can use at once, and its checkpoints, and what its kernel needs to have so much: memory that was
    never used is not taken from the host."""
    used_mib = -(-(spec.slots * spec.limits.memory_bytes + spec.checkpoint_bytes) // MIB)
    return used_mib + used_mib // _KERNEL_PART + _OWN_MIB


def _cpus() -> int:
    return min(len(os.sched_getaffinity(0)), _MOST_CPUS)


def _signalled() -> socket.socket:
    """Readable once this process has to stop."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach())
    for number in _SIGNALS:
        signal.signal(number, _woken)
    return reader


def _woken(number: int, frame: FrameType | None) -> None:
    """A signal has a byte on the wakeup descriptor, which is its only purpose."""


def _user(spec: SandboxSpec) -> dict[str, Any]:
    """The uid of QEMU: one that nothing else has, where root starts it. Nomad's clients have a block of uids for each
    container, which slots in a guest do not use."""
    if os.geteuid() != 0:
        return {}
    uid = isolation.first_uid(spec.uid_block) if spec.uid_block >= 0 else _NOBODY
    kvm = [Path("/dev/kvm").stat().st_gid] if Path("/dev/kvm").exists() else []
    return {"user": uid, "group": uid, "extra_groups": kvm}


def _start(machine: Machine, user: dict[str, Any]) -> subprocess.Popen[bytes]:
    ours = os.getpid()

    def before_qemu() -> None:
        syscalls.die_with_parent(signal.SIGKILL)
        if os.getppid() != ours:  # we have died in between
            os._exit(1)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one per connection

    try:
        return subprocess.Popen(
            machine.command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            pass_fds=(machine.job, machine.events, *machine.files),
            **user,
            start_new_session=True,  # what is sent to our group is for us: QEMU would end without asking the guest
            preexec_fn=before_qemu,  # noqa: PLW1509 - there is one thread
        )
    except OSError as error:
        raise SandboxUnavailableError(
            f"QEMU could not be started: {error}", next_step="apt-get install qemu-system-x86"
        ) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
