"""A farm on this machine that outlives one command: run by ``agentenv up`` or ``farm serve``, found by the other verbs.

The process that runs it tells the others where its service and its containers are, by a file in the state directory
(:mod:`agentenv.run_files`), which has mode 0600 because it contains their tokens. Containers of the backend ``local``
outlive that process (:mod:`agentenv.slots.backends.local`); those of ``fake`` are part of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from agentenv.config import state_dir
from agentenv.containers.handle import ContainerHandle
from agentenv.deadlines import scaled
from agentenv.errors import ConfigError, SandboxUnavailableError
from agentenv.farm.gc_kept import collect
from agentenv.farm.view import Census, Place
from agentenv.farm_client.access import FarmAccess
from agentenv.run_files import AlreadyRunningError, RunFile, is_held, running
from agentenv.slots.backends.base import (
    ContainerBackend,
    ContainerDraining,
    ContainerEvent,
    ContainerGone,
    ContainerStarted,
    StartFailed,
)
from agentenv.slots.backends.local_files import ContainerFiles, containers_of, farms
from agentenv.slots.backends.registry import Backend

KIND = "farm"
NAME: Final = "default"
"""Name of the farm that ``up`` runs, and ``farm serve`` without another."""
_FAULTS_KEPT = 10
_STOP_TIMEOUT_S = scaled(60.0)
_STOP_POLL_S = 0.05


def log_file(backend: Backend) -> Path:
    """Log of ``agentenv up`` and its containers; kept after its end."""
    return state_dir() / f"farm-{backend}.log"


def detached_logs(backend: Backend) -> list[Path]:
    """Logs of the containers that outlive the process that runs the farm."""
    if backend is not Backend.local:
        return []
    return [container.log_file for farm in farms(state_dir()) for container in containers_of(state_dir(), farm)]


class FarmNotice:
    """The announcement of a farm of this process, updated by the backend's events."""

    def __init__(self, run_file: RunFile, backend: Backend, farm: str, goal: int) -> None:
        self._run_file = run_file
        self._record: dict[str, Any] = {
            "backend": backend.value, "farm": farm, "goal": goal, "started_at": time.time()
        }  # fmt: skip
        self._containers: dict[str, dict[str, Any]] = {}
        self._faults: deque[str] = deque(maxlen=_FAULTS_KEPT)
        self.publish()

    def handle(self, event: ContainerEvent) -> None:
        """Process an event, and publish the change."""
        match event:
            case ContainerStarted(handle):
                self._containers[handle.id] = {
                    **dataclasses.asdict(handle), "state": "running", "started_at": time.time()
                }  # fmt: skip
            case ContainerDraining(container, reason) if container in self._containers:
                self._containers[container] |= {"state": "draining", "detail": reason}
            case ContainerGone(container, reason):
                if self._containers.pop(container, None) is not None:
                    self._faults.append(f"container {container} ended: {reason}")
            case StartFailed(reason):
                self._faults.append(f"a container did not start: {reason}")
        self.publish()

    def publish(self, **more: object) -> None:
        """Publish the current state."""
        self._record |= more
        self._run_file.write(
            {**self._record, "containers": list(self._containers.values()), "faults": list(self._faults)}
        )


@contextmanager
def noticed(backend: Backend, goal: int, *, farm: str = NAME) -> Iterator[FarmNotice]:
    """Announce the farm of this machine. Raises ConfigError when there is one already."""
    try:
        run_file = RunFile.open(state_dir(), KIND, backend.value)
    except AlreadyRunningError as error:
        raise ConfigError(
            "up",
            f"a {backend} farm is already running (process {error.content.get('pid', 'unknown')})",
            next_step="see `agentenv status`; `agentenv down` ends it",
        ) from None
    with run_file:
        yield FarmNotice(run_file, backend, farm, goal)


class Watched:
    """A backend whose goal and events are announced, and the events passed to a callback, too."""

    def __init__(
        self, backend: ContainerBackend, notice: FarmNotice, also: Callable[[ContainerEvent], None] = lambda _: None
    ) -> None:
        self.name = backend.name
        self._backend = backend
        self._notice = notice
        self._also = also

    async def __aenter__(self) -> Self:
        await self._backend.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._backend.__aexit__(kind, error, trace)

    @property
    def found(self) -> int:
        """See :class:`ContainerBackend`."""
        return self._backend.found

    @property
    def generation(self) -> int:
        """See :class:`ContainerBackend`."""
        return self._backend.generation

    async def scale(self, count: int) -> None:
        """See :class:`ContainerBackend`."""
        self._notice.publish(goal=count)
        await self._backend.scale(count)

    async def events(self) -> AsyncIterator[ContainerEvent]:
        """See :class:`ContainerBackend`."""
        async for event in self._backend.events():
            self._notice.handle(event)
            self._also(event)
            yield event

    async def replace(self, container_id: str, reason: str) -> None:
        """See :class:`ContainerBackend`."""
        await self._backend.replace(container_id, reason)


class LocalFarm:
    """The farm of this machine, seen from another process."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def census(self) -> Census:
        """See :class:`OperatorAccess`."""
        record = self._run_record()
        where = f"{self._backend} farm of this machine ({state_dir()})"
        if record is None:
            return Census(self._backend.value, where, exists=False, next_step=self._start())
        now = time.time()
        places = tuple(_place(container, now) for container in record.get("containers", ()))
        goal = int(record.get("goal", 0))
        missing = goal - len(places)
        return Census(
            self._backend.value,
            f"{where}, run by process {record['pid']}",
            exists=True,
            goal=goal,
            places=places,
            waiting_for=(f"{missing} of {goal} containers are starting",) if missing > 0 else (),
            faults=tuple(record.get("faults", ())),
            metrics_url=record.get("metrics_url"),
            service=FarmAccess((record["url"],), record["token"], run="local") if "url" in record else None,
        )

    def _start(self) -> str:
        if self._backend is not Backend.local:
            return f"start one: `agentenv up --backend {self._backend}`"
        if left := len(self._left()):
            return f"{left} of its containers still run: `agentenv up` takes them over, `agentenv down` ends them"
        return "start one: `agentenv up`"

    def _left(self, farm: str = NAME) -> list[ContainerFiles]:
        """Containers that outlived whoever ran the farm."""
        if self._backend is not Backend.local:
            return []
        return [container for container in containers_of(state_dir(), farm) if container.is_alive()]

    async def down(self) -> str:
        """See :class:`OperatorAccess`. Raises SandboxUnavailableError when it does not end."""
        record = self._run_record()
        if record is None:
            left = len(self._left())
            if not left:
                return f"no {self._backend} farm is running on this machine"
            await collect(state_dir(), NAME, dry_run=False)
            return f"ended the {_containers(left)} of a farm that no process ran"
        await self._end_process(int(record["pid"]))
        if self._left(farm := record.get("farm", NAME)):
            await collect(state_dir(), farm, dry_run=False)
        return f"ended process {record['pid']} and its {_containers(len(record.get('containers', ())))}"

    async def _end_process(self, pid: int) -> None:
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            return  # it has just ended
        except PermissionError as error:
            raise ConfigError(
                "down", f"process {pid} belongs to another user", next_step="run it as that user"
            ) from error
        directory = state_dir() / f"{KIND}-{self._backend}"
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                while is_held(directory):  # noqa: ASYNC110 - another process lets go of it
                    await asyncio.sleep(_STOP_POLL_S)
        except TimeoutError:
            raise SandboxUnavailableError(
                f"process {pid} did not end within {_STOP_TIMEOUT_S:g} s",
                next_step=f"`kill -9 {pid}` ends it; then `agentenv down` again",
            ) from None

    def _run_record(self) -> dict[str, Any] | None:
        records = running(state_dir(), KIND)
        return next((one for one in records if one.get("backend") == self._backend), None)


def _containers(count: int) -> str:
    return f"{count} container{'' if count == 1 else 's'}"


def _place(entry: dict[str, Any], now: float) -> Place:
    handle = ContainerHandle(
        id=entry["id"], index=entry["index"], base_url=entry["base_url"], token=entry["token"], slots=entry["slots"]
    )
    return Place(
        id=handle.id,
        index=handle.index,
        state=entry.get("state", "running"),
        node="this machine",
        detail=entry.get("detail", ""),
        handle=handle,
        age_s=now - entry["started_at"],
    )
