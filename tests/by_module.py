"""Which process runs what, where ``make test`` has several."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController


class ByModule(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """A module's tests are one process's, for its fixtures' sake. A third of the processes begin at the end of the
    list: modules that mostly wait stand at its beginning, those that mostly compute at its end, and at every moment
    there is some of both."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        if self.nodes.index(node) % 3 == 2:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)

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
