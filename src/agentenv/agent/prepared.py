"""Prepared slots that others begin from: which there are for each key, and which is dropped first. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from agentenv.executor.session import Checkpoint

MOST_PER_CONTAINER: Final = 256
"""Prepared states of one container. Memory bounds them earlier; this bounds many that are empty."""

Key = tuple[str, str]
"""What the environment calls the state, and the root of the slots (JSON), because a state is one of that root."""


@dataclass(frozen=True, eq=False)
class PreparedState:
    """The files of a slot in which ``prepare`` has run."""

    key: Key
    checkpoint: Checkpoint
    took_s: float
    """How long the preparation took."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """What the hook returned."""


class PreparedStates:
    """The prepared states of one environment: at most one per key and container, ``most`` per container."""

    def __init__(self, most: int = MOST_PER_CONTAINER) -> None:
        self._most = most
        self._states: dict[PreparedState, None] = {}
        """Least recently chosen first."""
        self._users: Counter[PreparedState] = Counter()

    def __len__(self) -> int:
        return len(self._states)

    def choose(self, key: Key, avoided: Collection[PreparedState] = ()) -> PreparedState | None:
        """The state of this key with the fewest users, without those ``avoided``; None if there is none."""
        found = [state for state in self._states if state.key == key and state not in avoided]
        chosen = min(found, key=lambda state: self._users[state], default=None)
        if chosen is not None:
            self._states[chosen] = self._states.pop(chosen)
        return chosen

    def here(self, key: Key, container: str) -> PreparedState | None:
        """The state of this key in that container."""
        return next((state for state in self._in(container) if state.key == key), None)

    def keep(self, state: PreparedState) -> list[PreparedState]:
        """Add a state. Returns those it replaces, which are forgotten: of the same key and container, and beyond the
        most that a container has."""
        here = self._in(state.checkpoint.container)
        replaced = [one for one in here if one.key == state.key]
        others = [one for one in here if one not in replaced]
        replaced += others[: max(0, len(others) + 1 - self._most)]
        for one in replaced:
            self.forget(one)
        self._states[state] = None
        return replaced

    def forget(self, state: PreparedState) -> None:
        """No effect if it is forgotten already."""
        self._states.pop(state, None)

    def oldest_unused(self, container: str) -> PreparedState | None:
        """The state of a container that was chosen least recently, of those that no rollout uses: another's
        memory would not be freed. None if there is none."""
        return next((one for one in self._in(container) if not self._users[one]), None)

    def begun(self, state: PreparedState) -> None:
        """One more rollout uses its files, or is about to."""
        self._users[state] += 1

    def ended(self, state: PreparedState) -> None:
        """One rollout less uses its files."""
        self._users[state] -= 1
        if not self._users[state]:
            del self._users[state]

    def by_container(self) -> dict[str, list[PreparedState]]:
        """All states."""
        return {name: self._in(name) for name in {state.checkpoint.container for state in self._states}}

    def _in(self, container: str) -> list[PreparedState]:
        return [state for state in self._states if state.checkpoint.container == container]
