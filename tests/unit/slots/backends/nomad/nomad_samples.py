"""Facts of a small invented cluster, for the tests of what is decided from them."""

from __future__ import annotations

from agentenv.containers.handle import ContainerHandle
from agentenv.slots.backends.nomad.facts import Allocation, TaskEvent

STARTED = TaskEvent("Started", "Task started by client")


def handle(container: str, index: int = 0) -> ContainerHandle:
    return ContainerHandle(container, index, "http://127.0.0.1:20000", "secret", 2)


def allocation(id_: str = "a", at: int = 10, **changes: object) -> Allocation:
    """A running allocation at an index of the log."""
    given: dict[str, object] = {"client": "running", "task_state": "running", "address": "127.0.0.1:20000", **changes}
    return Allocation(id=id_, index=0, node="n1", modify_index=at, **given)  # type: ignore[arg-type]
