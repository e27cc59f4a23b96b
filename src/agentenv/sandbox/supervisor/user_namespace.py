"""The user namespace of an image slot, in which it has root, without rights over ids outside: 65,536 ids of its own, or
the few that all image slots have where the container itself has few."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.deadlines import scaled
from agentenv.errors import SandboxUnavailableError
from agentenv.sandbox.supervisor import child
from agentenv.sandbox.supervisor.reaper import Reaper, end_of, readable

IDS: Final = 65_536
FIRST_ID: Final = 0x7000_0000
"""Ids from here to 0x7FFFFFFF are for slots: above those of users, of systemd's containers (which end at 0x6FFF0000,
https://systemd.io/UIDS-GIDS) and of newuidmap's common ranges, and below 2^31, which some programs take as negative."""
RANGES: Final = (0x8000_0000 - FIRST_ID) // IDS
TREES: Final = RANGES - 1
"""The number of the range under which unpacked images lie in a store, which no slot gets unless all share it."""
LEAN_IDS: Final = 2_000
"""Ids from 0 on in a lean map: all that distributions give to system users and first users, except nobody's."""
FIRST_LEAN_ID: Final = 12_000
"""Ids from here to 14,000 are those of a lean map: above the server's and the proxy's, below those of plain slots
(isolation.py)."""
NOBODY: Final = 65_534
_SOCKET_FD: Final = 3
_DEADLINE_S: Final = scaled(10.0)


@dataclass(frozen=True)
class IdRange:
    """Ids of one slot on this machine: 0 to 65,535 inside are ``first`` and the following ones outside."""

    number: int

    @property
    def first(self) -> int:
        """The id outside of the slot's root."""
        return FIRST_ID + IDS * self.number

    @property
    def maps(self) -> str:
        """As in ``/proc/PID/uid_map``."""
        return f"0 {self.first} {IDS}\n"

    count = IDS
    users = IDS


@dataclass(frozen=True)
class LeanIds:
    """The ids of all image slots of a container that is in a user namespace with few: 0 to 1,999 and nobody's inside,
    ``first`` and the following ones outside."""

    first = FIRST_LEAN_ID
    count = LEAN_IDS + 1
    users = LEAN_IDS

    @property
    def maps(self) -> str:
        """As in ``/proc/PID/uid_map``."""
        return f"0 {self.first} {LEAN_IDS}\n{NOBODY} {self.first + LEAN_IDS} 1\n"


@dataclass(frozen=True)
class OneId:
    """The only id of a plain slot, of user and group."""

    first: int

    @property
    def maps(self) -> str:
        """As in ``/proc/PID/uid_map``."""
        return f"0 {self.first} 1\n"

    count = 1


ImageIds = IdRange | LeanIds
"""``first`` is the id outside of the slot's root; ``count`` as many follow each other outside, with it; all ids inside
are less than ``users``, or nobody's."""
Ids = ImageIds | OneId
IDS_OF_TREES: Final = IdRange(TREES)


async def make_user_namespace(
    program: Path, ids: Ids, reaper: Reaper, *, shown: Ids | None = None, nested: bool = False
) -> int:
    """A descriptor of a new user namespace, owned by the range's root; nothing lives in it. ``program`` is slotroot.

    ``shown``: instead of a slot's own map, one that shows files written under those ids as files of ``ids``, for the
    mounts of frozen layers. ``nested``: user namespaces may be made in it. Raises SandboxUnavailableError, OSError.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours:
        with theirs:
            arguments = [str(program), "userns", str(ids.first), *(["nested"] if nested else [])]
            pid = _spawn(arguments, theirs.fileno())
            exited = reaper.watch(pid)
        maps = ids.maps if shown is None else f"{shown.first} {ids.first} {ids.count}\n"
        namespace = await _hand_over(ours, pid, maps)
        try:
            async with asyncio.timeout(_DEADLINE_S):
                status = await asyncio.shield(exited)
            if status != 0:
                raise SandboxUnavailableError(f"a user namespace could not be created: {end_of(status)}")
        except BaseException:
            os.close(namespace)
            raise
        return namespace


def _spawn(arguments: Sequence[str], socket_fd: int) -> int:
    return os.posix_spawn(
        arguments[0],
        list(arguments),
        {},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, socket_fd, _SOCKET_FD),
        ],
        setsigmask=(),
        setsigdef=child.IGNORED_BY_PYTHON,
    )


async def _hand_over(ours: socket.socket, pid: int, maps: str) -> int:
    """Receive the namespace, write its maps while its maker waits in it, and let that end."""
    ours.setblocking(False)
    await readable(ours.fileno(), _DEADLINE_S)
    _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if not descriptors:
        raise SandboxUnavailableError("a user namespace could not be created: no descriptor was received")
    (namespace,) = descriptors
    try:
        fcntl.fcntl(namespace, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        for name in ("uid_map", "gid_map"):
            fd = os.open(f"/proc/{pid}/{name}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, maps.encode())
            finally:
                os.close(fd)
        ours.send(b"m")
    except BaseException:
        os.close(namespace)
        raise
    return namespace
