"""One run of the sandbox server: hello, slots, HTTP, shutdown."""

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
from agentenv.errors import ProtocolError
from agentenv.sandbox.control_protocol import Hello
from agentenv.sandbox.descriptors import LEAST_PER_SLOT, per_slot
from agentenv.sandbox.loop_watch import LoopWatch
from agentenv.sandbox.server.app import STREAMS, SandboxApp
from agentenv.sandbox.server.container import Container
from agentenv.sandbox.server.context import ServerContext
from agentenv.sandbox.server.poller import Poller
from agentenv.sandbox.server.supervisor_link import SupervisorLink
from agentenv.sandbox.server.tools.bash import command_env
from agentenv.wire.server import Proof, ServerInfo
from agentenv.wire.states import IllegalMoveError

_HELLO_TIMEOUT_S = 30.0
_SETTLE_TIMEOUT_S = 30.0
_GOODBYE_S = 2.0
_PING_S = 2.0
_BACKLOG = 1024

log = logging.getLogger(__name__)


class Server:
    """One server process, from its sockets to its end."""

    def __init__(self, control: socket.socket, listen: socket.socket, watch: LoopWatch) -> None:
        self._loop = asyncio.get_running_loop()
        self._watch = watch
        self._listen = listen
        self._poller = Poller(self._loop)
        self._supervisor = SupervisorLink(control, self._supervisor_full)
        self._container: Container | None = None
        self._over = asyncio.Event()
        self._settled = asyncio.Event()
        self._pinging: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Serve until the supervisor is gone or SIGTERM. Raises ProtocolError for an unexpected hello."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._over.set)
        hello = self._hello()
        face, container = self._made(hello)
        self._container = container
        self._poller.add(self._supervisor.fileno(), self._control)
        runner = web.AppRunner(face.application(), access_log=None, handle_signals=False, shutdown_timeout=_GOODBYE_S)
        await runner.setup()
        try:
            await self._wait_settled()
            await web.SockSite(runner, self._listen, backlog=_BACKLOG).start()
            self._supervisor.serving()
            gc.freeze()
            self._watch.begin()
            log.info("serving")
            self._ping()
            await self._over.wait()
        finally:
            container.draining = True
            await self._say_goodbye(runner)
            if self._pinging is not None:
                self._pinging.cancel()
            container.close()
            self._poller.close()
            self._supervisor.close()

    async def _say_goodbye(self, runner: web.AppRunner) -> None:
        streams = runner.app[STREAMS]
        for stream in tuple(streams):
            await stream.close(code=1001, message=b"the sandbox server is shutting down")
        await runner.cleanup()

    def _hello(self) -> Hello:
        ready, _, _ = select.select([self._supervisor], [], [], _HELLO_TIMEOUT_S)
        packet = self._supervisor.receive() if ready else None
        if not isinstance(packet, Hello):
            raise ProtocolError("the supervisor did not say hello")
        return packet

    def _made(self, hello: Hello) -> tuple[SandboxApp, Container]:
        spec = hello.spec
        context = ServerContext(
            poller=self._poller,
            supervisor=self._supervisor,
            env=command_env(spec["env"]),
            output_bytes=spec["output_bytes"],
            reply_memory=spec["reply_memory"],
            spare_shells=spec["spare_shells"],
            shell=hello.shell,
            descriptors=max(LEAST_PER_SLOT, per_slot(resource.getrlimit(resource.RLIMIT_NOFILE)[0], spec["slots"])),
        )
        container = Container(spec["slots"], context)
        info = ServerInfo(
            container=spec["container"],
            boot=container.boot,
            version=__version__,
            slots=spec["slots"],
            isolation=hello.isolation,
            weaker=tuple(hello.weaker),
            proofs=tuple(Proof.model_validate(proof) for proof in hello.proofs),
            allow_network=spec["allow_network"],
        )
        return SandboxApp(container, self._poller, info, hello.token, self._watch), container

    async def _wait_settled(self) -> None:
        """Wait until slots are ready to lease; a slot that takes long does not keep the others waiting for ever."""
        try:
            async with asyncio.timeout(_SETTLE_TIMEOUT_S):
                await self._settled.wait()
        except TimeoutError:
            log.warning("serving although not every slot is made yet")

    def _control(self) -> None:
        """Process one packet of the supervisor."""
        try:
            packet = self._supervisor.receive()
            if packet is None:
                self._over.set()
                self._poller.remove(self._supervisor.fileno())
                return
            if self._container is not None:
                self._container.take(packet)
                if self._container.settled:
                    self._settled.set()
        except BlockingIOError:
            return
        except (ProtocolError, IllegalMoveError):
            log.exception("a packet of the supervisor's was refused")
        except OSError:
            self._over.set()

    def _ping(self) -> None:
        self._supervisor.ping(self._loop.time())
        self._pinging = self._loop.call_later(_PING_S, self._ping)

    def _supervisor_full(self) -> None:
        self._loop.add_writer(self._supervisor.fileno(), self._supervisor_has_room)

    def _supervisor_has_room(self) -> None:
        if self._supervisor.flush():
            self._loop.remove_writer(self._supervisor.fileno())


async def serve(control_fd: int, listen_fd: int, watch: LoopWatch) -> None:
    """Serve over these two descriptors (now owned here) until stopped. ``watch`` watches the running loop."""
    listen = socket.socket(fileno=listen_fd)
    listen.setblocking(False)
    await Server(socket.socket(fileno=control_fd), listen, watch).run()
