"""Listening sockets of services and of forwarded ports, and the URLs to reach them at."""

from __future__ import annotations

import socket

from agentenv.config import cannot_listen


def listen(host: str, port: int, *, prefix: str = "") -> socket.socket:
    """A listening socket; port 0: any free one. Raises ConfigError when it cannot listen there; the setting that it
    names begins with ``prefix``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named: asyncio turns off Nagle's delay (40 ms a call) only for TCP.
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
        opened.listen(1024)
    except (OSError, OverflowError) as error:
        opened.close()
        wrong = error if isinstance(error, OSError) else OSError(str(error))
        raise cannot_listen(wrong, host, port, prefix=prefix) from error
    return opened


def url_of(listening: socket.socket, host: str, scheme: str = "http") -> str:
    """The URL of a service that listens there, for this machine."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"{scheme}://{shown}:{listening.getsockname()[1]}"
