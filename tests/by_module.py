"""Which process runs what, where ``make test`` has several."""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController


class ByModule(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """A module's tests are one process's, for its fixtures' sake."""

    together: str
    """Modules below this directory are one process's, one after the other."""

    def __init__(self, config: pytest.Config, log: Producer, together: str) -> None:
        super().__init__(config, log)
        self.together = together

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return self.together if module.startswith(f"{self.together}/") else module

    def remove_node(self, node: WorkerController) -> str | None:
        """The test that ended its process, which is not given out again (xdist 3.8 does, until no process may be
        started any more); the others of its module are."""
        units = self.assigned_work.pop(node)
        started = ((unit, nodeid) for unit in units.values() for nodeid, done in unit.items() if not done)
        crashed: str
        for unit, crashed in started:
            unit[crashed] = True
            break
        else:
            return None
        self.workqueue.update({scope: unit for scope, unit in units.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed
