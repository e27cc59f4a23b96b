"""Counts the calls of each tool made by a trajectory and by a group. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Final

from agentenv.wire.toolserver import CallScope

_MOST_KEPT: Final = 20_000
"""Owners remembered; the least recently used one is forgotten first."""


class Budgets:
    """Counts per owner and tool. A limit of None never refuses."""

    def __init__(self) -> None:
        self._trajectories: OrderedDict[str, Counter[str]] = OrderedDict()
        self._groups: OrderedDict[str, Counter[str]] = OrderedDict()

    def spend(self, scope: CallScope, tool: str, *, per_trajectory: int | None, per_group: int | None) -> str | None:
        """Count one call; or return, for the model, why it may not be made (then nothing is counted)."""
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
        """Do not count a call that failed on our side."""
        for kept, owner in ((self._trajectories, scope.trajectory), (self._groups, scope.group)):
            if owner in kept and kept[owner][tool] > 0:
                kept[owner][tool] -= 1

    def ended(self, trajectory: str) -> None:
        """Forget the trajectory; its group's counts stay."""
        self._trajectories.pop(trajectory, None)


def _of(kept: OrderedDict[str, Counter[str]], owner: str) -> Counter[str]:
    counts = kept.setdefault(owner, Counter())
    kept.move_to_end(owner)
    if len(kept) > _MOST_KEPT:
        kept.popitem(last=False)
    return counts


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
