"""Containers as processes on this machine: the real sandbox server, without Docker or Nomad."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from agentenv.background import TaskSet, finish, unless_lost
from agentenv.config import ContainerSettings, isolation_here, state_dir
from agentenv.containers.connection import open_session
from agentenv.containers.handle import ContainerHandle
from agentenv.deadlines import START_TIMEOUT_S, scaled
from agentenv.errors import ConfigError, SandboxUnavailableError
from agentenv.slots.backends.acceptance import local_handle, shake_hands
from agentenv.slots.backends.base import StartFailed
from agentenv.slots.backends.fleet import Fleet, FleetBackend, StartFailedError
from agentenv.slots.backends.local_files import ContainerFiles, FarmFiles, local_disk, local_store, sweep_left
from agentenv.slots.backends.local_process import LocalProcess
from agentenv.wire.spec import ContainerSpec, SandboxSpec

logger = logging.getLogger(__name__)

_STARTS_AT_ONCE = 2
"""Containers started at once. A start makes every slot of a container; more at a time would only delay each of them."""
_RELEASED_WITHIN_S, _RELEASED_PAUSE_S = scaled(20.0), 0.02
"""The kernel ends what is left of a container within moments of its first process."""


class LocalBackend(FleetBackend):
    """Runs ``python -m agentenv.sandbox`` once per container, on loopback, each on a free port.

    Its containers end with the context manager, and with this process, by whatever signal it dies. ``detached`` ones,
    of the farm with this name (``farm``), are left running with their leases by both: whoever opens the name next
    adopts them, each with its id and index; dead ones are replaced. :meth:`stop_all` ends them. One process at a time
    has a farm: opening raises ConfigError, which names the process that has it. It also raises ConfigError when running
    containers have other settings than ``settings``.

    Until the first :meth:`scale` the goal is what was found (:attr:`found`). A detached container without a lease that
    has had no authenticated request for ``unattended_after_s`` (0: for ever) ends itself, so that none is an orphan for
    ever; pools send requests all the time.

    ``isolation="auto"`` means what ``$AGENTENV_ISOLATION`` says, if it is set.
    ``state_dir`` (see :func:`agentenv.config.state_dir`) holds the files of containers; files left by dead ones are
    removed at the next start.
    """

    name = "local"

    def __init__(
        self,
        settings: ContainerSettings | None = None,
        *,
        detached: bool = False,
        farm: str = "default",
        state_dir: Path | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        stop_grace_s: float = scaled(10.0),
        unattended_after_s: int = 3600,
    ) -> None:
        asked = settings or ContainerSettings()
        self._settings = asked.model_copy(update={"isolation": isolation_here(asked.isolation)})
        self._detached = detached
        self._name = farm
        self._state_dir = state_dir
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._unattended_after_s = unattended_after_s if detached else 0
        self._session: aiohttp.ClientSession | None = None
        self._farm: FarmFiles | None = None
        self._found: dict[int, LocalProcess] = {}
        self._found_count = 0
        self._generation = 0
        self._running: dict[str, LocalProcess] = {}
        self._ending = TaskSet()
        self._leaving = False

    async def __aenter__(self) -> Self:
        if self._fleet is not None:
            raise SandboxUnavailableError("a LocalBackend is opened once", next_step="make a new one")
        state = (self._state_dir or state_dir()).absolute()
        if self._detached:
            self._farm = FarmFiles.open(state, self._name)
            await self._find(self._farm)
        else:
            self._farm = FarmFiles.temporary(state)
        self._session = open_session()
        self._fleet = Fleet(self._start, starts_at_once=_STARTS_AT_ONCE)
        self._fleet.adopt(self._found)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await finish(asyncio.create_task(self._close(), name=f"close {self!r}"))

    @property
    def generation(self) -> int:
        """How often this farm has been opened, this time included: larger than that of anybody who had it before."""
        return self._generation

    @property
    def found(self) -> int:
        """The least goal that keeps every container found at opening: one more than the highest index."""
        return self._found_count

    @property
    def pids(self) -> dict[str, int]:
        """The process of each running container, by container id; everything in the container ends with it."""
        return {container: pid for container, process in self._running.items() if (pid := process.pid) is not None}

    async def scale(self, count: int) -> None:
        """See :class:`ContainerBackend`."""
        await super().scale(count)
        for index in [index for index in self._found if index >= count]:  # adopted by nobody yet
            process = self._found.pop(index)
            self._ending.start(process.files.id, self._end(process), "end")

    async def stop_all(self) -> None:
        """End all containers, and remove what their farm has on disk. The backend starts no others."""
        await self.scale(0)
        await self._opened().aclose()
        await self._ending.wait()
        self._held_farm().remove()

    # -- opening and closing ---------------------------------------------------------------------

    async def _find(self, farm: FarmFiles) -> None:
        """Keep one living container per index for adoption; end what else there is."""
        try:
            containers = farm.containers()
            alive = {container.id for container in containers if container.is_alive()}
            _check_settings(self._name, [one for one in containers if one.id in alive], self._settings.spec())
            self._generation = farm.next_generation()
            for container in containers:
                process = LocalProcess(container)
                if container.id in alive and container.index not in self._found:
                    self._found[container.index] = process
                else:
                    await self._end(process)
            self._found_count = max(self._found, default=-1) + 1
        except BaseException as error:
            farm.close()
            if isinstance(error, OSError):
                raise SandboxUnavailableError(f"farm {self._name!r} cannot be opened: {error}") from error
            raise

    async def _close(self) -> None:
        self._leaving = self._detached
        try:
            if self._fleet is not None:
                await (self._fleet.leave() if self._detached else self._fleet.aclose())
            await self._ending.wait()
        finally:
            for process in (*self._running.values(), *self._found.values()):
                process.close()
            self._running.clear()
            if self._session is not None:
                await self._session.close()
            if self._farm is not None:
                self._farm.close()

    # -- one container ---------------------------------------------------------------------------

    async def _start(self, index: int) -> _Container:
        """Start a container, or adopt the one found; either is ready or not yet, and says who it is."""
        process = self._found.pop(index, None)
        adopted = process is not None
        process = process or LocalProcess(self._held_farm().new(index))
        try:
            async with asyncio.timeout(self._start_timeout_s):
                if not adopted:
                    await self._launch(process)
                handle = await self._meet(process)
        except BaseException as error:
            await self._give_up(process)
            if isinstance(error, TimeoutError):
                words = process.files.last_words()
                late = f"{process.files.id} was not ready within {self._start_timeout_s:g} s; {words}"
                raise StartFailedError(StartFailed(late)) from error
            raise
        self._running[handle.id] = process
        return _Container(self, process, handle)

    async def _launch(self, process: LocalProcess) -> None:
        files = process.files
        spec = SandboxSpec.launch(
            self._settings.spec(),
            container=files.id,
            token_file=files.token_file,
            data_dir=self._held_farm().data_dir,
            unattended_after_s=self._unattended_after_s,
            store_dir=await asyncio.to_thread(local_store, self._settings.isolation),
            disk_dir=local_disk(),
        )
        files.write(spec, secrets.token_hex(32))
        await process.launch(detached=self._detached)

    async def _meet(self, process: LocalProcess) -> ContainerHandle:
        ready, files = await process.ready(), process.files
        handle = local_handle(ready, files.id, files.index, files.token(), self._settings)
        hands = shake_hands(handle, self._session, self._settings, self._start_timeout_s)
        await unless_lost(hands, _end_of(process))  # one that is being stopped says it is ready for ever
        return handle

    async def _give_up(self, process: LocalProcess) -> None:
        """End a container that cannot be used; one that we only leave is left for the next process, ready or not."""
        if self._leaving:
            process.close()
        else:
            await finish(asyncio.create_task(self._end(process), name=f"end {process.files.id}"))

    async def stop_container(self, process: LocalProcess) -> None:
        """For the container object: end its processes, remove its files."""
        try:
            await self._end(process)
        finally:
            self._running.pop(process.files.id, None)

    async def _end(self, process: LocalProcess) -> None:
        await end_container(process, self._held_farm(), self._stop_grace_s)

    def _held_farm(self) -> FarmFiles:
        if self._farm is None:
            raise SandboxUnavailableError("the backend is not open", next_step="use it inside `async with`")
        return self._farm

    def __repr__(self) -> str:
        farm = f" of farm {self._name}" if self._detached else ""
        return f"<LocalBackend {len(self._running)} containers{farm}>"


@dataclass(frozen=True)
class _Container:
    """One running container, as the fleet keeps it."""

    backend: LocalBackend
    process: LocalProcess
    handle: ContainerHandle

    async def ended(self) -> str:
        return await self.process.ended()

    async def stop(self) -> None:
        await self.backend.stop_container(self.process)


async def _end_of(process: LocalProcess) -> SandboxUnavailableError:
    return SandboxUnavailableError(f"it ended: {await process.ended()}")


async def end_container(process: LocalProcess, farm: FarmFiles, grace_s: float) -> None:
    """End a container, dead or alive, by whoever holds its farm, and remove all of it. What cannot be removed is left
    to the next who opens the farm, and logged."""
    await process.stop(grace_s)
    try:
        async with asyncio.timeout(_RELEASED_WITHIN_S):
            while process.files.is_held():  # noqa: ASYNC110 - other processes let go of it
                await asyncio.sleep(_RELEASED_PAUSE_S)
    except TimeoutError:
        logger.warning("%s has ended, but something of it still runs: its files are kept", process.files.id)
        return
    await asyncio.to_thread(sweep_left, farm.data_dir / process.files.id)
    process.files.remove()


def _check_settings(farm: str, containers: Iterable[ContainerFiles], asked: ContainerSpec) -> None:
    """Raises ConfigError when a running container has other settings."""
    for container in containers:
        try:
            spec = container.spec()
        except ConfigError as error:
            changed = f"cannot be read ({error.message})"
        else:
            names = [name for name, value in vars(asked).items() if getattr(spec, name) != value]
            if not names:
                continue
            changed = f"has {names[0]}={getattr(spec, names[0])!r}, requested was {getattr(asked, names[0])!r}"
        raise ConfigError(
            "settings",
            f"the specification of {container.id}, which is running, {changed}",
            next_step=f"use the same settings, or end the farm's containers first: `agentenv gc --kept {farm}`",
        )
