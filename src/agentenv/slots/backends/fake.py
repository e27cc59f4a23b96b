"""Containers that cost nothing and isolate nothing, for tests, simulations and trying things out.

The fake speaks the real wire protocol over loopback; leases, epochs, reply memory and the boot rule are
honoured. Commands run as ordinary child processes of the caller, in a temporary directory per slot:
never give it anything you would not run yourself.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Self

from agentenv.config import ContainerSettings
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import SandboxUnavailableError, SlotDestroyedError
from agentenv.slots.backends.base import ContainerEvent, StartFailed
from agentenv.slots.backends.fake_server import FakeContainer, FakeServer
from agentenv.slots.backends.fleet import Fleet, Running, StartFailedError


class FakeBackend:
    """A backend whose containers live in this process. The methods below ``replace`` break them on purpose.

    ``start_delay_s`` is how long each start takes, ``starts_at_once`` how many may be under way.
    """

    name = "fake"

    def __init__(
        self, settings: ContainerSettings | None = None, *, start_delay_s: float = 0.0, starts_at_once: int = 100
    ) -> None:
        self._settings = settings or ContainerSettings()
        self._start_delay_s = start_delay_s
        self._starts_at_once = starts_at_once
        self._server = FakeServer()
        self._fleet: Fleet | None = None
        self._directory: Path | None = None
        self._failures: deque[StartFailed] = deque()

    async def __aenter__(self) -> Self:
        if self._fleet is not None:
            raise SandboxUnavailableError("a FakeBackend is opened once", next_step="make a new one")
        self._directory = Path(tempfile.mkdtemp(prefix="agentenv-fake-"))
        self._fleet = Fleet(self._start, starts_at_once=self._starts_at_once)
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._fleet is not None:
                await self._fleet.aclose()
        finally:
            await self._server.aclose()
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)

    async def scale(self, count: int) -> None:
        """See :class:`ContainerBackend`."""
        self._opened().scale(count)

    def events(self) -> AsyncIterator[ContainerEvent]:
        """See :class:`ContainerBackend`."""
        return self._opened().events()

    async def replace(self, container_id: str, reason: str) -> None:
        """See :class:`ContainerBackend`."""
        self._opened().replace(container_id, reason)

    # -- switches -----------------------------------------------------------------------------

    @property
    def containers(self) -> list[ContainerHandle]:
        """Those that live, by index."""
        return sorted((one.handle for one in self._server.containers.values()), key=lambda handle: handle.index)

    def kill(self, container_id: str, reason: str = "killed on purpose") -> None:
        """End a container at once, as SIGKILL or a lost machine would; another is started."""
        container = self._server.containers.pop(container_id)
        container.end.set_result(reason)

    def crash_and_restart(self, container_id: str) -> None:
        """Its server crashes and returns with a new boot: leases live on, replies and running calls are lost."""
        self._container(container_id).restart_server()

    def stall(self, container_id: str, seconds: float) -> None:
        """It answers nothing for a while; then it answers what it was asked."""
        self._container(container_id).stalled_until = asyncio.get_running_loop().time() + seconds

    def cut(self, container_id: str) -> None:
        """Cut its open streams, once."""
        self._container(container_id).cut()

    async def destroy_slot(self, container_id: str, slot: int) -> None:
        """As if what ran in the slot had killed its first process: its lease ends as the policy's doing."""
        error = SlotDestroyedError(f"slot {slot} was destroyed by what ran in it", next_step="the rollout ends here")
        await self._container(container_id).slot(slot).lose(error)

    def quarantine_next_reset(self, container_id: str) -> None:
        """The next reset of one of its slots cannot be proved."""
        self._container(container_id).quarantine_next = True

    def fail_next_start(self, reason: str, *, permanent: bool = False, next_step: str = "") -> None:
        """The next container does not start. May be called several times."""
        self._failures.append(StartFailed(reason, next_step, permanent))

    # -----------------------------------------------------------------------------------------

    def _container(self, container_id: str) -> FakeContainer:
        return self._server.containers[container_id]

    def _opened(self) -> Fleet:
        if self._fleet is None:
            raise SandboxUnavailableError("the backend is not open", next_step="use it inside `async with`")
        return self._fleet

    async def _start(self, index: int) -> Running:
        if self._start_delay_s:
            await asyncio.sleep(self._start_delay_s)
        if self._failures:
            raise StartFailedError(self._failures.popleft())
        assert self._directory is not None
        container_id = f"fake-{index}-{secrets.token_hex(4)}"
        handle = ContainerHandle(
            id=container_id,
            index=index,
            base_url=f"{self._server.base_url}/c/{container_id}",
            token=secrets.token_hex(16),
            slots=self._settings.slots_per_container,
        )
        directory = self._directory / container_id
        container = FakeContainer(handle, directory, self._settings.env, self._settings.output_bytes)
        self._server.containers[container_id] = container
        return _Registered(container, self._server)

    def __repr__(self) -> str:
        return f"<FakeBackend {len(self._server.containers)} containers, no isolation>"


class _Registered:
    """A fake container for as long as the server answers for it."""

    def __init__(self, container: FakeContainer, server: FakeServer) -> None:
        self._container = container
        self._server = server
        self.handle = container.handle

    async def ended(self) -> str:
        return await self._container.ended()

    async def stop(self, reason: str) -> None:
        self._server.containers.pop(self.handle.id, None)
        await self._container.stop(reason)
