"""Keeps the job's count at the pool's goal despite failures of Nomad. I/O; the view decides what to request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from agentenv.backoff import Backoff
from agentenv.errors import AgentEnvError
from agentenv.slots.backends.nomad.api import NomadApi
from agentenv.slots.backends.nomad.explain import NomadError
from agentenv.slots.backends.nomad.facts import Job
from agentenv.slots.backends.nomad.view import FleetView

logger = logging.getLogger(__name__)

RETRY_MIN_S, RETRY_MAX_S = 0.5, 10.0
RESCHEDULE_GAP_S = 1.0


class CountKeeper:
    """Keeps one goal; requests as many containers as may be started at once, until Nomad has granted the goal."""

    def __init__(
        self,
        api: NomadApi,
        view: FleetView,
        resubmit: Callable[[], Awaitable[None]],
        may: Callable[[], bool] = lambda: True,
    ) -> None:
        """``may``: whether the job is ours to change at the moment. While it is not, nothing is requested."""
        self._may = may
        self._api = api
        self._view = view
        self._resubmit = resubmit
        self._changed = asyncio.Event()
        self._failed = asyncio.Event()
        self._asked_index = 0
        self._asking = False
        self.goal: int | None = None
        self.asked: int | None = None

    def aim(self, goal: int) -> None:
        """Make this the goal."""
        self.goal = goal
        self._changed.set()

    def adopt(self, count: int) -> None:
        """The job has this count already: its containers are not to be started in steps, as new ones are."""
        self.asked = count

    def begin_anew(self) -> None:
        """The job is ours again: the count may have been changed meanwhile."""
        self.asked = None
        self._changed.set()

    def look_again(self) -> None:
        """Something happened that may allow a higher count."""
        self._changed.set()

    def reschedule(self) -> None:
        """Request the immediate replacement of failed allocations."""
        self._failed.set()

    def compare(self, job: Job | None) -> None:
        """Compare with Nomad's count; it is set again when somebody else changed it."""
        if self._asking or (job is not None and job.modify_index < self._asked_index):
            return  # older than our own request
        if job is None or job.stopped or (self.asked is not None and job.count != self.asked):
            if self.asked is not None and self._may():
                logger.warning("job %s %s, not %d: put right", self._api.settings.job_id, _difference(job), self.asked)
            self.asked = None
            self._changed.set()

    async def keep_count(self) -> None:
        """Request the count, repeatedly, until Nomad agrees."""
        backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S)
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self.goal is None or (count := self._view.desired_count(self.goal, self.asked)) == self.asked:
                continue
            if not self._may():
                await asyncio.sleep(RETRY_MIN_S)
                self._changed.set()
                continue
            self._asking = True
            try:
                await self._request(count)
                backoff.reset()
            except (NomadError, AgentEnvError) as error:
                # 400: a deployment is running, as with job files without max_parallel = 0
                logger.warning("the count of %d is not set yet: %s", count, error)
                await asyncio.sleep(backoff.next_s())
                self._changed.set()
            finally:
                self._asking = False

    async def _request(self, count: int) -> None:
        job = self._view.job
        if job is None or job.stopped:
            await self._resubmit()
        try:
            self._asked_index = await self._api.scale(count, "agentenv")
        except NomadError as error:
            if error.status == 404:
                await self._resubmit()
            raise
        self.asked = count
        self._changed.set()  # a goal that is reached in steps

    async def keep_rescheduling(self) -> None:
        """Replace failed allocations on request, at most once a second."""
        while True:
            await self._failed.wait()
            self._failed.clear()
            if not self._may():
                continue
            try:
                await self._api.reschedule()
            except NomadError as error:
                logger.info("failed allocations are replaced by Nomad's own delays: %s", error)
            await asyncio.sleep(RESCHEDULE_GAP_S)


def _difference(job: Job | None) -> str:
    """A change made to the job by hand."""
    return "is gone" if job is None or job.stopped else f"has a count of {job.count}"
