"""Requests from the backend as many containers as the scale policy wants."""

from __future__ import annotations

import logging

from agentenv.config import PoolSettings
from agentenv.errors import AgentEnvError
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.ledger import Ledger
from agentenv.slots.scaling import Peak, ScalePolicy, ScaleState

logger = logging.getLogger(__name__)

_UNKNOWN_SLOTS = 10_000
"""Assumed number of slots per container before the first has started, so that one is started to find out."""


class Scaler:
    """The pool's goal, its changes, and the last goal sent to the backend."""

    def __init__(self, backend: ContainerBackend, settings: PoolSettings, now: float) -> None:
        self._backend = backend
        self._settings = settings
        idle_s = settings.idle_containers_after_s
        self._policy = ScalePolicy(
            settings.min_containers,
            settings.max_containers,
            idle_s,
            target_idle_slots=settings.target_idle_slots,
            cooldown_s=min(settings.scale_cooldown_s, idle_s / 2),
        )
        self._peak = Peak(idle_s)
        self._changed_at = now
        self._sent: int | None = None
        self._lowest_untold: int | None = None
        self._one_until = now
        self.goal = settings.min_containers
        self.slots_per_container = _UNKNOWN_SLOTS

    async def start(self, now: float) -> None:
        """Request the first containers. The backend is open: what it has found is kept until it is idle. Raises
        AgentEnvError."""
        self._changed_at = now
        self.goal = max(self._settings.min_containers, min(self._settings.max_containers, self._backend.found))
        await self._send_goal()

    async def follow(self, ledger: Ledger, now: float) -> None:
        """Decide again, and send a changed goal to the backend. Raises AgentEnvError; retried next time."""
        wanted = self.decide(ledger, now)
        if wanted != self.goal:
            logger.info("scaling from %d to %d containers", self.goal, wanted)
            self._move(wanted, now)
            ledger.drain_from(wanted)  # before a slot of a container that is to be removed can be leased
        await self._send_goal()

    def want_one(self, until: float) -> None:
        """Until then there should be a container, though nobody waits for its slots: its node is needed."""
        self._one_until = max(self._one_until, until)

    def decide(self, ledger: Ledger, now: float) -> int:
        """The number of containers there should be now."""
        load = ledger.load(now)
        state = ScaleState(
            goal=self.goal,
            load=load,
            containers=ledger.containers(),
            slots_per_container=self.slots_per_container,
            changed_at=self._changed_at,
            peak=self._peak.add(load.demand, now),
        )
        return self._policy.decide(state, now) or int(now < self._one_until)

    def _move(self, wanted: int, now: float) -> None:
        if wanted < self.goal:
            self._lowest_untold = wanted if self._lowest_untold is None else min(wanted, self._lowest_untold)
        self.goal, self._changed_at = wanted, now

    async def _send_goal(self) -> None:
        """Send a goal that was lower for a moment first: its containers take no leases any more and must go."""
        lowest, goal = self._lowest_untold, self.goal
        if lowest is not None and lowest < goal:
            await self._scale(lowest)
        if self._sent != goal:
            await self._scale(goal)
        self._lowest_untold = None

    async def _scale(self, count: int) -> None:
        try:
            await self._backend.scale(count)
        except AgentEnvError as error:
            logger.warning("scaling to %d containers failed and will be retried: %s", count, error)
            raise
        self._sent = count
