"""Our end of the socket a shell reads its commands from."""

from __future__ import annotations

import socket
from collections.abc import Callable

from agentenv.sessions.port import Host

_READ_BYTES = 16 * 1024


class Typist:
    """Types as fast as the shell reads, and hears what it answers. Owns the socket."""

    def __init__(self, host: Host, sock: socket.socket, heard: Callable[[bytes], None]) -> None:
        sock.setblocking(False)
        self._host = host
        self._sock = sock
        self._heard = heard
        self._unsent = bytearray()
        self._closed = False
        host.watch(sock.fileno(), self._readable)

    def type(self, text: str) -> None:
        """Send it, now or as soon as there is room. What a dead shell is told is nobody's loss."""
        if self._closed or not text:
            return
        data = text.encode("utf-8", "surrogateescape")
        if self._unsent:
            self._unsent += data
            return
        sent = self._send(data)
        if sent < len(data):
            self._unsent += memoryview(data)[sent:]
            self._host.loop.add_writer(self._sock.fileno(), self._writable)

    def close(self) -> None:
        """Repeatable."""
        if not self._closed:
            self._closed = True
            self._stop_writing()
            self._host.unwatch(self._sock.fileno())
            self._sock.close()

    def _send(self, data: bytes | bytearray) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # it has hung up, which is heard of by reading

    def _writable(self) -> None:
        del self._unsent[: self._send(self._unsent)]
        if not self._unsent:
            self._stop_writing()

    def _stop_writing(self) -> None:
        self._unsent.clear()
        self._host.loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        try:
            said = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            self.close()
        self._heard(said)
