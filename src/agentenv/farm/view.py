"""Records of a farm for its operators: the backend's view, and the replies of containers and pools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from agentenv.containers.handle import ContainerHandle
from agentenv.errors import ConfigError
from agentenv.farm_client.access import FarmAccess
from agentenv.metrics.scrape import Samples
from agentenv.wire.leases import SlotReport
from agentenv.wire.server import ServerInfo
from agentenv.wire.states import SlotState

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Location of a container, existing or planned. ``state`` is in the backend's terms; ``handle`` is set when it
    can be reached."""

    id: str
    index: int
    state: str
    node: str = ""
    detail: str = ""
    handle: ContainerHandle | None = None
    age_s: float | None = None


@dataclass(frozen=True)
class Census:
    """A farm as known to its backend. ``exists`` False: there is none, and ``next_step`` tells how to start one."""

    backend: str
    where: str
    exists: bool
    goal: int = 0
    places: tuple[Place, ...] = ()
    waiting_for: tuple[str, ...] = ()
    """Reasons why containers are missing, in the backend's terms."""
    faults: tuple[str, ...] = ()
    """Recent failures."""
    next_step: str = ""
    metrics_url: str | None = None
    owner: str = ""
    """Its current owner, for farms with one owner at a time."""
    service: FarmAccess | None = None
    """The service that grants its slots, where there is one."""

    @property
    def handles(self) -> tuple[ContainerHandle, ...]:
        """Handles of all reachable containers."""
        return tuple(place.handle for place in self.places if place.handle is not None)


class OperatorAccess(Protocol):
    """Access to a farm: to inspect it and to end it."""

    async def census(self) -> Census:
        """The farm's current state. Raises AgentEnvError when it cannot be determined."""

    async def down(self) -> str:
        """End the whole farm; returns what was done. It is not an error if there is none."""


@dataclass(frozen=True)
class ContainerView:
    """One container. ``problem``: why it did not answer; then the rest is empty."""

    place: Place
    info: ServerInfo | None = None
    slots: tuple[SlotReport, ...] = ()
    samples: Samples = field(default_factory=Samples)
    problem: str = ""

    @property
    def answers(self) -> bool:
        """Whether its server answered."""
        return self.info is not None

    def count(self, state: SlotState) -> int:
        """Number of slots in a state."""
        return sum(slot.state is state for slot in self.slots)


@dataclass(frozen=True)
class PoolView:
    """State of one process that leases slots, as reported by itself."""

    url: str
    pid: int | None
    samples: Samples
    problem: str = ""


@dataclass(frozen=True)
class FarmView:
    """The whole farm at one moment."""

    census: Census
    containers: tuple[ContainerView, ...] = ()
    pools: tuple[PoolView, ...] = ()

    @property
    def answering(self) -> int:
        """Number of containers whose server answered."""
        return sum(container.answers for container in self.containers)

    @property
    def slots(self) -> Counter[str]:
        """Slots by state."""
        return Counter(slot.state.value for container in self.containers for slot in container.slots)

    @property
    def well(self) -> bool:
        """Whether everything expected exists and answers."""
        census = self.census
        whole = census.exists and self.answering == len(self.containers) and self.answering >= census.goal
        return whole and not census.waiting_for and not self.slots[SlotState.quarantined.value]


def as_json(sight: FarmView) -> dict[str, Any]:
    """The ``--json`` document of ``agentenv status``. It contains no token."""
    census = sight.census
    return {
        "backend": census.backend,
        "where": census.where,
        "exists": census.exists,
        "well": sight.well,
        "goal_containers": census.goal,
        "answering_containers": sight.answering,
        "slots": dict(sight.slots),
        "containers": [_container(container) for container in sight.containers],
        "queue": [_pool(pool) for pool in sight.pools],
        "waiting_for": list(census.waiting_for),
        "faults": list(census.faults),
        "metrics_url": census.metrics_url,
        "owner": census.owner,
        "next_step": census.next_step,
    }


def slot_rows(sight: FarmView) -> list[dict[str, Any]]:
    """The ``--json`` document of ``agentenv slots``."""
    return [
        {"container": container.place.id, "index": container.place.index, **slot.model_dump(mode="json")}
        for container in sight.containers
        for slot in container.slots
    ]


def _container(sight: ContainerView) -> dict[str, Any]:
    place, counted = sight.place, sight.samples
    return {
        "id": place.id,
        "index": place.index,
        "state": place.state,
        "node": place.node,
        "detail": place.detail,
        "age_s": place.age_s,
        "url": place.handle.base_url if place.handle else None,
        "answers": sight.answers,
        "problem": sight.problem,
        "isolation": sight.info.isolation if sight.info else None,
        "slots": dict(Counter(slot.state.value for slot in sight.slots)),
        "calls": counted.one("agentenv_sandbox_calls_total"),
        "calls_running": counted.one("agentenv_sandbox_calls_running"),
        "calls_queued": counted.one("agentenv_sandbox_calls_queued"),
        "calls_faulted": counted.one("agentenv_sandbox_calls_faulted_total"),
        "calls_oom_killed": counted.one("agentenv_sandbox_calls_oom_killed_total"),
        "leases_expired": counted.one("agentenv_sandbox_leases_expired_total"),
        "slots_lost": counted.one("agentenv_sandbox_slots_lost_total"),
        "server_bytes": counted.one("agentenv_sandbox_server_resident_bytes"),
    }


def _pool(pool: PoolView) -> dict[str, Any]:
    return {
        "url": pool.url,
        "pid": pool.pid,
        "problem": pool.problem,
        "backend": next(iter(pool.samples.by("agentenv_build_info", "backend")), None),
        "waiting": pool.samples.one("agentenv_pool_waiting"),
        "sessions": pool.samples.one("agentenv_executor_sessions"),
        "calls_running": pool.samples.one("agentenv_executor_calls_running"),
        "leases_lost": pool.samples.one("agentenv_pool_leases_lost_total"),
        "faults": pool.samples.by("agentenv_pool_faults_total", "code"),
    }


def choose(named: Sequence[tuple[str, T]], beginning: str) -> T | None:
    """The item whose name begins with this text; None if there is none. Raises ConfigError when it is ambiguous."""
    found = [(name, value) for name, value in named if name.startswith(beginning)]
    if len({name for name, _ in found}) > 1:
        raise ConfigError(
            "CONTAINER", f"{beginning!r} could be {found[0][0]} or {found[1][0]}", next_step="write more of it"
        )
    return found[0][1] if found else None
