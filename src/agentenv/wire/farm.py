"""The messages of a farm service and its clients, over HTTP with JSON bodies.

A client requests slots (``POST /v1/asks``) and follows the answers in its event stream (``GET /v1/news``, one JSON
object per line). A grant holds all that is needed to use the slot at its container directly: calls, heartbeats and the
release never pass through the farm.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, TypeAdapter

from agentenv.wire.base import PROTOCOL_VERSION, Count, KeptModel, SlotIndex, Tag, TrajectoryName, WireModel
from agentenv.wire.leases import TTL_S, LeaseKey, Root, RunKind, Tags, TokenTag
from agentenv.wire.server import ErrorReply
from agentenv.wire.states import ContainerState, SlotState

MAX_ASKS: Final = 256
"""Asks in one request."""
MAX_GROUP: Final = 64
"""Trajectories in one ask."""
MAX_WAIT_S: Final = 25.0
"""How long the farm holds back an answer, at most."""
ASK_TTL_S: Final = 20.0
"""An ask is dropped when its client has neither followed its news nor repeated or read the ask for this long."""
NEWS_BEAT_S: Final = 2.0
"""Longest interval between two lines of the news."""

RUN_PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*"
RunName = Annotated[str, Field(max_length=128, pattern=rf"^({RUN_PATTERN})?$")]
"""Name of a run, possibly with its team in front (``team/run``); empty: the one that the token is for."""
TokenRun = Annotated[str, Field(max_length=130, pattern=rf"^(\*|{RUN_PATTERN}(/\*)?)$")]
"""The runs of a token: one (``team/run``), every run of a team (``team/*``), or every run (``*``)."""
Scope = Literal["admin", "run", "look", "read"]
"""``read``: see the runs covered. ``look``: what their slots print, too. ``run``: lease for them as well. ``admin``:
everything, of every run covered."""
LONGEST_TOKEN_S: Final = 10 * 365 * 86_400.0
"""Longest life of a token."""
PAGE_TOKEN_S: Final = 36_000.0
"""Life of a token that is made for the page."""
RequestId = Annotated[str, Field(min_length=16, max_length=100, pattern=r"^[A-Za-z0-9._-]+$")]
ClientId = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9._-]*$")]
TokenId = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._-]+$")]
LeaseId = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9._-]+/\d{1,4}/\d{1,18}$")]
"""``container/slot/epoch``: made of what the container itself knows, so that it outlives any farm process."""


class AskTags(KeptModel):
    """See :class:`agentenv.wire.leases.Tags`; the run is the request's, and the tokens are the sender's."""

    environment: Tag = ""
    kind: RunKind = "train"
    group: Tag = ""
    item: Tag = ""

    def of(self, run: str, tokens: tuple[TokenTag, ...] = ()) -> Tags:
        """The tags of a lease for that run."""
        return Tags(run=run, tokens=tokens, **dict(self))


class Ask(KeptModel):
    """A slot for each of ``trajectories``: all of them, or none. Repeating it with the same ``request_id`` finds it
    again, also after the farm was restarted and after it was granted; with another content it is an error."""

    request_id: RequestId
    trajectories: Annotated[tuple[TrajectoryName, ...], Field(min_length=1, max_length=MAX_GROUP)]
    tags: AskTags = AskTags()
    ttl_s: TTL_S = 30.0
    """The leases end when they are not renewed for this long: at most what the farm's settings allow (an hour)."""
    root: Root | None = None
    """What the slots are made from; None: plain ones."""
    image_reference: Annotated[str, Field(max_length=1_000, pattern=r"^[^\s\x00-\x1f]*$")] = ""
    """Where the root's image comes from, if that is known: a farm that was restarted may not know it any more."""
    container: Annotated[str, Field(max_length=256)] = ""
    """The only one that can serve it, because it has the root's checkpoint; empty: any."""
    existing: bool = False
    """Only what an ask with this id, these trajectories and tags was granted, whatever else that said: where it was
    granted nothing, or that has ended, this one is refused (``stale_lease``)."""


class AsksRequest(WireModel):
    """``POST /v1/asks``. Answered at once, or when one of the asks is decided, at the latest after ``wait_s``.

    ``client`` names the event stream of the answers; without one, repeat or read the ask to follow it.
    """

    asks: Annotated[tuple[Ask, ...], Field(min_length=1, max_length=MAX_ASKS)]
    run: RunName = ""
    client: ClientId = ""
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S)] = 0.0


class Grant(KeptModel):
    """A leased slot. Send ``token`` as bearer token to ``base_url`` (a sandbox server), ``key`` with every call, and
    renew within ``ttl_s``."""

    lease: LeaseId
    trajectory: str
    base_url: str
    token: Annotated[str, Field(repr=False)]
    key: LeaseKey
    ttl_s: float
    index: int
    slots: int
    """Place of the container among the farm's, and how many slots it has."""
    relay_url: str = ""
    """A way to the container through a relay, for clients that cannot reach ``base_url``; empty: there is none."""
    root: Root | None = None
    """Of an ask for what exists: what the slot was made from. None also at a farm that was restarted since."""


WaitingFor = Literal["queue", "cap", "paused", "no_capacity", "starting", "image"]


class Place(WireModel):
    """Why an ask waits, and the estimated time.

    ``why``: ``queue`` (others come first, or have the slots), ``cap`` (the run has all it may have, or the token of
    ``detail``), ``paused`` (the run is), ``starting`` (containers are being started), ``no_capacity`` (they cannot be;
    ``detail``), ``image`` (nodes with free slots do not have its image yet; ``detail``: what failed last in fetching
    it).
    """

    why: WaitingFor
    detail: str = ""
    position: int = 0
    """Among its run's asks of this kind: 1 is the next."""
    slots_ahead: int | None = None
    """Slots that others get before it, if nothing changes, as of the last half second; None if they are very many, or
    that is not known yet."""
    eta_s: float | None = None
    waited_s: float = 0.0
    run_held: int = 0
    run_cap: int | None = None
    """The smallest cap of the run, its token, and the tokens that that was made by."""
    run_fair_share: float = 0.0
    free: int = 0
    total: int = 0


class AskState(WireModel):
    """The state of an ask: ``leases`` when it is granted, ``place`` while it waits, ``error`` when it is
    refused."""

    request_id: str
    state: Literal["granted", "waiting", "refused"]
    leases: tuple[Grant, ...] = ()
    place: Place | None = None
    error: ErrorReply | None = None


class AsksReply(WireModel):
    """The answer to ``POST /v1/asks``, in the order of the asks."""

    asks: tuple[AskState, ...]


class Cancelled(WireModel):
    """The answer to ``DELETE /v1/asks/{request_id}``; False: there is no such ask (any more, or yet: one that arrives
    within a minute is refused)."""

    cancelled: bool


class NewsHello(WireModel):
    """The first line: ``boot`` is another after each start of the farm, so open asks have to be repeated."""

    type: Literal["hello"] = "hello"
    boot: str
    generation: int


class NewsAsk(WireModel):
    """An ask was granted or refused, or it waits for another reason than before."""

    type: Literal["ask"] = "ask"
    ask: AskState


class NewsLost(WireModel):
    """A lease has ended because of the farm: its container has ended, or the slot was reclaimed. Containers report it
    too, if they still can."""

    type: Literal["lost"] = "lost"
    lease: LeaseId
    error: ErrorReply


class NewsLeaving(WireModel):
    """The farm ends. Leases stay valid; a successor will answer."""

    type: Literal["leaving"] = "leaving"


class NewsBeat(WireModel):
    """The farm is alive."""

    type: Literal["beat"] = "beat"


NewsLine = Annotated[NewsHello | NewsAsk | NewsLost | NewsLeaving | NewsBeat, Field(discriminator="type")]
news_line: TypeAdapter[NewsLine] = TypeAdapter(NewsLine)


class ReleaseLeases(WireModel):
    """``POST /v1/leases/release``: for clients that cannot reach the containers."""

    leases: Annotated[tuple[LeaseId, ...], Field(min_length=1, max_length=MAX_ASKS)]


class ReleasedLeases(WireModel):
    """The answer: what has become of each slot (None: there is no such lease of this run)."""

    states: dict[str, SlotState | None]


class LeaseView(WireModel):
    """One lease in ``GET /v1/leases``; never its key."""

    lease: str
    container: str
    slot: SlotIndex
    trajectory: str
    tags: Tags
    age_s: float | None = None
    """Since it was granted. Of two leases in one list the older one was granted first."""


class LeaseList(WireModel):
    """``GET /v1/leases``."""

    leases: tuple[LeaseView, ...]


class EndedLeases(WireModel):
    """The answer to ``DELETE /v1/leases``."""

    ended: int


class PausedView(KeptModel):
    """One paused slot in ``GET /v1/paused``. ``root`` has its checkpoint, which is a secret: the route needs a token
    that may lease."""

    container: str
    trajectory: str
    tags: Tags
    root: Annotated[Root, Field(repr=False)]
    paused_s: float
    resumed: bool = False
    """A lease goes on with it, or is being made to: it may not be listed yet."""


class PausedList(WireModel):
    """``GET /v1/paused``: of the containers that answer."""

    paused: tuple[PausedView, ...]


class DroppedPaused(WireModel):
    """The answer to ``DELETE /v1/paused``."""

    dropped: int


class RunShare(WireModel):
    """What a run is entitled to."""

    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Its share of contested slots, relative to the weights of the others."""
    guaranteed: Count = 0
    """Slots that it gets before any run above its guarantee."""
    cap: Count | None = None
    """Most slots it may have."""
    paused: bool = False
    """No new slots."""


class RunStatus(WireModel):
    """One run in ``GET /v1/runs``."""

    run: str
    share: RunShare
    held: dict[RunKind, int]
    waiting: int
    """Requested slots."""
    oldest_wait_s: float | None = None
    fair_share: float = 0.0
    """Slots it would have now if all were divided by guarantee, weight and need."""
    granted: int = 0
    """Since this farm process started."""


class RunList(WireModel):
    """``GET /v1/runs``."""

    runs: tuple[RunStatus, ...]


class ContainerSeen(WireModel):
    """One container in ``GET /v1/containers``; its token is never shown."""

    id: str
    index: int
    base_url: str
    state: ContainerState
    slots: dict[str, int]
    supervisor_silent_s: float = 0.0


class ContainerList(WireModel):
    """``GET /v1/containers``."""

    containers: tuple[ContainerSeen, ...]


class Draining(WireModel):
    """The answer to ``POST /v1/containers/{container}/drain``: it gets no new leases, and is replaced when those that
    it has (``leases``) have ended."""

    container: str
    leases: int


class TokenRequest(WireModel):
    """``POST /v1/tokens``. The token may not allow more than the token of the request: neither other runs, nor a larger
    cap, nor a later end."""

    run: TokenRun
    scope: Scope = "run"
    cap: Count | None = None
    """Most slots that may be held at once by this token and those that it makes, whatever their runs; None: as many as
    its runs may."""
    expires_s: Annotated[float, Field(gt=0, le=LONGEST_TOKEN_S)]


class MintedToken(WireModel):
    """The answer to ``POST /v1/tokens``. ``jti`` is the token's id, by which it can be revoked."""

    token: Annotated[str, Field(repr=False)]
    jti: str
    run: TokenRun
    scope: Scope
    cap: int | None = None
    expires_s: float


class Revoked(WireModel):
    """The answer to ``DELETE /v1/tokens/{jti}``: the token is accepted no longer, nor those that it made. So many of
    their ``streams`` were ended, and ``asks`` withdrawn; their ``leases`` are not renewed, or have ``ended``. ``kept``:
    the next service knows of it; otherwise add the id to ``tokens.denied`` in its settings."""

    jti: str
    streams: int
    asks: int
    leases: int
    ended: bool
    kept: bool


class FarmLoad(WireModel):
    """The farm's slots and containers by state."""

    slots: dict[str, int]
    containers: dict[str, int]
    waiting: int
    """Asks that wait."""
    goal_containers: int
    max_containers: int


class FarmInfo(WireModel):
    """``GET /v1/farm``: the handshake."""

    farm: str
    version: str
    boot: str
    generation: int
    protocol: int = PROTOCOL_VERSION
    state: Literal["leader", "standby"] = "leader"
    slots_per_container: int
    max_slots: int
    isolation: str
    require_sandbox: bool
    allow_network: bool
    limits: dict[str, int]
    """See :class:`agentenv.wire.spec.SlotLimits`."""
    relay_url: str = ""
    images: Literal["client", "farm"] = "client"
    """Who sees to it that an image is where a slot has it as its root: the client, or the farm (``/v1/images``)."""
    load: FarmLoad
    run: RunStatus | None = None
    """The run of the request's token; None for a token of several runs."""
    problem: str = ""
    """Why containers cannot be started; empty while they can."""
