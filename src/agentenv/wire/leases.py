"""Leases and slots as the container reports them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema

from agentenv.wire.base import (
    MAX_TAG_CHARS,
    CheckpointName,
    Count,
    KeptModel,
    SlotIndex,
    Tag,
    TrajectoryName,
    WireModel,
    control_character_in,
)
from agentenv.wire.network import NetworkPolicy
from agentenv.wire.roots import RootSpec
from agentenv.wire.states import SlotState

TTL_S = Annotated[float, Field(gt=0, le=24 * 3600)]


RunKind = Literal["train", "eval", "interactive"]


MAX_TOKENS = 8
"""Longest chain of tokens of which each was made by the next."""


class TokenTag(KeptModel):
    """A token of a farm by its id (``jti``), and the most slots that may be held at once by it and by the tokens that
    it made (None: no limit)."""

    id: Annotated[Tag, Field(min_length=1)]
    cap: Count | None = None


class Tags(KeptModel):
    """Who a lease is for. Its container stores and reports it, so that a farm that starts finds out to whom the slots
    are leased. A pool with containers of its own needs none."""

    run: Tag = ""
    """The run whose share of the farm includes the lease, and whose passes may use it (:mod:`agentenv.wire.passes`)."""
    environment: Tag = ""
    kind: RunKind = "train"
    group: Tag = ""
    item: Tag = ""
    tokens: Annotated[tuple[TokenTag, ...], Field(max_length=MAX_TOKENS)] = ()
    """The token of its request to a farm, and the tokens by whose right that was made, each by the next."""

    def without_tokens(self) -> Tags:
        """The same for every client."""
        return self.model_copy(update={"tokens": ()}) if self.tokens else self


NO_TAGS = Tags()
OWN_RUN = "(own)"
"""The run of leases in containers that end with their client, so that there are passes for them. No farm's run has this
name."""
BY_NAME = "plain"
"""The environment of leases that a farm holds itself, for programs that only know their trajectories' names."""
LOST_KEPT_S = 3600.0
"""How long containers and farms keep lost leases of that environment."""
LOST_KEPT = 2_000
"""How many of one run each of them keeps: the latest."""


def short_tag(text: str) -> str:
    """``text`` as a tag: on one line, and cut to the length of one."""
    line = "".join("?" if control_character_in(character) else character for character in text)
    return line[:MAX_TAG_CHARS].encode("utf-8", "replace").decode()


class LeaseKey(WireModel):
    """The right to use one slot; required with every call. ``service``: the one of its services that is called
    (:class:`agentenv.wire.roots.ServiceSpec`); empty: the slot's main root, and for what is done to the whole slot."""

    slot: SlotIndex
    epoch: Count
    secret: Annotated[str, Field(min_length=16, max_length=128, repr=False)]
    service: Annotated[str, Field(max_length=63, exclude_if=lambda name: not name)] = ""


def _root(raw: Any) -> RootSpec:
    """Raises ConfigError, which is not a ValueError: the client gets it unchanged, and does not retry elsewhere."""
    return raw if isinstance(raw, RootSpec) else RootSpec.parse(raw)


Root = Annotated[
    RootSpec,
    PlainValidator(_root),
    PlainSerializer(RootSpec.to_dict),
    WithJsonSchema({"type": "object", "description": "See agentenv.wire.roots.RootSpec."}),
]


@dataclass(frozen=True)
class SlotRequest:
    """A request to a pool: slots for these trajectories, all or none. It is not sent in this form.

    ``request_id`` makes a repeated request to a container find the lease it has made: the lease of the n-th trajectory
    is requested as ``request_id-n``. Empty: it will not be repeated.
    """

    trajectories: tuple[str, ...]
    tags: Tags = NO_TAGS
    request_id: str = ""
    ttl_s: float | None = None
    """Of the leases; None: the pool's."""
    root: RootSpec | None = None
    """Root of the slots; None: plain slots."""
    container: str = ""
    """The only container that can serve it, because it has the checkpoint of ``root``; empty: any."""
    existing: bool = False
    """Only the leases that a request with this id has made before. Of a farm."""

    @property
    def image(self) -> str:
        """Digest of the image that the slots' node must have; empty: none, or the container is given."""
        return "" if self.root is None or self.container else self.root.image

    def id_of(self, position: int) -> str:
        """The request id for one of the trajectories."""
        return f"{self.request_id}-{position}" if self.request_id else ""


class LeaseRequest(WireModel):
    """``POST /v1/leases``. Repeating a ``request_id`` returns the same lease (its reply was lost). With a ``root`` the
    slot gets that root first; the response is sent when it has it, or when that failed (then the lease has ended)."""

    slot: SlotIndex
    trajectory: TrajectoryName
    ttl_s: TTL_S
    request_id: Annotated[str, Field(min_length=16, max_length=128)]
    tags: Tags = NO_TAGS
    root: Root | None = None


LAYERS_HEADER = "X-Agentenv-Layers"
"""How many layers the checkpoint has, of which one is in the response."""


def _network(raw: Any) -> NetworkPolicy:
    """Raises ConfigError: see :func:`_root`."""
    return raw if isinstance(raw, NetworkPolicy) else NetworkPolicy.parse(raw)


Network = Annotated[
    NetworkPolicy,
    PlainValidator(_network),
    PlainSerializer(NetworkPolicy.to_json),
    WithJsonSchema({"type": "object", "description": "See agentenv.wire.network.NetworkPolicy."}),
]


class SealSlot(WireModel):
    """Kill everything running in the slot, and recreate its namespaces over the same workspace."""

    do: Literal["seal"] = "seal"


class CheckpointSlot(WireModel):
    """Keep the slot's files as a checkpoint, which the reply names. Its processes end; it continues with the files. The
    name is a secret: with it a client may restore the checkpoint, or lease slots here that begin with it."""

    do: Literal["checkpoint"] = "checkpoint"


class RestoreSlot(WireModel):
    """Give the slot the files of a checkpoint in place of its own. Its processes end. If there is no such checkpoint,
    the lease ends, too."""

    do: Literal["restore"] = "restore"
    checkpoint: CheckpointName


class DropCheckpoint(WireModel):
    """Drop a checkpoint of any slot of the container. Slots that began with it keep its files. No effect
    if there is none."""

    do: Literal["drop"] = "drop"
    checkpoint: CheckpointName


class ChangeNetwork(WireModel):
    """Change what an image slot may reach. Its processes continue; connections that are no longer allowed are closed
    when the response is sent."""

    do: Literal["network"] = "network"
    network: Network


class PauseSlot(WireModel):
    """End the lease, and keep the slot's files as a checkpoint under the lease's trajectory (:class:`PausedSlot`). Its
    processes end. The reply names the checkpoint; a lease of that trajectory that begins with it takes it away. If it
    cannot be made, the lease goes on."""

    do: Literal["pause"] = "pause"


class PauseWhenIdle(WireModel):
    """From now on: when the lease is not renewed in time, it is paused (:class:`PauseSlot`). While there is no room for
    its files it goes on, and is tried again after another time to live."""

    do: Literal["pause_when_idle"] = "pause_when_idle"


LeaseAction = Annotated[
    SealSlot | CheckpointSlot | RestoreSlot | DropCheckpoint | ChangeNetwork | PauseSlot | PauseWhenIdle,
    Field(discriminator="do"),
]
"""What a lease's holder may do to its slot."""


class PausedSlot(KeptModel):
    """What is left of a lease that was paused: its files. ``checkpoint`` is a secret, as that of
    :class:`CheckpointSlot`, and ``root`` that of a slot that goes on with them."""

    trajectory: TrajectoryName
    tags: Tags
    checkpoint: Annotated[CheckpointName, Field(repr=False)]
    root: Annotated[Root, Field(repr=False)]
    paused_s: float
    """Seconds since then."""
    resumed: bool = False
    """A lease goes on with it, or is being made to: one that a farm may not list yet."""


class ActionRequest(WireModel):
    """``POST /v1/leases/act``. Repeating a ``request_id`` does not seal or pause again, and returns the same
    checkpoint; the other actions may be done twice."""

    key: LeaseKey
    action: LeaseAction
    request_id: Annotated[str, Field(max_length=128)] = ""


class ActionReply(WireModel):
    """The slot's state afterwards, and the name of a checkpoint that was made."""

    slot: SlotIndex
    state: SlotState
    checkpoint: str = ""


class LeaseGrant(WireModel):
    """The response: the key, and how long it is valid without a heartbeat."""

    key: LeaseKey
    trajectory: str
    ttl_s: float


class RenewRequest(WireModel):
    """``POST /v1/leases/renew``: one heartbeat for many leases of one container."""

    keys: Annotated[tuple[LeaseKey, ...], Field(max_length=10_000)]
    ttl_s: TTL_S


class LeaseLoss(WireModel):
    """Why a lease was lost: ``error`` is the ``code`` of a class in :mod:`agentenv.errors`."""

    slot: SlotIndex
    error: str
    message: str


class RenewReply(WireModel):
    """Leases that are still valid and leases that have ended; ``lost`` gives the reason for those that were lost."""

    renewed: tuple[SlotIndex, ...]
    stale: tuple[SlotIndex, ...]
    lost: tuple[LeaseLoss, ...] = ()
    supervisor_silent_s: float = 0.0
    """Seconds for which the container's supervisor, which resets slots, has not responded."""


class EndRequest(WireModel):
    """``POST /v1/leases/end``: end the lease of this epoch, regardless of its holder. For operators and farms, who do
    not know the lease's secret. Its holder then gets ``error`` (the ``code`` of a LeaseLostError) with ``message``;
    without one the lease ends as if it had been released, and is no longer a :class:`LostLease` if it was lost
    before."""

    slot: SlotIndex
    epoch: Count
    error: Annotated[str, Field(max_length=64)] = ""
    message: Annotated[str, Field(max_length=1_000)] = ""
    at_renewal: bool = False
    """End it at its next renewal instead of now. Requires ``error``."""


class ReleaseReply(WireModel):
    """``POST /v1/leases/release`` (body: a :class:`LeaseKey`) and ``/v1/leases/end`` (an :class:`EndRequest`).

    Release returns once the slot is verified clean (``free``) or could not be verified (``quarantined``). If that
    takes long it returns earlier (``resetting``: repeat the request). Releasing an epoch that has ended is not an
    error."""

    slot: SlotIndex
    state: SlotState


class LostLease(WireModel):
    """A lease of a trajectory that calls by its name alone (:data:`BY_NAME`), which has ended and was not released:
    the name must not be given another, empty slot without an error. ``error`` is the ``code`` of a class in
    :mod:`agentenv.errors`."""

    slot: SlotIndex
    epoch: int
    run: Tag
    trajectory: TrajectoryName
    error: str
    message: str
    lost_s: float
    """Seconds since it was lost."""


class SlotReport(KeptModel):
    """One slot in ``GET /v1/slots``. Secrets are never reported."""

    slot: SlotIndex
    state: SlotState
    epoch: int
    trajectory: str | None = None
    tags: Tags | None = None
    expires_in_s: float | None = None
    running_calls: int = 0
    in_state_s: float | None = None
    """Seconds in this state, at most since this server process started."""
    reason: str = ""
    """Why a slot is quarantined or lost; empty otherwise."""
