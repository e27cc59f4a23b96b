"""The sandbox server as the supervisor's child: unprivileged, restarted when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentenv import deadlines
from agentenv.sandbox.control_protocol import Request
from agentenv.sandbox.supervisor import cgroups, mounts, syscalls
from agentenv.sandbox.supervisor.child import EXEC_FAILED, become, reset_signals, take_descriptors
from agentenv.sandbox.supervisor.isolation import USER, Identity
from agentenv.sandbox.supervisor.limits import CgroupPlan
from agentenv.sandbox.supervisor.reaper import Reaper
from agentenv.sandbox.supervisor.server_link import ServerLink

CONTROL_FD = 3
LISTEN_FD = 4

_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/",
    "PYDANTIC_DISABLE_PLUGINS": "__all__",  # it would look for some in the metadata of every installed package
}


def default_argv() -> list[str]:
    """The server under this interpreter. ``-P -s`` keep the working directory and the user's own packages out;
    ``-I`` would too, but it also ignores PYTHONPATH (see :func:`environment`)."""
    return [sys.executable, "-P", "-s", "-B", "-X", "utf8", "-m", "agentenv.sandbox.serve"]


def environment() -> dict[str, str]:
    """The server's whole environment; nothing of the caller's but where packages are imported from, and how slow the
    machine is."""
    path = os.pathsep.join(map(str, mounts.import_directories()))
    factor = {} if deadlines.TIME_FACTOR == 1 else {deadlines.VARIABLE: f"{deadlines.TIME_FACTOR:g}"}
    return {**_ENVIRONMENT, **factor, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True)
class ServerSetup:
    """Parameters for every server process of a container."""

    argv: Sequence[str]
    identity: Identity
    listener: socket.socket
    private: Path
    plan: CgroupPlan | None


@dataclass
class ServerProcess:
    """One server process."""

    pid: int
    exited: asyncio.Future[int]
    link: ServerLink
    serving: asyncio.Event = field(default_factory=asyncio.Event)

    def kill(self) -> None:
        """SIGKILL it; ``exited`` reports its end."""
        self.link.close()
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def start(
    setup: ServerSetup,
    slots: int,
    reaper: Reaper,
    on_request: Callable[[Request], None],
    on_broken: Callable[[str], None],
) -> ServerProcess:
    """Fork the server. It has not reported yet: ``serving`` is set by the caller."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        _become_server(setup, theirs)
    exited = reaper.watch(pid)
    theirs.close()
    return ServerProcess(pid, exited, ServerLink(ours, slots, on_request, on_broken))


def _become_server(setup: ServerSetup, control: socket.socket) -> None:
    """In the forked child: enter its cgroup, its own mount namespace, its uid. Never returns."""
    try:
        if setup.plan is not None:
            cgroups.join(setup.plan)
        take_own_view(setup.identity, setup.private)
        _take_descriptors(control.fileno(), setup.listener.fileno())
        reset_signals()
        os.chdir("/")
        become(setup.identity, setup.identity.server_uid, setup.identity.server_uid)
        numbers = ["--control-fd", str(CONTROL_FD), "--listen-fd", str(LISTEN_FD)]
        os.execve(setup.argv[0], [*setup.argv, *numbers], environment())  # noqa: S606
    except BaseException as error:
        os.write(2, f"starting the server: {error}\n".encode())
    finally:
        os._exit(EXEC_FAILED)


def take_own_view(identity: Identity, private: Path) -> None:
    """In a forked child: enter a mount namespace without the slots' mounts (below ``private``), in which the
    interpreter can be reached.

    A copy of a workspace's mount would also keep its memory alive after the reset that discards it.
    """
    mounts.enter_private_namespace()
    syscalls.umount(str(private), syscalls.MNT_DETACH)
    if identity.mode != USER:
        mounts.show_to_everybody(mounts.unreachable(mounts.interpreter_directories()))


def _take_descriptors(control: int, listener: int) -> None:
    """stdin is empty; stdout goes to the log, because our own stdout carries events."""
    take_descriptors({0: None, 1: 2, 2: 2, CONTROL_FD: control, LISTEN_FD: listener})
