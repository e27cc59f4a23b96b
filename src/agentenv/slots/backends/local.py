"""Containers as processes on this machine: the real sandbox server, without Docker or Nomad."""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from agentenv import shipped
from agentenv.config import ContainerSettings, launch_environment, state_dir
from agentenv.containers.control import ContainerControl
from agentenv.containers.handle import ContainerHandle
from agentenv.containers.http import open_session
from agentenv.errors import ProtocolError, SandboxUnavailableError
from agentenv.sandbox.supervisor.sweep import sweep_container
from agentenv.slots.backends.acceptance import unacceptable
from agentenv.slots.backends.base import ContainerEvent, StartFailed
from agentenv.slots.backends.fleet import Fleet, Running, StartFailedError
from agentenv.slots.backends.local_process import LocalProcess
from agentenv.tasks import finish
from agentenv.wire.spec import SandboxSpec

_STARTS_AT_ONCE = 2
"""Containers started at once. A start makes every slot of a container; more at a time would only delay each of them."""


_SWEEP_WITHIN_S, _SWEEP_PAUSE_S = 5.0, 0.05


class LocalBackend:
    """Runs ``python -m agentenv.sandbox`` once per container, on loopback, each on a free port.

    ``state_dir`` (see :func:`agentenv.config.state_dir`) holds the files of running containers; files left by dead
    ones are removed at the next start. If this process dies, by whatever signal, its containers end with it.
    """

    name = "local"

    def __init__(
        self,
        settings: ContainerSettings | None = None,
        *,
        state_dir: Path | None = None,
        start_timeout_s: float = 60.0,
        stop_grace_s: float = 5.0,
    ) -> None:
        self._settings = settings or ContainerSettings()
        self._state_dir = state_dir
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._fleet: Fleet | None = None
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

    async def scale(self, count: int) -> None:
        """See :class:`ContainerBackend`."""
        self._opened().scale(count)

    def events(self) -> AsyncIterator[ContainerEvent]:
        """See :class:`ContainerBackend`."""
        return self._opened().events()

    async def replace(self, container_id: str, reason: str) -> None:
        """See :class:`ContainerBackend`."""
        self._opened().replace(container_id, reason)

    @property
    def pids(self) -> dict[str, int]:
        """The process of each running container, by container id."""
        return {container_id: container.process.pid for container_id, container in self._running.items()}

    def _opened(self) -> Fleet:
        if self._fleet is None:
            raise SandboxUnavailableError("the backend is not open", next_step="use it inside `async with`")
        return self._fleet

    async def _start(self, index: int) -> Running:
        assert self._launch is not None
        container_id = f"local-{index}-{secrets.token_hex(4)}"
        token = secrets.token_hex(32)
        spec = self._launch.write(self._spec(container_id), token)
        process = None
        try:
            async with asyncio.timeout(self._start_timeout_s):
                process = await LocalProcess.launch(container_id, spec, _environment())
                handle = await self._shake_hands(process, container_id, index, token)
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

    async def _shake_hands(self, process: LocalProcess, container_id: str, index: int, token: str) -> ContainerHandle:
        ready = await process.ready()
        handle = ContainerHandle(
            id=container_id,
            index=index,
            base_url=f"http://127.0.0.1:{ready['port']}",
            token=token,
            slots=self._settings.slots_per_container,
        )
        try:
            server = await ContainerControl(handle, self._session).info(timeout_s=self._start_timeout_s)
        except ProtocolError as error:
            raise StartFailedError(StartFailed(error.message, error.next_step, permanent=True)) from error
        if (refused := unacceptable(server, self._settings)) is not None:
            raise StartFailedError(refused)
        return handle

    def _spec(self, container_id: str) -> SandboxSpec:
        assert self._launch is not None
        settings = self._settings
        return SandboxSpec(
            container=container_id,
            token_file=str(self._launch.token_file(container_id)),
            data_dir=str(self._launch.data_dir),
            slots=settings.slots_per_container,
            isolation=settings.isolation,
            allow_network=settings.allow_network,
            limits=settings.limits,
            binds=settings.binds,
            env=settings.env,
            output_bytes=settings.output_bytes,
            spare_shells=settings.spare_shells,
        )

    async def stop_container(self, container: _LocalContainer) -> None:
        """For the container object: end its process, remove its files."""
        assert self._launch is not None
        try:
            await container.process.stop(self._stop_grace_s)
        finally:
            self._running.pop(container.handle.id, None)
            self._launch.remove(container.handle.id)
            await asyncio.to_thread(_sweep_left, self._launch.data_dir / container.handle.id)

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
    """Specs and tokens of the containers one backend started; removed by the next start if the process died.

    A lock file distinguishes the directories of running processes from those of dead ones.
    """

    def __init__(self, path: Path, data_dir: Path, lock: int) -> None:
        self._path = path
        self._lock = lock
        self.data_dir = data_dir

    @classmethod
    def open(cls, state: Path) -> Self:
        """Create one below ``state``. Raises SandboxUnavailableError when ``state`` cannot be written."""
        data_dir = state / "containers"
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            for left in state.glob("launch-*"):
                _remove_if_dead(left)
            path, lock = _new_directory(state)
        except OSError as error:
            raise SandboxUnavailableError(
                f"cannot keep state in {state}: {error}", next_step="set AGENTENV_STATE_DIR to a writable directory"
            ) from error
        return cls(path, data_dir, lock)

    def token_file(self, container_id: str) -> Path:
        """Path of a container's token."""
        return self._path / f"{container_id}.token"

    def write(self, spec: SandboxSpec, token: str) -> Path:
        """Write token (mode 0600) and spec; the spec's path. Raises StartFailedError (the disk is full), and then
        leaves neither."""
        try:
            for path, text in ((Path(spec.token_file), token), (self._spec_file(spec.container), spec.to_json())):
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                    file.write(text)
        except OSError as error:
            self.remove(spec.container)
            raise StartFailedError(
                StartFailed(
                    f"cannot write to {self._path}: {error.strerror}",
                    next_step="free some space there, or set AGENTENV_STATE_DIR to a directory with room",
                    permanent=True,
                )
            ) from error
        return self._spec_file(spec.container)

    def remove(self, container_id: str) -> None:
        """Remove a container's files."""
        self.token_file(container_id).unlink(missing_ok=True)
        self._spec_file(container_id).unlink(missing_ok=True)

    def _spec_file(self, container_id: str) -> Path:
        return self._path / f"{container_id}.json"

    def close(self) -> None:
        """Remove the directory. May be repeated."""
        if self._lock >= 0:
            shutil.rmtree(self._path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _new_directory(state: Path) -> tuple[Path, int]:
    """A new directory with its lock. Until the lock is held, another start may take it for a dead process's."""
    while True:
        path = Path(tempfile.mkdtemp(prefix="launch-", dir=state))
        lock = _locked(path, os.O_CREAT)
        if lock is not None:
            return path, lock


def _locked(path: Path, flags: int = 0) -> int | None:
    """A descriptor that holds the directory's lock; None if somebody else holds it, or the directory is gone."""
    try:
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), (path / "lock").stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def _remove_if_dead(path: Path) -> None:
    # A directory created a moment ago has no lock yet: without the file it is left to a later start.
    if (lock := _locked(path)) is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _sweep_left(directory: Path) -> None:
    """Remove the cgroups and the directory of a container that was killed; after an orderly end there is nothing to
    remove.

    Waits a few seconds for its lock, which its supervisor holds until the kernel has ended it.
    """
    until_s = time.monotonic() + _SWEEP_WITHIN_S
    while directory.exists() and time.monotonic() < until_s:
        if sweep_container(directory) is None:
            time.sleep(_SWEEP_PAUSE_S)


def _environment() -> dict[str, str]:
    """The child must import this very package, installed or not."""
    env = launch_environment()
    package = str(shipped.PACKAGE.parent)
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, (package, env.get("PYTHONPATH"))))}
