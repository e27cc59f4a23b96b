"""How many calls a trajectory and a group have made of each tool. Pure: counts and answers."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Final

from agentenv.wire.toolserver import CallScope

_MOST_KEPT: Final = 20_000
"""Owners remembered; the one not heard of for longest is forgotten first."""


class Budgets:
    """Counts per owner and tool. A limit of None never refuses."""

    def __init__(self) -> None:
        self._trajectories: OrderedDict[str, Counter[str]] = OrderedDict()
        self._groups: OrderedDict[str, Counter[str]] = OrderedDict()

    def spend(self, scope: CallScope, tool: str, *, per_trajectory: int | None, per_group: int | None) -> str | None:
        """Count one call; or say, for the model to read, why it may not be made (nothing is counted then)."""
        own = _of(self._trajectories, scope.trajectory)
        if per_trajectory is not None and own[tool] >= per_trajectory:
            return f"{tool} may be called {_times(per_trajectory)}: the limit is reached, continue without it"
        group = _of(self._groups, scope.group) if scope.group else Counter[str]()
        if per_group is not None and group[tool] >= per_group:
            reached = "the limit is reached, continue without it"
            return f"{tool} may be called {_times(per_group)} by the whole group: {reached}"
        own[tool] += 1
        group[tool] += 1
        return None

    def refund(self, scope: CallScope, tool: str) -> None:
        """The call failed on our side: it does not count."""
        for kept, owner in ((self._trajectories, scope.trajectory), (self._groups, scope.group)):
            if owner in kept and kept[owner][tool] > 0:
                kept[owner][tool] -= 1

    def ended(self, trajectory: str) -> None:
        """The trajectory is over; its group's counts stay."""
        self._trajectories.pop(trajectory, None)


def _of(kept: OrderedDict[str, Counter[str]], owner: str) -> Counter[str]:
    counts = kept.setdefault(owner, Counter())
    kept.move_to_end(owner)
    if len(kept) > _MOST_KEPT:
        kept.popitem(last=False)
    return counts


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
