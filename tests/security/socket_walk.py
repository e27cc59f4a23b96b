"""Makes every socket that a slot can, and holds as much memory in their buffers as it can: runs inside a slot.

python3 socket_walk.py walk          the sockets that were made, and the errors of the others, as JSON
python3 socket_walk.py hold NAME     fills buffers, prints a line, and keeps them until it is killed
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Final

_MUCH: Final = 700 << 20
_SECONDS: Final = 8.0
_held: list[socket.socket] = []


def walk() -> dict[str, list[list[int | str]]]:
    """``made`` and ``refused``: family, type, protocol, and the error's name, if all protocols had the same one -1."""
    made: list[list[int | str]] = []
    errors: dict[tuple[int, int, str], int] = {}
    for family, kind, protocol in itertools.product(range(46), (1, 2, 3, 4, 5, 6, 10), (*range(256), 256, 262)):
        try:
            socket.socket(family, kind, protocol).close()
        except OSError as error:
            name = errno.errorcode[error.errno or 0]
            errors[family, kind, name] = errors.get((family, kind, name), 0) + 1
        else:
            made.append([family, kind, protocol])
    return {"made": made, "refused": [[family, kind, name] for family, kind, name in errors]}


def _keep(made: socket.socket) -> socket.socket:
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        made.setsockopt(socket.SOL_SOCKET, option, 8 << 20)
    made.setblocking(False)
    _held.append(made)
    return made


def netlink_between() -> int:
    """Messages from one socket of NETLINK_USERSOCK to others."""
    sender = _keep(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 2))
    sender.bind((0, 0))
    receiver = _keep(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 2))
    receiver.bind((0, 0))
    sent = 0
    with contextlib.suppress(OSError):
        while True:
            sent += sender.sendto(bytes(60_000), (receiver.getsockname()[0], 0))
    return sent


def tcp() -> int:
    """Unread data of a connection."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        one.connect(listening.getsockname())
        _held.append(_keep(listening.accept()[0]))
    _keep(one)
    sent = 0
    with contextlib.suppress(OSError):
        while select.select([], [one], [], 0.01)[1]:
            sent += one.send(bytes(1 << 18))
    return sent


def udp() -> int:
    """Unread datagrams."""
    receiver = _keep(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    receiver.bind(("127.0.0.1", 0))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(200):
            sender.sendto(bytes(40_000), receiver.getsockname())
    return 200 * 40_000


def rings() -> int:
    """The rings of AF_XDP."""
    made = socket.socket(44, socket.SOCK_RAW, 0)
    _held.append(made)
    for option in (2, 3):
        made.setsockopt(283, option, struct.pack("i", 1 << 22))
    return 2 * 16 << 22


def filters() -> int:
    """Machine code of programs of sockets."""
    code = ctypes.create_string_buffer(
        struct.pack("HBBI", 0, 0, 0, 7) + struct.pack("HBBI", 0x34, 0, 0, 3) * 4094 + struct.pack("HBBI", 6, 0, 0, 0)
    )
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HxxxxxxQ", 4096, ctypes.addressof(code)))
    _held.append(made)
    return 95_000


ATTEMPTS: Final[dict[str, Callable[[], int]]] = {
    "netlink": netlink_between, "tcp": tcp, "udp": udp, "rings": rings, "filters": filters,
}  # fmt: skip


def hold(attempt: Callable[[], int]) -> int:
    """Repeat the attempt until it has put enough into buffers, or fails."""
    held, ends = 0, time.monotonic() + _SECONDS
    try:
        while held < _MUCH and time.monotonic() < ends and len(_held) < 2000:
            held += attempt()
    except OSError as error:
        print(errno.errorcode[error.errno or 0], end=" ")
    return held


if __name__ == "__main__":
    if sys.argv[1] == "walk":
        json.dump(walk(), sys.stdout)
    else:
        print("holds", hold(ATTEMPTS[sys.argv[2]]), flush=True)
        time.sleep(600)
