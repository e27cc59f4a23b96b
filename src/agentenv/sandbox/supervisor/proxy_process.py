"""The slots' proxy as the supervisor's child: unprivileged, and started again when it dies."""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentenv.backoff import Backoff
from agentenv.errors import ProtocolError, SandboxUnavailableError
from agentenv.sandbox.proxy.packets import (
    MAX_PACKET_BYTES,
    Answer,
    Counts,
    Operation,
    Request,
    encode_request,
    parse_answer,
)
from agentenv.sandbox.supervisor.child import EXEC_FAILED, become, reset_signals, take_descriptors
from agentenv.sandbox.supervisor.isolation import Identity
from agentenv.sandbox.supervisor.reaper import Reaper, end_of
from agentenv.sandbox.supervisor.server_process import environment, take_own_view
from agentenv.tasks import report_failure
from agentenv.wire.network import NetworkPolicy

log = logging.getLogger(__name__)

ANSWER_DEADLINE_S = 10.0
_ATTEMPTS = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_CONTROL_FD = 3


def default_argv() -> list[str]:
    """The proxy under this interpreter; see :func:`~agentenv.sandbox.supervisor.server_process.default_argv`."""
    return [sys.executable, "-P", "-s", "-B", "-X", "utf8", "-m", "agentenv.sandbox.proxy"]


@dataclass(frozen=True)
class ProxySetup:
    """Parameters for every proxy process of a container. ``closed``: the setting ``closed_networks``."""

    argv: Sequence[str]
    identity: Identity
    private: Path
    slots: int
    closed: Sequence[str]

    def command(self) -> list[str]:
        """Its command line."""
        numbers = ["--control-fd", str(_CONTROL_FD), "--slots", str(self.slots)]
        return [*self.argv, *numbers, *(f"--closed={name}" for name in self.closed)]


@dataclass
class _Running:
    pid: int
    exited: asyncio.Future[int]
    control: socket.socket


class ProxyProcess:
    """The proxy of all slots of a container, whatever process it is at the moment.

    One request at a time. A process that dies, or breaks the contract, is replaced and is told of every slot again:
    connections are lost then, listeners are not.
    """

    def __init__(self, setup: ProxySetup, reaper: Reaper) -> None:
        self._setup = setup
        self._reaper = reaper
        self._running: _Running | None = None
        self._slots: dict[int, tuple[socket.socket, NetworkPolicy]] = {}
        self._asking = asyncio.Lock()
        self._serials = itertools.count(1)
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._recovery: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The present process's; None when there is none."""
        return self._running.pid if self._running and not self._running.exited.done() else None

    async def start(self) -> None:
        """Start it before a slot needs it, which would start it too and wait for it. Raises OSError, ProtocolError."""
        async with self._asking:
            if self.pid is None:
                await self._start()

    async def add(self, slot: int, listener: socket.socket, policy: NetworkPolicy) -> None:
        """Serve the slot at ``listener``, which belongs to the proxy from now on. Returns when it does. Raises
        SandboxUnavailableError when no process does."""
        async with self._asking:
            self._slots[slot] = (listener, policy)
            await self._ask(slot, "add")

    async def change(self, slot: int, policy: NetworkPolicy) -> Counts:
        """Replace the slot's policy. Returns when no connection is left that it does not allow. Raises
        SandboxUnavailableError when no process can be told; the next one will be."""
        async with self._asking:
            self._slots[slot] = (self._slots[slot][0], policy)
            return await self._ask(slot, "change")

    async def count(self, slot: int) -> Counts:
        """The slot's counts since it was added, or since the process started. Raises SandboxUnavailableError."""
        async with self._asking:
            return await self._ask(slot, "count")

    async def drop(self, slot: int) -> None:
        """Close the slot's listener and its connections. Does nothing if it was not added; repeatable."""
        async with self._asking:
            found = self._slots.pop(slot, None)
            if found is None:
                return
            found[0].close()
            if self._running is not None:
                try:
                    await self._exchange(self._running, Request(next(self._serials), "drop", slot))
                except (OSError, ProtocolError) as error:
                    await self._kill(f"{error or type(error).__name__}")  # its copies of the sockets end with it
                    self._start_later()

    async def aclose(self) -> None:
        """End the process and close every listener. Repeatable."""
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.wait([self._recovery])
        async with self._asking:
            await self._kill("")
            for listener, _ in self._slots.values():
                listener.close()
            self._slots.clear()

    async def _ask(self, slot: int, operation: Operation) -> Counts:
        failure = ""
        for _ in range(_ATTEMPTS):
            try:
                if self.pid is None:
                    await self._start()
                    operation = "count"  # it has been told of every slot
                assert self._running is not None
                answer = await self._exchange(self._running, self._request(slot, operation))
                if answer.error:
                    raise ProtocolError(answer.error)
                self._backoff.reset()
                return answer.counts
            except (OSError, ProtocolError) as error:
                failure = str(error) or type(error).__name__
                await self._kill(failure)
                await asyncio.sleep(self._backoff.next_s())
        self._start_later()
        raise SandboxUnavailableError(f"the slots' proxy does not run: {failure}")

    def _request(self, slot: int, operation: Operation) -> Request:
        policy = self._slots[slot][1] if operation in ("add", "change") else None
        return Request(next(self._serials), operation, slot, policy)

    async def _start(self) -> None:
        """Start a process in place of one that ended, if any, and tell it of every slot."""
        await self._kill("")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            pid = os.fork()
            if pid == 0:
                _become_proxy(self._setup, theirs)
        running = _Running(pid, self._reaper.watch(pid), ours)
        self._running = running
        running.exited.add_done_callback(lambda ended: self._ended(running, ended))
        try:
            for slot in self._slots:
                answer = await self._exchange(running, self._request(slot, "add"))
                if answer.error:
                    raise ProtocolError(answer.error)
        except BaseException:
            await self._kill("")
            raise

    async def _exchange(self, running: _Running, request: Request) -> Answer:
        listener = [self._slots[request.slot][0].fileno()] if request.operation == "add" else []
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", listener))] if listener else []
        running.control.sendmsg([encode_request(request)], rights)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            while packet := await loop.sock_recv(running.control, MAX_PACKET_BYTES):
                answer = parse_answer(packet)
                if answer.serial == request.serial:
                    return answer
                if answer.serial > request.serial:
                    raise ProtocolError(f"it answered request {answer.serial} before it was sent")
        raise ProtocolError("it ended")

    async def _kill(self, reason: str) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        if reason:
            log.warning("the slots' proxy is started again: %s", reason)
        running.control.close()
        if not running.exited.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGKILL)
        await asyncio.shield(running.exited)

    def _ended(self, running: _Running, ended: asyncio.Future[int]) -> None:
        if running is self._running and not ended.cancelled():
            log.warning("the slots' proxy ended by itself: %s", end_of(ended.result()))
            self._start_later()

    def _start_later(self) -> None:
        """Its slots wait for another. Those who ask meanwhile start one too, or fail in time."""
        if self._recovery is None or self._recovery.done():
            self._recovery = asyncio.create_task(self._recover(), name="the slots' proxy")
            self._recovery.add_done_callback(report_failure)

    async def _recover(self) -> None:
        while self._slots and self.pid is None:
            await asyncio.sleep(self._backoff.next_s())
            async with self._asking:
                if self._slots and self.pid is None:
                    with contextlib.suppress(OSError, ProtocolError):
                        await self._start()


def _become_proxy(setup: ProxySetup, control: socket.socket) -> None:
    """In the forked child: enter a mount namespace and a uid of its own. Never returns."""
    try:
        take_own_view(setup.identity, setup.private)
        take_descriptors({0: None, 1: 2, 2: 2, _CONTROL_FD: control.fileno()})
        reset_signals()
        os.chdir("/")
        become(setup.identity, setup.identity.proxy_uid, setup.identity.proxy_uid)
        command = setup.command()
        os.execve(command[0], command, environment())  # noqa: S606
    except BaseException as error:
        os.write(2, f"starting the slots' proxy: {error}\n".encode())
    finally:
        os._exit(EXEC_FAILED)
