"""Long operations on one container or allocation: handshakes, waiting until it is empty, stops, diagnoses.

I/O without decisions: each task ends by passing its outcome to the ``answer`` it was given.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import aiohttp

from agentenv.background import TaskSet
from agentenv.backoff import Backoff
from agentenv.config import ContainerSettings
from agentenv.containers.control import ContainerControl
from agentenv.containers.handle import ContainerHandle
from agentenv.deadlines import scaled
from agentenv.errors import AgentEnvError, ConnectionLostError, ProtocolError
from agentenv.slots.backends.acceptance import unacceptable
from agentenv.slots.backends.base import StartFailed
from agentenv.slots.backends.nomad.api import NomadApi
from agentenv.slots.backends.nomad.explain import NomadError, slow_start, start_failure
from agentenv.slots.backends.nomad.facts import Allocation
from agentenv.slots.container_link import Liveness, Silence
from agentenv.wire.leases import OWN_RUN
from agentenv.wire.states import SlotState

logger = logging.getLogger(__name__)

_HANDSHAKES_AT_ONCE = 16
_HANDSHAKE_S = scaled(3.0)
_RETRY_MIN_S, _RETRY_MAX_S = 0.05, 1.0
_DIAGNOSES_AT_ONCE = 4
"""Containers that fail together fail for the same reason: more diagnoses would only be noise."""
_LOOK_S = 0.25
"""Interval between checks whether a draining container is empty."""
_CALM_LOOKS = 2
"""Number of checks: a lease may be on its way to the container when it first looks empty."""
_SUSPECT_S, _SILENT_S = 5.0, 12.0
_STOPS_PER_S = 20.0
_API_RETRY_MAX_S = 10.0


class AllocationTasks:
    """Runs operations as tasks, by the container or allocation they are for."""

    def __init__(self, api: NomadApi, session: aiohttp.ClientSession, settings: ContainerSettings) -> None:
        self._api = api
        self._session = session
        self._settings = settings
        self._tasks = TaskSet()
        self._handshakes = asyncio.Semaphore(_HANDSHAKES_AT_ONCE)
        self._stops = asyncio.Lock()

    def forget(self, key: str) -> None:
        """Cancel everything running for a container."""
        self._tasks.cancel(key)

    async def aclose(self) -> None:
        """Cancel everything. May be repeated."""
        await self._tasks.aclose()

    # -- handshake ------------------------------------------------------------------------------

    def handshake(
        self,
        allocation: Allocation,
        token: str,
        timeout_s: float,
        answer: Callable[[ContainerHandle | StartFailed], None],
    ) -> None:
        """Request until the server answers correctly, is refused, or ``timeout_s`` has passed."""

        async def work() -> None:
            answer(await self._meet(allocation, token, timeout_s))

        self._tasks.start(allocation.container, work(), "handshake")

    async def _meet(self, allocation: Allocation, token: str, timeout_s: float) -> ContainerHandle | StartFailed:
        loop = asyncio.get_running_loop()
        began, backoff, problem = loop.time(), Backoff(_RETRY_MIN_S, _RETRY_MAX_S), ""
        while (waited_s := loop.time() - began) < timeout_s:
            async with self._handshakes:
                try:
                    handle = await self._handle(allocation, token)
                    return await self._examine(handle, allocation.id)
                except ProtocolError as error:
                    return StartFailed(error.message, error.next_step, permanent=True)
                except (ConnectionLostError, NomadError) as error:
                    problem = error.message
                except AgentEnvError as error:
                    return StartFailed(f"{allocation.container} refuses the request: {error.message}", error.next_step)
            await asyncio.sleep(backoff.next_s())
        return slow_start(allocation, waited_s, problem)

    async def _handle(self, allocation: Allocation, token: str) -> ContainerHandle:
        address = allocation.address or (await self._api.allocation(allocation.id)).address
        if address is None:
            raise NomadError(404, f"allocation {allocation.id[:8]} has no port `http`")
        return ContainerHandle(
            id=allocation.container,
            index=allocation.index,
            base_url=f"http://{address}",
            token=token,
            slots=self._settings.slots_per_container,
            node=allocation.node,
        )

    async def _examine(self, handle: ContainerHandle, allocation_id: str) -> ContainerHandle | StartFailed:
        server = await ContainerControl(handle, self._session).info(timeout_s=_HANDSHAKE_S)
        if server.container != allocation_id:
            raise ConnectionLostError(f"{handle.base_url} is answered by {server.container}, not {allocation_id}")
        return unacceptable(server, self._settings) or handle

    # -- draining -------------------------------------------------------------------------------

    def await_empty(self, handle: ContainerHandle, at_most_s: float | None, answer: Callable[[bool], None]) -> None:
        """Wait until nothing is leased there, time is over (answer False), or it is silent (answer True)."""

        async def work() -> None:
            answer(await self._become_empty(handle, at_most_s))

        self._tasks.start(handle.id, work(), "drain")

    async def _become_empty(self, handle: ContainerHandle, at_most_s: float | None) -> bool:
        loop = asyncio.get_running_loop()
        control = ContainerControl(handle, self._session)
        until = None if at_most_s is None else loop.time() + at_most_s
        silence, calm = Silence(_SUSPECT_S, _SILENT_S, loop.time()), 0
        while calm < _CALM_LOOKS and (until is None or loop.time() < until):
            await asyncio.sleep(_LOOK_S)
            try:
                reports = (await control.slots(timeout_s=_SUSPECT_S / 4)).slots
            except AgentEnvError:
                calm = 0
                if silence.tick(loop.time()) is Liveness.gone:
                    return True
                continue
            silence.answered(loop.time())
            busy = any(report.state in (SlotState.leased, SlotState.resetting) for report in reports)
            calm = 0 if busy else calm + 1
        return False

    async def runs_leasing(self, handles: Iterable[ContainerHandle]) -> list[str]:
        """Runs of a farm that a lease on these containers is tagged with. Containers that do not answer have none."""

        async def find(handle: ContainerHandle) -> set[str]:
            try:
                reports = (await ContainerControl(handle, self._session).slots(timeout_s=_HANDSHAKE_S)).slots
            except AgentEnvError:
                return set()
            return {one.tags.run for one in reports if one.state is SlotState.leased and one.tags is not None}

        found = await asyncio.gather(*map(find, handles))
        return sorted(set().union(*found) - {"", OWN_RUN})

    # -- allocations ----------------------------------------------------------------------------

    def stop(self, allocation: str, reason: str, after_s: float, wanted: Callable[[], bool]) -> None:
        """Stop an allocation after a pause, while ``wanted``, retrying until Nomad has accepted it or the job is
        ours to change."""
        self._tasks.start(f"stop {allocation}", self._stop(allocation, reason, after_s, wanted), "operation")

    async def _stop(self, allocation: str, reason: str, after_s: float, wanted: Callable[[], bool]) -> None:
        await asyncio.sleep(after_s)
        backoff = Backoff(_RETRY_MAX_S, _API_RETRY_MAX_S)
        while wanted():
            async with self._stops:
                await asyncio.sleep(1 / _STOPS_PER_S)
                try:
                    logger.debug("stopping allocation %s: %s", allocation, reason)
                    return await self._api.stop(allocation)
                except NomadError as error:
                    logger.info("allocation %s could not be stopped yet: %s", allocation, error)
            await asyncio.sleep(backoff.next_s())
        return None

    def diagnose(self, allocation: Allocation, image: str, answer: Callable[[StartFailed], None]) -> None:
        """Why it did not become ready, from its task's events and the end of its log."""
        key = f"diagnose {allocation.container}"
        under_way = sum(key.startswith("diagnose ") for key in self._tasks.keys)
        if under_way < _DIAGNOSES_AT_ONCE and key not in self._tasks:
            self._tasks.start(key, self._diagnose(allocation, image, answer), "operation")

    async def _diagnose(self, allocation: Allocation, image: str, answer: Callable[[StartFailed], None]) -> None:
        stdout = await self._api.log_tail(allocation.id, "stdout")
        stderr = await self._api.log_tail(allocation.id, "stderr")
        answer(start_failure(allocation, image, stdout, stderr))
