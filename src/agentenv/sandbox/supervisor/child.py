"""Children of the supervisor: how they are started, and their steps between fork and exec."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Mapping, Sequence

from agentenv.sandbox.supervisor import syscalls
from agentenv.sandbox.supervisor.isolation import USER, Identity

IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
FIRST_SPARE_FD = 16
"""Lower descriptors are those a child is given; :func:`reserve_low_descriptors` keeps them free."""
EXEC_FAILED = 127


def reserve_low_descriptors() -> None:
    """Make every descriptor opened from now on larger than those given to children, so that passing one on never
    overwrites another. The descriptors opened here are closed by every exec."""
    while os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) < FIRST_SPARE_FD:
        pass


def take_descriptors(wanted: dict[int, int | None]) -> None:
    """Make each key a copy of its value (None: /dev/null), whatever the values' numbers are."""
    null = os.open(os.devnull, os.O_RDWR)
    parked = {}
    for number, fd in wanted.items():
        parked[number] = _dup_above(null if fd is None else fd)
    for number, fd in parked.items():
        os.dup2(fd, number, inheritable=True)


def _dup_above(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_SPARE_FD)


def spawn(arguments: Sequence[str], descriptors: Mapping[int, int], error_fd: int) -> int:
    """Start a program with these descriptors (its number: ours) and no environment; returns its pid."""
    return os.posix_spawn(
        arguments[0],
        list(arguments),
        {},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, error_fd, 1),
            (os.POSIX_SPAWN_DUP2, error_fd, 2),
            *((os.POSIX_SPAWN_DUP2, ours, number) for number, ours in descriptors.items()),
        ],
        setsigmask=(),
        setsigdef=IGNORED_BY_PYTHON,
    )


def reset_signals() -> None:
    """Restore the defaults that Python or our blocking changed and an exec would pass on."""
    for number in (*IGNORED_BY_PYTHON, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def become(identity: Identity, uid: int, gid: int) -> None:
    """Drop all privileges permanently: groups, uid, capabilities."""
    if identity.mode != USER:
        syscalls.drop_bounding_capabilities()
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    syscalls.clear_capabilities()
    syscalls.set_no_new_privileges()
