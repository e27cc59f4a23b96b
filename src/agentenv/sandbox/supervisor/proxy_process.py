"""The proxies of slots: unprivileged processes, one for each slot, each started again when it dies.

They are forked from one child of the supervisor, the template, which has imported what they need. A slot can hang, kill
or keep busy its own proxy only.
"""

from __future__ import annotations

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

from agentenv.background import report_failure
from agentenv.backoff import Backoff
from agentenv.deadlines import scaled
from agentenv.errors import ProtocolError, SandboxUnavailableError
from agentenv.sandbox.proxy.packets import (
    MAX_PACKET_BYTES,
    Counts,
    Operation,
    Request,
    encode_request,
    parse_answer,
)
from agentenv.sandbox.supervisor.child import EXEC_FAILED, become, reset_signals, take_descriptors
from agentenv.sandbox.supervisor.isolation import Identity
from agentenv.sandbox.supervisor.reaper import Reaper, readable
from agentenv.sandbox.supervisor.server_process import environment, take_own_view
from agentenv.wire.network import NetworkPolicy

log = logging.getLogger(__name__)

ANSWER_DEADLINE_S = scaled(15.0)
_START_DEADLINE_S = scaled(20.0)
"""Of a proxy, and of its template, which imports asyncio first."""
_ATTEMPTS = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_CONTROL_FD = 3


def default_argv() -> list[str]:
    """The template under this interpreter; see :func:`~agentenv.sandbox.supervisor.server_process.default_argv`."""
    return [sys.executable, "-P", "-s", "-B", "-X", "utf8", "-m", "agentenv.sandbox.proxy"]


@dataclass(frozen=True)
class ProxySetup:
    """Parameters for every template of a container. ``closed``: the setting ``closed_networks``."""

    argv: Sequence[str]
    identity: Identity
    private: Path
    slots: int
    closed: Sequence[str]

    def command(self) -> list[str]:
        """Its command line."""
        numbers = ["--control-fd", str(_CONTROL_FD), "--slots", str(self.slots)]
        return [*self.argv, *numbers, *(f"--closed={name}" for name in self.closed)]


class ProxyTemplate:
    """The process that slots' proxies are forked from, started when it is first needed. It reads nothing that a slot
    sends. Proxies outlive it."""

    def __init__(self, setup: ProxySetup, reaper: Reaper) -> None:
        self._setup = setup
        self._reaper = reaper
        self._pid = 0
        self._exited: asyncio.Future[int] | None = None
        self._control: socket.socket | None = None

    async def fork(self, slot: int) -> socket.socket:
        """Fork a proxy for ``slot``; returns the socket that controls it. Raises OSError."""
        if self._exited is None or self._exited.done():
            await self.aclose()
            self._start()
        assert self._control is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            try:
                socket.send_fds(self._control, [b"%d" % slot], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours

    async def aclose(self) -> None:
        """End the process, if there is one. Repeatable."""
        exited, self._exited = self._exited, None
        if self._control is not None:
            self._control.close()
            self._control = None
        if exited is not None:
            if not exited.done():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
            await asyncio.shield(exited)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            self._pid = os.fork()
            if self._pid == 0:
                _become_proxy(self._setup, theirs)
        self._exited = self._reaper.watch(self._pid)
        self._control = ours


@dataclass
class _Running:
    """A slot's proxy. ``pidfd`` comes from itself, before it has read anything of the slot's."""

    control: socket.socket
    pidfd: int
    ended: bool = False


class SlotProxy:
    """The proxy of one slot, whatever process it is at the moment.

    A process that dies, hangs or breaks the contract is replaced by one with the same listener and the present policy:
    its connections are lost then, and no other slot's.
    """

    def __init__(self, template: ProxyTemplate, slot: int, listener: socket.socket, policy: NetworkPolicy) -> None:
        """Passes ``listener`` to the proxy."""
        self._template = template
        self._slot = slot
        self._listener = listener
        self._policy = policy
        self._running: _Running | None = None
        self._asking = asyncio.Lock()
        self._serials = itertools.count(1)
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._recovery: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when the slot is served. Raises SandboxUnavailableError when no process can be started."""
        await self.count()

    @property
    def pid(self) -> int | None:
        """The present process's; None when there is none."""
        if self._running is None or self._running.ended:
            return None
        info = Path(f"/proc/self/fdinfo/{self._running.pidfd}").read_text(encoding="ascii")
        return int(info.partition("Pid:")[2].split()[0])

    async def change(self, policy: NetworkPolicy) -> Counts:
        """Replace the policy. Returns when no connection is left that it does not allow. Raises
        SandboxUnavailableError when no process can be started; the next one will have it."""
        async with self._asking:
            self._policy = policy
            return await self._ask("change")

    async def count(self) -> Counts:
        """The counts since the process was started, which is done if there is none. Raises SandboxUnavailableError."""
        async with self._asking:
            return await self._ask("count")

    async def aclose(self) -> None:
        """End the process, and with it every connection, and close the listener. Repeatable."""
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.wait([self._recovery])
        async with self._asking:
            await self._kill()
            self._listener.close()

    async def _ask(self, operation: Operation) -> Counts:
        failure = ""
        for _ in range(_ATTEMPTS):
            try:
                if self._running is None:
                    counts = await self._start()  # it has the present policy
                else:
                    policy = self._policy if operation == "change" else None
                    counts = await self._exchange(self._running, operation, policy)
                self._backoff.reset()
                return counts
            except (OSError, ProtocolError) as error:
                failure = str(error) or type(error).__name__
                log.warning("restarting the proxy of slot %d: %s", self._slot, failure)
                await self._kill()
                await asyncio.sleep(self._backoff.next_s())
        self._start_later()
        raise SandboxUnavailableError(f"the proxy of slot {self._slot} does not run: {failure}")

    async def _start(self) -> Counts:
        control, pidfd = await self._template.fork(self._slot), -1
        try:
            try:
                await readable(control.fileno(), _START_DEADLINE_S)
                message, descriptors, _, _ = socket.recv_fds(control, MAX_PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
                if not message or not descriptors:
                    raise ProtocolError("it did not start")
            except (OSError, ProtocolError):
                await self._template.aclose()  # no slot's doing, and no running proxy needs it
                raise
            running = _Running(control, descriptors[0])
            pidfd = running.pidfd
            self._running = running
            asyncio.get_running_loop().add_reader(pidfd, self._ended, running)
            return await self._exchange(running, "add", self._policy)
        except BaseException:
            if pidfd < 0:
                control.close()
            else:
                await self._kill()
            raise

    async def _exchange(self, running: _Running, operation: Operation, policy: NetworkPolicy | None) -> Counts:
        request = Request(next(self._serials), operation, policy)
        descriptors = [self._listener.fileno()] if operation == "add" else []
        socket.send_fds(running.control, [encode_request(request)], descriptors)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            while packet := await loop.sock_recv(running.control, MAX_PACKET_BYTES):
                answer = parse_answer(packet)
                if answer.serial == request.serial and answer.error:
                    raise ProtocolError(answer.error)
                if answer.serial == request.serial:
                    return answer.counts
                if answer.serial > request.serial:
                    raise ProtocolError(f"it answered request {answer.serial} before it was sent")
        raise ProtocolError("it ended")

    async def _kill(self) -> None:
        """Returns when the process has ended."""
        running, self._running = self._running, None
        if running is None:
            return
        asyncio.get_running_loop().remove_reader(running.pidfd)
        running.control.close()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(running.pidfd, signal.SIGKILL)
        try:
            await readable(running.pidfd, ANSWER_DEADLINE_S)
        finally:
            os.close(running.pidfd)

    def _ended(self, running: _Running) -> None:
        asyncio.get_running_loop().remove_reader(running.pidfd)
        running.ended = True
        if running is self._running:
            log.warning("the proxy of slot %d exited unexpectedly", self._slot)
            self._start_later()

    def _start_later(self) -> None:
        """Start another one in the background. Requests that arrive before it runs start one too, or fail in time."""
        if self._recovery is None or self._recovery.done():
            self._recovery = asyncio.create_task(self._recover(), name=f"the proxy of slot {self._slot}")
            self._recovery.add_done_callback(report_failure)

    async def _recover(self) -> None:
        while self._running is None or self._running.ended:
            await asyncio.sleep(self._backoff.next_s())
            async with self._asking:
                if self._running is None or self._running.ended:
                    with contextlib.suppress(OSError, ProtocolError):
                        await self._kill()
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
        os.write(2, f"starting the slots' proxies: {error}\n".encode())
    finally:
        os._exit(EXEC_FAILED)
