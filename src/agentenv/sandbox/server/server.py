"""The sandbox server between its supervisor and its clients: hello, slots, HTTP, goodbye.

A :class:`Server` runs on any event loop, also together with other servers; :func:`serve` runs one as a separate
process.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import select
import signal
import socket

from aiohttp import web

from agentenv._version import __version__
from agentenv.deadlines import scaled
from agentenv.errors import ProtocolError
from agentenv.sandbox.control_protocol import Hello
from agentenv.sandbox.descriptors import LEAST_PER_SLOT, per_slot
from agentenv.sandbox.loop_watch import LoopWatch
from agentenv.sandbox.server.app import STREAMS, SandboxApp
from agentenv.sandbox.server.container import Container
from agentenv.sandbox.server.context import ServerContext
from agentenv.sandbox.server.poller import Lane, Poller
from agentenv.sandbox.server.supervisor_link import SupervisorLink
from agentenv.sandbox.server.watch import Watchers
from agentenv.sandbox.slot_env import command_env
from agentenv.wire.server import Proof, ServerInfo
from agentenv.wire.spec import SlotLimits
from agentenv.wire.states import IllegalMoveError

_HELLO_TIMEOUT_S = scaled(30.0)
_SETTLE_TIMEOUT_S = scaled(30.0)
_GOODBYE_S = scaled(2.0)
_PING_S = 2.0
BACKLOG = 1024

log = logging.getLogger(__name__)


class Server:
    """One server without its listening socket: from the hello on its control socket, which it owns, to
    :meth:`close`.

    Its creator serves ``application``, and reports that with :meth:`serving`. Raises ProtocolError for an
    unexpected hello.
    """

    def __init__(self, control: socket.socket, watch: LoopWatch) -> None:
        self._loop = asyncio.get_running_loop()
        self.poller = Poller(self._loop)
        self._supervisor = SupervisorLink(control, self._supervisor_full)
        self.over = asyncio.Event()
        """Set when the server must end, for example because the supervisor has ended."""
        self._settled = asyncio.Event()
        self._pinging: asyncio.TimerHandle | None = None
        app, self._container = self._made(self._hello(), watch)
        self.application = app.application()
        Lane(self.poller).add(self._supervisor.fileno(), self._control)

    async def settled(self) -> None:
        """Wait for slots, so that a server reported as ready can lease some; one slow slot does not delay the
        others."""
        try:
            async with asyncio.timeout(_SETTLE_TIMEOUT_S):
                await self._settled.wait()
        except TimeoutError:
            log.warning("serving although not every slot is made yet")

    def serving(self) -> None:
        """Tell the supervisor that clients can come, and keep asking whether it is there."""
        self._supervisor.serving()
        self._container.idle_timer.begin()
        self._ping()

    def drain(self) -> None:
        """Take no new leases and calls."""
        self._container.draining = True

    def close(self) -> None:
        """Close everything without notifying anyone; the slots stay with the supervisor."""
        if self._pinging is not None:
            self._pinging.cancel()
        self._container.close()
        self.poller.close()
        self._supervisor.close()

    def _hello(self) -> Hello:
        waiting = select.poll()
        waiting.register(self._supervisor, select.POLLIN)
        while waiting.poll(_HELLO_TIMEOUT_S * 1000):
            try:
                packet = self._supervisor.receive()
            except BlockingIOError:  # there is more of it to come
                continue
            if isinstance(packet, Hello):
                return packet
            break
        raise ProtocolError("the supervisor did not say hello")

    def _made(self, hello: Hello, watch: LoopWatch) -> tuple[SandboxApp, Container]:
        spec = hello.spec
        watchers = Watchers()
        context = ServerContext(
            poller=self.poller,
            supervisor=self._supervisor,
            env=command_env(spec["env"]),
            output_bytes=spec["output_bytes"],
            reply_memory=spec["reply_memory"],
            spare_shells=spec["spare_shells"],
            shell=hello.shell,
            given_env=spec["env"],
            limits=SlotLimits(**spec["limits"]),
            refused=hello.refused,
            descriptors=max(LEAST_PER_SLOT, per_slot(resource.getrlimit(resource.RLIMIT_NOFILE)[0], spec["slots"])),
            changed=watchers.changed,
        )
        container = Container(spec["slots"], context, hello.generation, spec["unattended_after_s"])
        info = ServerInfo(
            container=spec["container"],
            boot=container.boot,
            version=__version__,
            slots=spec["slots"],
            isolation=hello.isolation,
            weaker=tuple(hello.weaker),
            proofs=tuple(Proof.model_validate(proof) for proof in hello.proofs),
            allow_network=spec["allow_network"],
            image_format=hello.image_format,
            image_weaker=tuple(hello.image_weaker),
            workspaces_copied=hello.workspaces_copied,
        )
        return SandboxApp(container, self.poller, info, hello.token, watch, watchers), container

    def _control(self) -> None:
        """Process one packet of the supervisor."""
        try:
            packet = self._supervisor.receive()
            if packet is None:
                self.over.set()
                self.poller.remove(self._supervisor.fileno())
                return
            self._container.take(packet)
            if self._container.settled:
                self._settled.set()
        except BlockingIOError:
            return
        except (ProtocolError, IllegalMoveError):
            log.exception("a packet of the supervisor's was refused")
        except OSError:
            self.over.set()

    def _ping(self) -> None:
        self._supervisor.ping(self._loop.time())
        if self._container.unattended and not self._container.draining:
            self.drain()  # nothing is leased any more
            self._supervisor.unattended()
        self._pinging = self._loop.call_later(_PING_S, self._ping)

    def _supervisor_full(self) -> None:
        self._loop.add_writer(self._supervisor.fileno(), self._supervisor_has_room)

    def _supervisor_has_room(self) -> None:
        if self._supervisor.flush():
            self._loop.remove_writer(self._supervisor.fileno())


async def serve(control_fd: int, listen_fd: int, watch: LoopWatch) -> None:
    """The server as a process: serve over these two descriptors (now owned here) until the supervisor goes away, or
    SIGTERM. ``watch`` watches the running loop. Raises ProtocolError on a strange hello."""
    listen = socket.socket(fileno=listen_fd)
    listen.setblocking(False)
    server = Server(socket.socket(fileno=control_fd), watch)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.over.set)
    runner = web.AppRunner(server.application, access_log=None, handle_signals=False, shutdown_timeout=_GOODBYE_S)
    await runner.setup()
    try:
        await server.settled()
        await web.SockSite(runner, listen, backlog=BACKLOG).start()
        server.serving()
        gc.freeze()
        watch.begin()
        log.info("serving")
        await server.over.wait()
    finally:
        server.drain()
        await _say_goodbye(runner)
        server.close()


async def _say_goodbye(runner: web.AppRunner) -> None:
    streams = runner.app[STREAMS]
    for stream in tuple(streams):
        await stream.close(code=1001, message=b"the sandbox server is shutting down")
    await runner.cleanup()
