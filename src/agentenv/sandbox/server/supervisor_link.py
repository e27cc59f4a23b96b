"""The server's end of the control socket: packets from the supervisor, requests to it."""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentenv.errors import ProtocolError
from agentenv.sandbox.control_protocol import (
    MAX_PACKET_BYTES,
    Connect,
    Connected,
    Drop,
    Export,
    Exported,
    Fence,
    Freeze,
    Hello,
    Joined,
    NotFrozen,
    Ping,
    Pong,
    Remember,
    Request,
    Reroot,
    Reset,
    Seal,
    Serving,
    SlotFailed,
    SlotLost,
    SlotReady,
    SlotRefused,
    Unattended,
    encode,
    parse_supervisor_packet,
)
from agentenv.wire.roots import MAX_SERVICES

_FD_BYTES = array.array("i").itemsize


@dataclass(frozen=True)
class LayerHandedOver:
    """A layer of a checkpoint: the pipe with its tar."""

    exported: Exported
    pipe: int


@dataclass(frozen=True)
class SlotHandedOver:
    """A usable slot, and the sockets to its agents, which the receiver closes: its main root's, and its services' by
    name."""

    ready: SlotReady
    agents: Mapping[str, socket.socket]


Received = (
    Hello
    | SlotHandedOver
    | LayerHandedOver
    | Exported
    | SlotFailed
    | SlotRefused
    | NotFrozen
    | Connected
    | SlotLost
    | Pong
)


class SupervisorLink:
    """The control socket, owned by this object. Replies to requests are later packets."""

    def __init__(self, sock: socket.socket, on_full: Callable[[], None] = lambda: None) -> None:
        """``on_full`` is called when packets wait for room; :meth:`flush` when there may be some."""
        sock.setblocking(False)
        self._sock = sock
        self._on_full = on_full
        self._unsent: deque[bytes] = deque()
        self._received = Joined()
        self._pinged_at_s: float | None = None

    def fileno(self) -> int:
        """For polling."""
        return self._sock.fileno()

    def receive(self) -> Received | None:
        """The next packet; None when the supervisor is gone. Raises BlockingIOError when there is none yet, or not all
        of it; ProtocolError for anything malformed (no descriptor leaks)."""
        while True:
            packet, ancillary, flags, _ = self._sock.recvmsg(
                MAX_PACKET_BYTES, socket.CMSG_SPACE((2 + MAX_SERVICES) * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
            )
            fds = tuple(_descriptors(ancillary))
            if not packet:
                return None
            try:
                if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                    raise ProtocolError("the supervisor sent a packet that is too large")
                text = self._received.add(packet)
                if text is not None:
                    return _received(text, fds)
                if fds:
                    raise ProtocolError("the supervisor sent descriptors with a part of a packet")
            except ProtocolError:
                for fd in fds:
                    os.close(fd)
                raise

    def ping(self, now_s: float) -> None:
        """Check that the supervisor answers, unless the last answer is still pending."""
        if self._pinged_at_s is None:
            self._pinged_at_s = now_s
            self._send(Ping())

    def pong(self) -> None:
        """The supervisor has replied to :meth:`ping`."""
        self._pinged_at_s = None

    def silent_s(self, now_s: float) -> float:
        """Seconds since the unanswered :meth:`ping`."""
        return 0.0 if self._pinged_at_s is None else now_s - self._pinged_at_s

    def serving(self) -> None:
        """Report that the server listens."""
        self._send(Serving())

    def unattended(self) -> None:
        """See :class:`~agentenv.sandbox.control_protocol.Unattended`."""
        self._send(Unattended())

    def reset(self, slot: int, epoch: int) -> None:
        """See :class:`~agentenv.sandbox.control_protocol.Reset`."""
        self._send(Reset(slot, epoch))

    def seal(self, slot: int, epoch: int) -> None:
        """See :class:`~agentenv.sandbox.control_protocol.Seal`."""
        self._send(Seal(slot, epoch))

    def reroot(self, slot: int, epoch: int, root: dict[str, Any]) -> None:
        """See :class:`~agentenv.sandbox.control_protocol.Reroot`."""
        self._send(Reroot(slot, epoch, root))

    def freeze(self, slot: int, epoch: int, checkpoint: str) -> None:
        """See :class:`~agentenv.sandbox.control_protocol.Freeze`."""
        self._send(Freeze(slot, epoch, checkpoint))

    def connect(self, slot: int, epoch: int, network: dict[str, Any]) -> None:
        """See :class:`~agentenv.sandbox.control_protocol.Connect`."""
        self._send(Connect(slot, epoch, network))

    def export(self, checkpoint: str, layer: int) -> None:
        """See :class:`~agentenv.sandbox.control_protocol.Export`."""
        self._send(Export(checkpoint, layer))

    def drop(self, checkpoint: str) -> None:
        """See :class:`~agentenv.sandbox.control_protocol.Drop`."""
        self._send(Drop(checkpoint))

    def remember(self, slot: int, epoch: int, lease: dict[str, Any] | None) -> None:
        """See :class:`~agentenv.sandbox.control_protocol.Remember`."""
        self._send(Remember(slot, epoch, lease))

    def fence(self, generation: int) -> None:
        """See :class:`~agentenv.sandbox.control_protocol.Fence`."""
        self._send(Fence(generation))

    def close(self) -> None:
        """Close the socket. Repeatable."""
        self._sock.close()

    def flush(self) -> bool:
        """Send waiting packets, as far as there is room; returns whether none are left."""
        try:
            while self._unsent:
                self._sock.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            return False
        except OSError:
            self._unsent.clear()  # the supervisor is gone: its packets end too, and then the server ends
        return True

    def _send(self, request: Request) -> None:
        self._unsent.extend(encode(request))
        if not self.flush():
            self._on_full()


def _received(packet: bytes, fds: tuple[int, ...]) -> Received:
    """Raises ProtocolError, in which case ``fds`` stay the caller's."""
    message = parse_supervisor_packet(packet)
    if isinstance(message, Exported) and len(fds) == 1:
        return LayerHandedOver(message, fds[0])
    if not isinstance(message, SlotReady):
        if fds:
            raise ProtocolError("the supervisor sent unexpected descriptors")
        return message
    names = ("", *message.services)
    if len(fds) != len(names):
        raise ProtocolError(f"the supervisor sent {len(fds)} descriptors with slot_ready, not {len(names)}")
    return SlotHandedOver(message, {name: socket.socket(fileno=fd) for name, fd in zip(names, fds, strict=True)})


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    descriptors: list[int] = []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.extend(array.array("i", content[: len(content) - len(content) % _FD_BYTES]))
    return descriptors
