"""The supervisor's end of the control socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable

from agentenv.errors import ProtocolError
from agentenv.sandbox.control_protocol import (
    MAX_PACKET_BYTES,
    Joined,
    Request,
    SupervisorPacket,
    encode,
    parse_request,
)
from agentenv.sandbox.slotagent import protocol


class ServerLink:
    """Queued packets out, checked requests in.

    ``on_request`` gets each request; ``on_broken`` is called once with the reason when the link fails (EOF, or a
    packet that violates the contract).
    """

    def __init__(
        self, sock: socket.socket, slots: int, on_request: Callable[[Request], None], on_broken: Callable[[str], None]
    ) -> None:
        self._sock = sock
        self._slots = slots
        self._on_request = on_request
        self._on_broken = on_broken
        self._queue: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._received = Joined()
        self._loop = asyncio.get_running_loop()
        self._open = True
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._read)

    def send(self, packet: SupervisorPacket, *fds: int) -> None:
        """Queue one packet. ``fds`` are duplicated, so the caller may close its own at any time. Raises ConfigError
        when the packet is too large."""
        if self._open:
            *before, last = encode(packet)
            self._queue.extend((piece, ()) for piece in before)
            self._queue.append((last, tuple(map(os.dup, fds))))
            self._flush()

    def drain(self) -> None:
        """Read what the (dead) server had sent, then :meth:`close`: its messages about leases still hold."""
        while self._open and self._read():
            pass
        self.close()

    def close(self) -> None:
        """Stop for good. May be called again."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        while self._queue:
            _, fds = self._queue.popleft()
            for fd in fds:
                os.close(fd)

    def _flush(self) -> None:
        while self._queue:
            packet, fds = self._queue[0]
            try:
                protocol.send(self._sock, packet, fds)
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._flush)
                return
            except OSError as error:
                self._break(f"the control socket: {error}")
                return
            self._queue.popleft()
            for fd in fds:
                os.close(fd)
        self._loop.remove_writer(self._sock.fileno())

    def _read(self) -> bool:
        """Take one packet; whether there was one."""
        try:
            packet = self._sock.recv(MAX_PACKET_BYTES + 1)  # descriptors sent along are dropped by the kernel
        except BlockingIOError:
            return False
        except OSError as error:
            self._break(f"the control socket: {error}")
            return False
        if not packet:
            self._break("it closed its control socket")
            return False
        try:
            text = self._received.add(packet)
            request = None if text is None else parse_request(text, self._slots)
        except ProtocolError as error:
            self._break(error.message)
            return False
        if request is not None:
            self._on_request(request)
        return True

    def _break(self, reason: str) -> None:
        self.close()
        self._on_broken(reason)
