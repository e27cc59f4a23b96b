"""Asks the backend for as many containers as the scale policy wants."""

from __future__ import annotations

import logging

from agentenv.config import PoolSettings
from agentenv.errors import AgentEnvError
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.ledger import Ledger
from agentenv.slots.scaling import ScalePolicy, ScaleState

logger = logging.getLogger(__name__)

_UNKNOWN_SLOTS = 10_000
"""Taken for a container's slots before the first has started, so that one is started to find out."""


class Scaler:
    """The pool's goal, and how it moves."""

    def __init__(self, backend: ContainerBackend, settings: PoolSettings, now: float) -> None:
        self._backend = backend
        idle_s = settings.idle_containers_after_s
        self._policy = ScalePolicy(
            settings.min_containers,
            settings.max_containers,
            idle_s,
            target_idle_slots=settings.target_idle_slots,
            cooldown_s=min(settings.scale_cooldown_s, idle_s / 2),
        )
        self._changed_at = now
        self.goal = settings.min_containers
        self.slots_per_container = _UNKNOWN_SLOTS

    async def start(self) -> None:
        """Ask for the first containers."""
        await self._backend.scale(self.goal)

    async def follow(self, ledger: Ledger, now: float) -> None:
        """Decide anew, and ask the backend when the goal has moved. Raises AgentEnvError; tried again next time."""
        state = ScaleState(
            goal=self.goal,
            waiting=ledger.waiting,
            containers=ledger.containers(),
            slots_per_container=self.slots_per_container,
            changed_at=self._changed_at,
        )
        wanted = self._policy.decide(state, now)
        if wanted == self.goal:
            return
        if wanted < self.goal:
            ledger.drain_from(wanted)  # before anybody is given a slot of a container that is to go
        logger.info("scaling from %d to %d containers", self.goal, wanted)
        try:
            await self._backend.scale(wanted)
        except AgentEnvError as error:
            logger.warning("scaling to %d containers failed, tried again soon: %s", wanted, error)
            raise
        self.goal, self._changed_at = wanted, now
