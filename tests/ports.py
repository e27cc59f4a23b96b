"""Ports that are promised to a server before it starts, or to nobody."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def promised_port() -> Iterator[int]:
    """A free port of 127.0.0.1 that no other process gets by chance. Whoever asks for it by its number, with
    SO_REUSEADDR as servers do, can listen there again and again; else connections to it are refused."""
    with socket.socket() as held:  # bound, but it never listens: that would keep the server out as well
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
