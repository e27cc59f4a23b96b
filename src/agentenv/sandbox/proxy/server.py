"""The process of one slot's proxy, and the requests of the supervisor about it."""

from __future__ import annotations

import array
import asyncio
import dataclasses
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from agentenv.errors import ProtocolError
from agentenv.sandbox.loop_watch import LoopWatch
from agentenv.sandbox.proxy.names import LOOKUPS_AT_ONCE, system_lookup
from agentenv.sandbox.proxy.packets import (
    MAX_PACKET_BYTES,
    Answer,
    Request,
    encode_answer,
    parse_request,
)
from agentenv.sandbox.proxy.slot import Resources, SlotConnections
from agentenv.wire.addresses import Network

_FD_BYTES: Final = array.array("i").itemsize
_TRUNCATED: Final = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)


def serve(control: socket.socket, slot: int, closed: Callable[[], list[Network]], connections: int) -> None:
    """Serve one slot until the supervisor closes its end. Raises ProtocolError, OSError as :meth:`Proxy.run`."""
    threads = ThreadPoolExecutor(LOOKUPS_AT_ONCE, thread_name_prefix="names")
    resources = Resources(system_lookup, threads, closed, connections)
    with (
        LoopWatch(f"proxy of slot {slot}") as watch,
        asyncio.Runner(loop_factory=watch.new_loop) as runner,
    ):
        runner.run(Proxy(control, slot, resources, watch).run())


class Proxy:
    """Serves a slot when it is given its listening socket over ``control``, until that closes."""

    def __init__(self, control: socket.socket, slot: int, resources: Resources, watch: LoopWatch) -> None:
        control.setblocking(False)
        self._control = control
        self._slot = slot
        self._resources = resources
        self._watch = watch
        self._connections: SlotConnections | None = None

    async def run(self) -> None:
        """Send this process's pidfd, then perform requests. Returns when the supervisor has ended. Raises
        ProtocolError when it violates the contract, OSError when the control socket fails. Every connection is closed
        at the end."""
        self._watch.begin()
        loop = asyncio.get_running_loop()
        this = os.pidfd_open(os.getpid())
        socket.send_fds(self._control, [encode_answer(Answer(0))], [this])
        os.close(this)
        try:
            while (received := await self._receive()) is not None:
                answer = await self._perform(*received)
                await loop.sock_sendall(self._control, encode_answer(answer))
        finally:
            if self._connections is not None:
                await self._connections.aclose()

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
                raise ProtocolError("the proxy received a packet that is too large")
            request = parse_request(packet)
            if len(listeners) != (request.operation == "add"):
                raise ProtocolError(f"the proxy received {len(listeners)} descriptors with {request.operation}")
        except ProtocolError:
            for listener in listeners:
                listener.close()
            raise
        return request, listeners[0] if listeners else None

    async def _perform(self, request: Request, listener: socket.socket | None) -> Answer:
        if listener is not None and request.policy is not None:
            if self._connections is not None:
                listener.close()
                return Answer(request.serial, error="it has a listening socket already")
            self._connections = SlotConnections(self._slot, listener, request.policy, self._resources)
        if self._connections is None:
            return Answer(request.serial, error="it has no listening socket yet")
        if request.operation == "change" and request.policy is not None:
            await self._connections.change(request.policy)
        stalls = self._watch.stalls().count
        return Answer(request.serial, dataclasses.replace(self._connections.counts, stalls=stalls))


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)
