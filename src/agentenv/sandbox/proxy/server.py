"""The proxy of a container: its slots, and the requests of the supervisor about them."""

from __future__ import annotations

import array
import asyncio
import socket
from typing import Final

from agentenv.errors import ProtocolError
from agentenv.sandbox.proxy.packets import (
    MAX_PACKET_BYTES,
    Answer,
    Request,
    encode_answer,
    parse_request,
)
from agentenv.sandbox.proxy.slot import Resources, SlotConnections

_FD_BYTES: Final = array.array("i").itemsize
_TRUNCATED: Final = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)


class Proxy:
    """Serves the slots that it is told of over ``control``, until that closes."""

    def __init__(self, control: socket.socket, resources: Resources) -> None:
        control.setblocking(False)
        self._control = control
        self._resources = resources
        self._slots: dict[int, SlotConnections] = {}

    async def run(self) -> None:
        """Return when the supervisor is gone. Raises ProtocolError when it violates the contract, OSError when the
        control socket fails. Every connection is closed at the end."""
        loop = asyncio.get_running_loop()
        try:
            while (received := await self._receive()) is not None:
                answer = await self._perform(*received)
                await loop.sock_sendall(self._control, encode_answer(answer))
        finally:
            for slot in self._slots.values():
                await slot.aclose()

    async def _receive(self) -> tuple[Request, socket.socket | None] | None:
        """The next request and the listening socket that came with it; None at the end."""
        while True:
            try:
                packet, ancillary, flags, _ = self._control.recvmsg(
                    MAX_PACKET_BYTES, socket.CMSG_SPACE(_FD_BYTES), socket.MSG_CMSG_CLOEXEC
                )
                break
            except BlockingIOError:
                await _readable(self._control)
        if not packet:
            return None
        listeners = [
            socket.socket(fileno=fd)
            for level, kind, content in ancillary
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
            for fd in array.array("i", content[: len(content) - len(content) % _FD_BYTES])
        ]
        try:
            if flags & _TRUNCATED:
                raise ProtocolError("the proxy was sent a packet that is too large")
            request = parse_request(packet)
            if len(listeners) != (request.operation == "add"):
                raise ProtocolError(f"the proxy was sent {len(listeners)} descriptors with {request.operation}")
        except ProtocolError:
            for listener in listeners:
                listener.close()
            raise
        return request, listeners[0] if listeners else None

    async def _perform(self, request: Request, listener: socket.socket | None) -> Answer:
        slot = self._slots.get(request.slot)
        if listener is not None and request.policy is not None:
            if slot is not None:
                listener.close()
                return Answer(request.serial, error=f"slot {request.slot} has been added before")
            self._slots[request.slot] = SlotConnections(request.slot, listener, request.policy, self._resources)
            return Answer(request.serial)
        if slot is None:
            return Answer(request.serial, error=f"slot {request.slot} has not been added")
        if request.policy is not None:
            await slot.change(request.policy)
        elif request.operation == "drop":
            del self._slots[request.slot]
            await slot.aclose()
        return Answer(request.serial, slot.counts)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)
