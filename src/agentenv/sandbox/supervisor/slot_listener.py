"""The socket at which a slot reaches its proxy: made inside the slot's network namespace, served from outside."""

from __future__ import annotations

import errno
import socket
import threading

from agentenv.sandbox.supervisor import syscalls

USUAL_PORT = 3128
_BACKLOG = 1024


def open_listener(namespace_fd: int, port: int = USUAL_PORT) -> socket.socket:
    """A listening TCP socket on 127.0.0.1 of the network namespace. If a process of the slot holds ``port``, it gets
    a free one: ask the socket. It belongs to the namespace and to nobody in it.

    The caller needs CAP_SYS_ADMIN over the namespace, as its owner's parent has, and the loopback device has to be up.
    Raises OSError. A thread of its own enters the namespace, because it could not be sure to come back.
    """
    made: list[socket.socket] = []
    failures: list[OSError] = []

    def make() -> None:
        try:
            syscalls.setns(namespace_fd, syscalls.CLONE_NEWNET)
            made.append(_listening(port))
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=make, name="slot listener")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return made[0]


def _listening(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            listener.bind(("127.0.0.1", 0))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
