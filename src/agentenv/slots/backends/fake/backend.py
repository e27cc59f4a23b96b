"""Cheap containers without isolation, for tests, simulations and experiments.

Each is a real sandbox server, on the caller's event loop, with a stand-in for its supervisor. Commands run as ordinary
processes of the caller's user, in a temporary directory per slot: do not run commands here that you do not trust.
"""

from __future__ import annotations

import asyncio
import dataclasses
import resource
import secrets
import socket
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from agentenv.background import TaskSet, finish
from agentenv.config import ContainerSettings, cache_dir
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import SandboxUnavailableError
from agentenv.sandbox.loop_watch import LoopWatch
from agentenv.sandbox.server.app import Handler
from agentenv.sandbox.server.server import BACKLOG, Server
from agentenv.sandbox.slot_loss import LossReason
from agentenv.sandbox.slotagent.build import Binaries, ensure_built
from agentenv.slots.backends.base import StartFailed
from agentenv.slots.backends.fake.stand_in import Scratch, StandIn, environment
from agentenv.slots.backends.fleet import Fleet, FleetBackend, StartFailedError
from agentenv.wire.spec import ContainerSpec, SandboxSpec

_CLEANUP_S = 0.01
"""Time for the handlers of an aborted server to end."""


class FakeBackend(FleetBackend):
    """A backend whose containers live in this process. Methods such as :meth:`kill` inject failures.

    ``start_delay_s`` is added to each start; ``starts_at_once`` limits concurrent starts. ``nodes``: names of the nodes
    that containers say they are on, one after the other by their index; with them, leases with a root are granted,
    and their slots are as all others.
    """

    name = "fake"

    def __init__(
        self,
        settings: ContainerSettings | None = None,
        *,
        start_delay_s: float = 0.0,
        starts_at_once: int = 100,
        nodes: Sequence[str] = ("",),
    ) -> None:
        self._settings = settings or ContainerSettings()
        self._start_delay_s = start_delay_s
        self._starts_at_once = starts_at_once
        self._nodes = nodes
        self._binaries: Binaries
        self._scratch = Scratch()
        self._containers: dict[str, FakeContainer] = {}
        self._failures: deque[StartFailed] = deque()

    async def __aenter__(self) -> Self:
        if self._fleet is not None:
            raise SandboxUnavailableError("a FakeBackend can be opened only once", next_step="create a new one")
        # This process has three descriptors for each slot, and some for each container.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._binaries = await asyncio.to_thread(ensure_built, cache_dir())
        self._scratch.make()
        self._environment = environment(self._scratch.path)
        self._fleet = Fleet(self._start, starts_at_once=self._starts_at_once)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._fleet is not None:
                await self._fleet.aclose()
        finally:
            await self._scratch.remove()

    # -- failures on request ------------------------------------------------------------------

    @property
    def containers(self) -> list[ContainerHandle]:
        """Running containers, by index."""
        return sorted((one.handle for one in self._containers.values()), key=lambda handle: handle.index)

    def kill(self, container_id: str, reason: str = "killed on purpose") -> None:
        """End a container immediately, as SIGKILL or a lost machine would; a new one is started."""
        self._containers.pop(container_id).kill(reason)

    def crash_and_restart(self, container_id: str) -> None:
        """Crash the server and restart it (a new boot): leases continue, replies and running calls are lost."""
        self._containers[container_id].crash()

    def stall(self, container_id: str, seconds: float) -> None:
        """The container's server answers nothing for this long, then continues."""
        self._containers[container_id].server.stall(seconds)

    def cut(self, container_id: str) -> None:
        """Cut the container's open connections, once."""
        self._containers[container_id].server.cut()

    async def destroy_slot(self, container_id: str, slot: int) -> None:
        """Lose a slot as if its commands had killed its first process: its lease ends with a policy fault."""
        await self._containers[container_id].stand_in.lose(
            slot, LossReason.ended, "destroyed by FakeBackend.destroy_slot"
        )

    def quarantine_next_reset(self, container_id: str) -> None:
        """Make the next reset of one of the container's slots fail, which quarantines the slot."""
        self._containers[container_id].stand_in.fail_next_reset = True

    def fail_next_start(self, reason: str, *, permanent: bool = False, next_step: str = "") -> None:
        """Make the next start fail. Calls accumulate."""
        self._failures.append(StartFailed(reason, next_step, permanent))

    # -----------------------------------------------------------------------------------------

    async def _start(self, index: int) -> FakeContainer:
        if self._start_delay_s:
            await asyncio.sleep(self._start_delay_s)
        if self._failures:
            raise StartFailedError(self._failures.popleft())
        name = f"fake-{index}-{secrets.token_hex(4)}"
        asked = self._settings.spec()
        spec = dataclasses.replace(asked, spare_shells=False, env={**self._environment, **asked.env})
        node = self._nodes[index % len(self._nodes)]
        container = FakeContainer(name, index, node, spec, self._scratch.path / name, self._binaries)
        try:
            await container.start()
        except BaseException:
            await finish(asyncio.create_task(container.stop()))
            raise
        self._containers[name] = container
        container.end.add_done_callback(lambda _: self._containers.pop(name, None))
        return container

    def __repr__(self) -> str:
        return f"<FakeBackend {len(self._containers)} containers, no isolation>"


class FakeContainer:
    """One container: a stand-in for the supervisor, and the current server."""

    def __init__(
        self, name: str, index: int, node: str, asked: ContainerSpec, directory: Path, binaries: Binaries
    ) -> None:
        spec = SandboxSpec.launch(asked, container=name, token_file=directory / "token", data_dir=directory)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.handle = ContainerHandle(name, index, url, secrets.token_hex(16), slots=spec.slots, node=node)
        self.stand_in = StandIn(spec, self.handle.token, directory, binaries)
        self.stand_in.takes_roots = bool(node)
        self.server = HostedServer(self.stand_in.greet(), self._listener)
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._restarting: asyncio.Task[None] | None = None
        self._cleaning = TaskSet()

    async def start(self) -> None:
        """Start the server; returns when it serves."""
        await self.server.start()

    async def ended(self) -> str:
        """Wait for its end; returns the reason."""
        return await asyncio.shield(self.end)

    def kill(self, reason: str) -> None:
        """End it immediately, without waiting for its processes as :meth:`stop` does. Idempotent."""
        if not self.end.done():
            self.end.set_result(reason)
            self._listener.close()
            self._abort()
            self.stand_in.hang_up()

    def crash(self) -> None:
        """Replace the server by a new one, a new boot, which takes over the slots."""
        self._abort()
        self.server = HostedServer(self.stand_in.greet(), self._listener)
        self._restarting = asyncio.create_task(self.server.start())
        self._restarting.add_done_callback(self._restarted)

    async def stop(self) -> None:
        """End it, and wait until its processes and files are removed."""
        self.kill("stopped")
        await self._cleaning.wait()
        await self.stand_in.aclose()

    def _restarted(self, restart: asyncio.Task[None]) -> None:
        if not restart.cancelled() and (error := restart.exception()) is not None:
            self.kill(f"its server did not restart: {error!r}")

    def _abort(self) -> None:
        if self._restarting is not None:
            self._restarting.cancel()
        self.server.abort()
        self._cleaning.start(self.handle.id, self.server.cleanup(), "cleanup")


class HostedServer:
    """One boot of a sandbox server on the caller's loop, with injectable failures. The caller keeps ``listener``, in
    whose queue connections wait between two boots."""

    def __init__(self, control: socket.socket, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._server = Server(control, LoopWatch("sandbox server"))
        self._runner = web.AppRunner(
            self._server.application, access_log=None, handle_signals=False, shutdown_timeout=_CLEANUP_S
        )
        self._accepting: asyncio.Server | None = None
        self._handlers: set[asyncio.Task[Any]] = set()
        self._running = asyncio.Event()
        self._running.set()
        self._stall: asyncio.TimerHandle | None = None
        self._server.application.middlewares.append(self._handle)

    async def start(self) -> None:
        """Returns when it serves."""
        await self._runner.setup()
        await self._server.settled()
        assert self._runner.server is not None
        listener = self._listener.dup()
        listener.setblocking(False)
        self._accepting = await self._loop.create_server(
            self._runner.server, sock=listener, backlog=BACKLOG, start_serving=False
        )
        await self._accepting.start_serving()
        self._server.serving()

    def cut(self) -> None:
        """Abort every connection."""
        for transport in self._transports():
            transport.abort()

    def stall(self, seconds: float) -> None:
        """Read nothing for this long, from clients, agents or the supervisor."""
        if self._stall is not None:
            self._stall.cancel()
        else:
            self._running.clear()
            self._server.poller.pause()
            for transport in self._transports():
                transport.pause_reading()
        self._stall = self._loop.call_later(seconds, self._go_on)

    def abort(self) -> None:
        """End it abruptly, as SIGKILL would."""
        if self._stall is not None:
            self._stall.cancel()
        if self._accepting is not None:
            self._accepting.close()
        self.cut()
        for handler in self._handlers:
            handler.cancel()
        self._server.close()

    async def cleanup(self) -> None:
        """After :meth:`abort`: wait until nothing of it runs."""
        await asyncio.gather(*self._handlers, return_exceptions=True)
        await self._runner.cleanup()

    @web.middleware
    async def _handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        try:
            await self._running.wait()
            return await handler(request)
        finally:
            self._handlers.discard(task)

    def _go_on(self) -> None:
        self._stall = None
        self._running.set()
        self._server.poller.resume()
        for transport in self._transports():
            transport.resume_reading()

    def _transports(self) -> list[asyncio.Transport]:
        connections = self._runner.server.connections if self._runner.server is not None else []
        return [one.transport for one in connections if one.transport is not None]
