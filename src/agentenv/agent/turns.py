"""Limits how many agents of an environment hold or request a slot at once, so that no two wait for each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from agentenv.errors import ConfigError


@dataclass
class _Turn:
    of: Turns
    kept: bool
    held: bool = True
    """Tasks that outlive a turn keep a reference to one that is over."""


_latest: ContextVar[_Turn | None] = ContextVar("agentenv_turn", default=None)


class Turns:
    """One turn per slot, of which ``kept`` are reserved for agents that hooks run while their rollout holds its own
    slot. Without the reservation, as many rollouts as there are turns could wait for each other for ever."""

    def __init__(self, slots: int, *, kept: int = 0) -> None:
        self._free = asyncio.Semaphore(slots - kept)
        self._kept = asyncio.Semaphore(kept)
        self._any_kept = kept > 0

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Take a turn, waiting without a deadline. Raises: ConfigError inside another turn, when none is reserved
        for that or the other turn is a reserved one itself."""
        outer = _held()
        inside = outer is not None and outer.of is self
        if inside and (not self._any_kept or (outer is not None and outer.kept)):
            raise _refusal(self._any_kept)
        async with self._kept if inside else self._free:
            turn = _Turn(self, kept=inside)
            _latest.set(turn)
            try:
                yield
            finally:
                turn.held = False
                _latest.set(outer)


def inside_a_turn() -> bool:
    """Whether the caller is, or was started by, a hook of a rollout that holds its slot."""
    return _held() is not None


def _held() -> _Turn | None:
    latest = _latest.get()
    return latest if latest is not None and latest.held else None


def _refusal(any_kept: bool) -> ConfigError:
    if any_kept:
        return ConfigError("hook_slots", "an agent run by a hook cannot wait for the slot of another one")
    return ConfigError(
        "hook_slots",
        "is 0, but a hook runs an agent while its rollout holds a slot: rollouts could wait for each other forever",
        next_step="set it to the number of such agents that may run at once; rollouts get that many slots less",
    )
