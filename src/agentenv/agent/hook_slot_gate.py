"""Limits how many agents of an environment hold or request a slot at once, so that no two wait for each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from agentenv.errors import ConfigError


@dataclass
class _Pass:
    of: HookSlotGate
    reserved: bool
    held: bool = True
    """Tasks that outlive a rollout keep a reference to a pass that is over."""


_latest: ContextVar[_Pass | None] = ContextVar("agentenv_slot_pass", default=None)


class HookSlotGate:
    """One pass per slot, of which ``reserved`` are for agents that hooks run while their rollout holds its own slot.
    Without the reservation, as many rollouts as there are slots could wait for each other for ever."""

    def __init__(self, slots: int, *, reserved: int = 0) -> None:
        self._free = asyncio.Semaphore(slots - reserved)
        self._reserved = asyncio.Semaphore(reserved)
        self._any_reserved = reserved > 0

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Hold a pass, waiting without a deadline. Raises: ConfigError while the caller holds one, when none is
        reserved for that or it holds a reserved one."""
        outer = _held()
        inside = outer is not None and outer.of is self  # another environment's gate has its own slots
        if inside and (not self._any_reserved or (outer is not None and outer.reserved)):
            raise _refusal(self._any_reserved)
        async with self._reserved if inside else self._free:
            held = _Pass(self, reserved=inside)
            _latest.set(held)
            try:
                yield
            finally:
                held.held = False
                _latest.set(outer)


def holds_slot() -> bool:
    """Whether the caller is, or was started by, a hook of a rollout that holds its slot."""
    return _held() is not None


def _held() -> _Pass | None:
    latest = _latest.get()
    return latest if latest is not None and latest.held else None


def _refusal(any_reserved: bool) -> ConfigError:
    if any_reserved:
        return ConfigError("hook_slots", "an agent run by a hook cannot wait for the slot of another one")
    return ConfigError(
        "hook_slots",
        "is 0, but a hook runs an agent while its rollout holds a slot: rollouts could wait for each other forever",
        next_step="set it to the number of such agents that may run at once; rollouts get that many slots less",
    )
