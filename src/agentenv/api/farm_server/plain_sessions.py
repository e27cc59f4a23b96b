"""The trajectories whose slots the farm holds itself: calls by name, from any program.

Nothing is known only here. A lease's tags tell which ask made it, so a farm that was restarted makes that ask again and
gets the same lease. It lasts in its container for ``idle_s`` after the last call, so an idle trajectory is
released by its container, whether the farm lives or not.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Final

from agentenv.api.farm_server.images import ImageService
from agentenv.api.farm_server.plain_leases import PlainLeases
from agentenv.api.farm_server.plain_trajectory import PlainRun, Trajectory
from agentenv.api.farm_server.request_queue import RequestQueue
from agentenv.api.farm_server.settings import PlainSettings
from agentenv.api.farm_server.tokens import Right
from agentenv.background import TaskSet, finish
from agentenv.errors import AgentEnvError, PoolClosedError, SlotDestroyedError, StaleLeaseError, TooManyRequestsError
from agentenv.farm_client.images import FarmImages
from agentenv.slots.lease import SlotLease
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire import plain
from agentenv.wire.calls import CallResult

logger = logging.getLogger(__name__)

_LARGE_READ_BYTES: Final = 1024 * 1024


class PlainSessions:
    """Every run's trajectories."""

    def __init__(
        self, queue: RequestQueue, images: ImageService, settings: PlainSettings, clock: Callable[[], float]
    ) -> None:
        self._images = images
        self._leases = PlainLeases(queue, settings, clock)
        self._catalog = ToolCatalog.builtin()
        self._runs: dict[str, PlainRun] = {}
        self._calls_now: Counter[str] = Counter()
        self._tasks = TaskSet()
        self._renewing = TaskSet()
        self._leaving: asyncio.Task[None] | None = None

    def knows(self, run: str, name: str) -> bool:
        """Whether the trajectory has a slot, has lost one, or waits for one."""
        found = self._runs.get(run)
        mine = found is not None and name in found.trajectories
        return mine or any((self._leases.of_name(run, name), self._leases.lost(run, name)))

    async def execute(self, run: str, right: Right, request: plain.ExecuteRequest) -> plain.ExecuteReply:
        """Call a tool on the trajectory's slot. Raises TooManyRequestsError when the token has too many calls at once,
        StaleLeaseError when the trajectory has not the slot that is named, and as :meth:`Trajectory.entered` and
        :meth:`Trajectory.call` do."""
        if request.lease is not None and not self.knows(run, request.trajectory_id):
            raise _not_that(request.trajectory_id, request.lease)
        with self._one_of(right):
            held = self._of(run)
            trajectory = held.trajectory(request.trajectory_id)
            with trajectory.used():
                try:
                    session = await trajectory.entered(right, request)
                except SlotDestroyedError as error:
                    result = CallResult.refused(request.call_id or "-", error)
                else:
                    if request.lease not in (None, trajectory.lease_name):
                        raise _not_that(request.trajectory_id, request.lease)
                    async with held.large if _may_be_large(request.tool) else nullcontext():
                        result = await trajectory.call(session, request)
        return plain.ExecuteReply.of(result, trajectory.lease_name, request.tool.uniq_id)

    async def look(self, run: str, right: Right, about: plain.OfTrajectory, tool: plain.PlainTool) -> CallResult:
        """Call a tool for a request about files; as :meth:`execute`."""
        request = plain.ExecuteRequest(trajectory_id=about.trajectory_id, tool=tool)
        return (await self.execute(run, right, request)).metadata

    async def release(self, run: str, name: str, by: str) -> bool:
        """End the trajectory's lease, or its wait. False: it has neither."""
        held = self._runs.get(run)
        trajectory = held.trajectories.pop(name, None) if held is not None else None
        if trajectory is None:
            return self._leases.release(run, name, by)
        had = trajectory.waits
        had |= self._leases.release(run, name, by, trajectory.lease)  # at once: the name may be used again
        await trajectory.aclose()
        return had

    # -- upkeep ----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Once a second: renew the leases that are in use, and forget what is over."""
        self._leases.tick()
        due: dict[str, list[tuple[Trajectory, SlotLease]]] = defaultdict(list)
        for held in self._runs.values():
            for name, trajectory in list(held.trajectories.items()):
                if trajectory.over():
                    del held.trajectories[name]
                    self._tasks.start(name, trajectory.aclose(), "end")
                elif (lease := trajectory.due()) is not None:
                    due[lease.container.id].append((trajectory, lease))
        for container, mine in due.items():
            if container not in self._renewing:
                self._renewing.start(container, self._renew(mine), "renewal")

    async def _renew(self, due: Sequence[tuple[Trajectory, SlotLease]]) -> None:
        """Renew leases of one container, if it answers."""
        at = self._leases.clock()
        try:
            await self._leases.renew([lease for _, lease in due])
        except AgentEnvError as error:
            logger.debug("leases are not renewed: %s", error)
        else:
            for trajectory, _ in due:
                trajectory.renewed(at)

    def leave(self) -> None:
        """End the calls that are waited for; those that run in slots continue, and the leases last for the process that
        opens the farm next. The queue is closed before. May be repeated."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave(), name="end of the plain sessions")

    async def aclose(self) -> None:
        """As :meth:`leave`, and wait for it."""
        self.leave()
        assert self._leaving is not None
        await finish(self._leaving)

    async def _leave(self) -> None:
        await asyncio.gather(*(held.images.aclose() for held in self._runs.values()))
        await asyncio.gather(*(held.executor.aclose(cancel=False) for held in self._runs.values()))
        await self._tasks.aclose()
        await self._leases.aclose()
        await self._renewing.aclose()

    def trajectories(self, right: Right) -> tuple[plain.PlainTrajectory, ...]:
        """Those of the runs that a token covers."""
        return tuple(one.view() for held in self._covered(right) for one in held.trajectories.values())

    def counts(self, right: Right) -> tuple[int, int]:
        """Calls of the runs that a token covers, and how many of them failed by our fault."""
        tallies = [held.executor.tally for held in self._covered(right)]
        return sum(tally.calls for tally in tallies), sum(tally.infra_faults for tally in tallies)

    def _covered(self, right: Right) -> list[PlainRun]:
        return [held for run, held in self._runs.items() if right.covers(run)]

    def _of(self, run: str) -> PlainRun:
        if self._leases.closed:
            raise PoolClosedError("the farm service is shutting down", next_step="retry: its replacement will answer")
        if run not in self._runs:
            self._runs[run] = PlainRun(run, self._catalog, self._leases, FarmImages(self._images, self._tasks))
        return self._runs[run]

    @contextmanager
    def _one_of(self, right: Right) -> Iterator[None]:
        """Counts the calls of a token."""
        most = self._leases.settings.calls_at_once
        if self._calls_now[right.jti] >= most:
            raise TooManyRequestsError(f"{most} calls of this token run or wait already", next_step="ask again")
        self._calls_now[right.jti] += 1
        try:
            yield
        finally:
            self._calls_now[right.jti] -= 1
            if not self._calls_now[right.jti]:
                del self._calls_now[right.jti]


def _not_that(trajectory: str, lease: str | None) -> StaleLeaseError:
    return StaleLeaseError(
        f"trajectory {trajectory!r} no longer has the slot {lease}", next_step="start it again, under another name"
    )


def _may_be_large(tool: plain.PlainTool) -> bool:
    """Whether its result may be as large as files are: those would be too much for a farm all at once."""
    limit = tool.arguments.get("limit")
    return tool.name == "artifacts" or (
        tool.name == "read_file" and isinstance(limit, int) and limit > _LARGE_READ_BYTES
    )
