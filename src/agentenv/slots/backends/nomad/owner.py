"""One owner per job: a lock on a Nomad variable, held by the process that scales, replaces and purges the job's
containers.

Leases need no owner: the containers arbitrate those. The lock is on ``nomad/jobs/<job>/owner``, not on the job's
own variable, whose token others read and write. Nomad frees it some 22 s after the holder's last renewal (twice the
TTL, and a delay). By then the old holder must not act any more, so a holder that Nomad has not confirmed for
``SURE_S`` stops acting until it is confirmed again.

Who has the lock also has a generation, which is the index in Nomad's log of the write that took it: no two owners have
had the same, and each has a larger one than all before it, whatever became of the variable in between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from agentenv.background import finish
from agentenv.errors import AgentEnvError, ConfigError, JobOwnedError, SandboxUnavailableError
from agentenv.slots.backends.nomad.api import Lock, NomadApi
from agentenv.slots.backends.nomad.explain import NomadError
from agentenv.slots.backends.nomad.lock_owner import LockOwner

logger = logging.getLogger(__name__)

BEAT_S = 3.0
"""Interval between renewals. Each changes the variable, so that others see the holder is alive."""
SURE_S = 8.0
"""How long a confirmation is valid, from when its request was sent. Less than any TTL Nomad accepts (10 s)."""
WATCH_S = 2 * BEAT_S + 1
"""A holder silent for this long is dead, frozen or cut off."""
PATIENCE_S = 45.0
"""By then Nomad has freed a dead holder's lock."""
LOOK_S = 0.25
STANDBY_LOOK_S = 1.0
"""Interval between looks at the lock while standing by, which may be for days."""
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Includes time the machine was suspended."""


class JobOwner:
    """The right to change one job. After ``acquire`` or ``stand_by`` it is kept until ``release``. From its creation
    on, ``api`` sends nothing that changes the job unless this holds the right."""

    def __init__(
        self,
        api: NomadApi,
        run: str,
        *,
        url: str = "",
        on_lost: Callable[[LockOwner], None] = lambda _: None,
        on_back: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = lambda: time.clock_gettime(_CLOCK),
    ) -> None:
        """``url``: address of the farm service that this is, for its standbys. ``on_lost``: somebody else owns the job
        now, or again another; ``on_back``: we own it again, with another generation."""
        self._api = api
        self._on_lost = on_lost
        self._on_back = on_back
        self._clock = clock
        self._ourselves = LockOwner.ourselves(run, url)
        self._successor: LockOwner | None = None
        self._id: str | None = None
        self._sure_until = 0.0
        self._beats = 0
        self._keeping: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()
        self.generation = 0
        """Larger than that of all owners before; 0 until we own the job. It changes when Nomad may have freed the lock
        for others in between."""
        api.not_ours = self._why_not

    @property
    def holds(self) -> bool:
        """Whether it is certain that nobody else owns the job at this moment."""
        return self._id is not None and self._clock() < self._sure_until

    @property
    def lost(self) -> JobOwnedError | None:
        """The job's new owner, since we lost it."""
        return None if self._successor is None else self._refusal(self._successor)

    def _why_not(self) -> str:
        """Why the job must not be changed at this moment; empty if it may. Thread-safe."""
        return "" if self.holds else str(self.lost or "Nomad has not confirmed for a while that the job is ours")

    async def acquire(self, *, wait: bool = True) -> None:
        """Become the owner. Refused if the holder is alive. A dead holder is replaced, at once if it was a process
        of this machine or an earlier run of this Nomad task; a silent one is waited for (``wait``), at most
        ``PATIENCE_S``.

        Raises JobOwnedError; ConfigError for a token without permission; SandboxUnavailableError for a Nomad
        without locks; NomadError.
        """
        loop, watch, job = asyncio.get_running_loop(), Watch(), self._api.settings.job_id
        while not await finish(asyncio.create_task(self._take())):
            found = await self._api.lock()
            match watch.judge(found, found is not None and found.holder.is_dead(), loop.time()):
                case "succeed" if found is not None:
                    await finish(asyncio.create_task(self._succeed(found)))
                case "refuse" if found is not None:
                    raise self._refusal(found.holder)
                case "wait" if found is not None and not wait:
                    raise self._refusal(found.holder)
                case "tell":
                    silent = found.holder if found is not None else ""
                    logger.warning(
                        "job %s: its owner %s is silent; waiting for Nomad to free it, some 25 s", job, silent
                    )
            await asyncio.sleep(LOOK_S)
        self._start_keeping()

    async def stand_by(self, on_standby: Callable[[LockOwner], None] = lambda _: None) -> None:
        """Become the owner, however long others own the job and Nomad does not answer. ``on_standby`` is called with
        each that does.

        Raises ConfigError for a token without permission; SandboxUnavailableError for a Nomad without locks;
        NomadError for a token that may not read the lock.
        """
        seen: LockOwner | None = None
        while True:
            try:
                found = await self._api.lock()
                if found is not None and found.holder.is_dead():
                    await finish(asyncio.create_task(self._succeed(found)))
                    found = None
                if found is None and await finish(asyncio.create_task(self._take())):
                    break
                if found is not None and found.holder != seen:
                    seen = found.holder
                    logger.info("job %s: standing by for %s", self._api.settings.job_id, seen)
                    on_standby(seen)
            except NomadError as error:
                if error.status in (401, 403):
                    raise
                logger.info("job %s: standing by, though Nomad fails: %s", self._api.settings.job_id, error)
            await asyncio.sleep(STANDBY_LOOK_S)
        self._start_keeping()

    def _start_keeping(self) -> None:
        logger.info("job %s is ours, generation %d", self._api.settings.job_id, self.generation)
        self._keeping = asyncio.create_task(self._keep(), name="nomad owner")

    async def release(self) -> None:
        """Give up the ownership. May be repeated; without an answer from Nomad the lock expires there."""
        self._ending.set()
        if self._keeping is not None:
            await asyncio.wait({self._keeping})  # a renewal that arrives after the release would take the lock again
        held, self._id = self._id, None
        if held is None:
            return
        try:
            await self._api.unlock(held)
            await self._api.forget_owner()
        except NomadError as error:
            logger.info("the lock of job %s is left to expire: %s", self._api.settings.job_id, error)

    async def _keep(self) -> None:
        while not self._ending.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._ending.wait()
                return
            try:
                await self._beat()
            except (NomadError, AgentEnvError) as error:  # not confirmed: `holds` reports it when it matters
                logger.info("job %s: Nomad does not confirm that it is ours: %s", self._api.settings.job_id, error)

    async def _beat(self) -> None:
        before = self.generation
        if await self._take():
            if self.generation != before:
                self._successor = None
                logger.warning("job %s is ours again, generation %d", self._api.settings.job_id, self.generation)
                self._on_back()
            return
        found = await self._api.lock()
        if found is not None and found.holder not in (self._ourselves, self._successor):
            self._successor = found.holder
            logger.error("%s; this run no longer scales, replaces or purges; its leases stay valid", self.lost)
            self._on_lost(found.holder)

    async def _take(self) -> bool:
        """Take or keep the lock, and log it; False when it cannot be had at the moment."""
        if self._id is not None and not self.holds and not await self._check_after_cut(self._id):
            return False
        sent = self._clock()
        self._beats += 1
        items = {**self._ourselves.items(), "beats": str(self._beats)}
        try:
            taken = await self._api.take_lock(items, self._id)
        except NomadError as error:
            if error.status == 403:
                raise self._forbidden(error) from error
            if error.status != 409:
                raise
            self._id = None
            return False
        if taken is None:
            raise SandboxUnavailableError(
                f"Nomad at {self._api.address} knows no locks, without which two farms could fight over one job",
                next_step="use Nomad 1.8 or newer",
            )
        if not self.holds:  # as of the answer: if the confirmation before is valid, nobody had the lock since
            self.generation = taken.index
        self._id, self._sure_until = taken.id, sent + SURE_S
        return True

    async def _check_after_cut(self, lock_id: str) -> bool:
        """Whether the lock can be taken now; as a new one if Nomad has freed it, because it may have been another's
        since. False while Nomad neither renews nor frees it."""
        sent = self._clock()
        if await self._api.renew_lock(lock_id):
            self._sure_until = sent + SURE_S
            return True
        found = await self._api.lock()
        if found is not None and found.id == lock_id:
            return False
        self._id = None
        return True

    async def _succeed(self, found: Lock) -> None:
        logger.info("job %s: its owner %s is dead", self._api.settings.job_id, found.holder)
        try:
            await self._api.unlock(found.id)
        except NomadError as error:
            if error.status != 409:  # another process was faster
                raise

    def _forbidden(self, error: NomadError) -> ConfigError:
        return ConfigError(
            "token",
            f"may not write the Nomad variable {self._api.owner_path!r}, whose lock keeps two runs apart: {error}",
            next_step="give its policy list, read, write, destroy on the variables nomad/jobs/* (docs/operations.md)",
        )

    def _refusal(self, holder: LockOwner) -> JobOwnedError:
        farm = f"lease from that farm (farm_url={holder.url!r}), or " if holder.url else ""
        return JobOwnedError(
            f"Nomad job {self._api.settings.job_id!r} is owned by {holder}",
            next_step=f"{farm}give this run a sandbox_job_id (--job) of its own, wait until that one ends, or end it: "
            f"`kill {holder.pid}` on {holder.host}",
        )


class Watch:
    """Decides about a job's owner from observations of its lock. Pure."""

    def __init__(self) -> None:
        self._seen: Lock | None = None
        self._began: float | None = None
        self._changed = 0.0
        self._told = False

    def judge(self, found: Lock | None, dead: bool, now: float) -> Literal["succeed", "refuse", "wait", "tell"]:
        """``dead``: its process is known to have ended. "tell": keep waiting, and log it once."""
        self._began = now if self._began is None else self._began
        if found is None:
            return "wait"  # it has just been freed
        if dead:
            return "succeed"
        before, self._seen = self._seen, found
        if before is None or before.id != found.id:
            self._changed, self._told = now, False
        elif before.index != found.index or now - self._began > PATIENCE_S:
            return "refuse"  # it has renewed the lock
        elif now - self._changed > WATCH_S and not self._told:
            self._told = True
            return "tell"
        return "wait"
