"""The decisions of the ledger, which the container manager carries out."""

from __future__ import annotations

from dataclasses import dataclass

from agentenv.errors import AgentEnvError
from agentenv.slots.records import LeaseRecord
from agentenv.wire.leases import NO_TAGS, Tags
from agentenv.wire.roots import RootSpec


@dataclass(frozen=True)
class Grant:
    """Request this slot from its container for this trajectory; report back with confirm or refuse. ``request_id``:
    see :class:`SlotRequest`; empty: any."""

    lease: int
    container: str
    slot: int
    trajectory: str
    deadline: float
    tags: Tags = NO_TAGS
    request_id: str = ""
    ttl_s: float | None = None
    root: RootSpec | None = None


@dataclass(frozen=True)
class HandOver:
    """The container granted the lease: give it to the waiter, or release it if the waiter has left. A group gets all
    of its leases at once, one command each."""

    ticket: int
    lease: int
    container: str
    trajectory: str


@dataclass(frozen=True)
class Expire:
    """The waiter's deadline has passed. ``position`` 1 is the head of the queue; 0: a slot was being requested."""

    ticket: int
    position: int
    waited_s: float


@dataclass(frozen=True)
class Fail:
    """The waiter can never be served: the only container that could is gone or leaving, or no node can have its image.
    It waits no longer."""

    ticket: int
    error: AgentEnvError


@dataclass(frozen=True)
class EndLease:
    """The lease was ended by someone other than its holder."""

    lease: int
    error: AgentEnvError
    record: LeaseRecord
    """What it was."""


@dataclass(frozen=True)
class Reclaim:
    """Have the container reset the slot, then report freed, quarantined or taken. ``lease``: its last lease."""

    container: str
    slot: int
    lease: int | None
    epoch: int | None = None
    """The epoch of that lease, if it is known; it may have ended already."""


@dataclass(frozen=True)
class Retire:
    """The container has no lease and is not worth keeping: replace it."""

    container: str
    reason: str


@dataclass(frozen=True)
class Fetch:
    """Have a node's keeper fetch an image; report back with fetched or fetch_failed."""

    node: str
    image: str


Command = Grant | HandOver | Expire | Fail | EndLease | Reclaim | Retire | Fetch
