"""Containers as processes on this machine: the real sandbox server, without Docker or Nomad."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from agentenv.background import finish
from agentenv.config import ContainerSettings, isolation_here, state_dir
from agentenv.containers.connection import open_session
from agentenv.containers.handle import ContainerHandle
from agentenv.deadlines import START_TIMEOUT_S
from agentenv.errors import SandboxUnavailableError
from agentenv.run_files import RunFile, remove_if_dead
from agentenv.slots.backends.acceptance import local_handle, shake_hands
from agentenv.slots.backends.base import StartFailed
from agentenv.slots.backends.fleet import Fleet, FleetBackend, Running, StartFailedError
from agentenv.slots.backends.local_files import local_disk, local_store, sweep_left, write_private
from agentenv.slots.backends.local_process import LocalProcess
from agentenv.wire.spec import SandboxSpec

_STARTS_AT_ONCE = 2
"""Containers started at once. A start makes every slot of a container; more at a time would only delay each of them."""


class LocalBackend(FleetBackend):
    """Runs ``python -m agentenv.sandbox`` once per container, on loopback, each on a free port.

    ``isolation="auto"`` means what ``$AGENTENV_ISOLATION`` says, if it is set.
    ``state_dir`` (see :func:`agentenv.config.state_dir`) holds the files of running containers; files left by dead
    ones are removed at the next start. If this process dies, by whatever signal, its containers end with it.
    """

    name = "local"

    def __init__(
        self,
        settings: ContainerSettings | None = None,
        *,
        state_dir: Path | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        stop_grace_s: float = 5.0,
    ) -> None:
        asked = settings or ContainerSettings()
        self._settings = asked.model_copy(update={"isolation": isolation_here(asked.isolation)})
        self._state_dir = state_dir
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._session: aiohttp.ClientSession | None = None
        self._launch: LaunchDirectory | None = None
        self._running: dict[str, _LocalContainer] = {}

    async def __aenter__(self) -> Self:
        if self._fleet is not None:
            raise SandboxUnavailableError("a LocalBackend is opened once", next_step="make a new one")
        self._launch = LaunchDirectory.open((self._state_dir or state_dir()).absolute())
        self._session = open_session()
        self._fleet = Fleet(self._start, starts_at_once=_STARTS_AT_ONCE)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._fleet is not None:
                await self._fleet.aclose()
        finally:
            if self._session is not None:
                await self._session.close()
            if self._launch is not None:
                self._launch.close()

    @property
    def pids(self) -> dict[str, int]:
        """The process of each running container, by container id."""
        return {container_id: container.process.pid for container_id, container in self._running.items()}

    async def _start(self, index: int) -> Running:
        assert self._launch is not None
        container_id = f"local-{index}-{secrets.token_hex(4)}"
        token = secrets.token_hex(32)
        asked = SandboxSpec.launch(
            self._settings.spec(),
            container=container_id,
            token_file=self._launch.token_file(container_id),
            data_dir=self._launch.data_dir,
            store_dir=await asyncio.to_thread(local_store, self._settings.isolation),
            disk_dir=local_disk(),
        )
        spec = self._launch.write(asked, token)
        process = None
        try:
            async with asyncio.timeout(self._start_timeout_s):
                process = await LocalProcess.launch(container_id, spec)
                handle = local_handle(await process.ready(), container_id, index, token, self._settings)
                await shake_hands(handle, self._session, self._settings, self._start_timeout_s)
        except BaseException as error:
            if process is not None:
                await finish(asyncio.create_task(process.stop(self._stop_grace_s)))
            self._launch.remove(container_id)
            if isinstance(error, TimeoutError):
                words = process.last_words() if process is not None else ""
                late = StartFailed(f"{container_id} was not ready within {self._start_timeout_s:g} s; {words}")
                raise StartFailedError(late) from error
            raise
        container = self._running[container_id] = _LocalContainer(self, process, handle)
        return container

    async def stop_container(self, container: _LocalContainer) -> None:
        """For the container object: end its process, remove its files."""
        assert self._launch is not None
        try:
            await container.process.stop(self._stop_grace_s)
        finally:
            self._running.pop(container.handle.id, None)
            self._launch.remove(container.handle.id)
            await asyncio.to_thread(sweep_left, self._launch.data_dir / container.handle.id)

    def __repr__(self) -> str:
        return f"<LocalBackend {len(self._running)} containers>"


class _LocalContainer:
    """One running container, as the fleet keeps it."""

    def __init__(self, backend: LocalBackend, process: LocalProcess, handle: ContainerHandle) -> None:
        self._backend = backend
        self.process = process
        self.handle = handle

    async def ended(self) -> str:
        return await self.process.ended()

    async def stop(self, reason: str) -> None:  # noqa: ARG002 - the fleet reports it
        await self._backend.stop_container(self)


class LaunchDirectory:
    """Specs and tokens of the containers one backend started. Those of dead backends are removed by the next one."""

    def __init__(self, own: RunFile, data_dir: Path) -> None:
        self._own = own
        self._path = own.directory
        self.data_dir = data_dir

    @classmethod
    def open(cls, state: Path) -> Self:
        """Create one below ``state``. Raises SandboxUnavailableError when ``state`` cannot be written."""
        data_dir = state / "containers"
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            for left in state.glob("launch-*"):
                remove_if_dead(left)
        except OSError as error:
            raise SandboxUnavailableError(
                f"cannot keep state in {state}: {error}", next_step="set AGENTENV_STATE_DIR to a writable directory"
            ) from error
        return cls(RunFile.open(state, "launch", secrets.token_hex(4)), data_dir)

    def token_file(self, container_id: str) -> Path:
        """Path of a container's token."""
        return self._path / f"{container_id}.token"

    def write(self, spec: SandboxSpec, token: str) -> Path:
        """Write token (mode 0600) and spec; the spec's path. Raises StartFailedError (the disk is full), and then
        leaves neither."""
        try:
            write_private({Path(spec.token_file): token, self._spec_file(spec.container): spec.to_json()})
        except StartFailedError:
            self.remove(spec.container)
            raise
        return self._spec_file(spec.container)

    def remove(self, container_id: str) -> None:
        """Remove a container's files."""
        self.token_file(container_id).unlink(missing_ok=True)
        self._spec_file(container_id).unlink(missing_ok=True)

    def _spec_file(self, container_id: str) -> Path:
        return self._path / f"{container_id}.json"

    def close(self) -> None:
        """Remove the directory. Repeatable."""
        self._own.close()
