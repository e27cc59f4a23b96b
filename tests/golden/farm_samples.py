"""Samples of what a farm service and its clients say."""

from __future__ import annotations

from agentenv.wire import farm, leases, server, sight
from agentenv.wire.base import WireModel
from agentenv.wire.roots import RootSpec
from agentenv.wire.states import ContainerState, SlotState

KEY = leases.LeaseKey(slot=3, epoch=7, secret="0123456789abcdef0123456789abcdef")
_ERROR = server.ErrorReply(error="quota", message="farm_run: m", next_step="n", fault="task", retry_after_s=1.5)
_TAGS = farm.AskTags(environment="repair", kind="eval", group="g", item="é")
_ASK = farm.Ask(
    request_id="r" * 16,
    trajectories=("t-0", "t-1"),
    tags=_TAGS,
    ttl_s=20.0,
    image_reference="debian:trixie",
    existing=True,
)
_GRANT = farm.Grant(
    lease="local-0-01234567/3/7",
    trajectory="t-0",
    base_url="http://10.0.0.1:4000",
    token="p1.cg.00",
    key=KEY,
    ttl_s=20.0,
    index=2,
    slots=10,
    relay_url="http://relay/c/local-0-01234567",
    root=RootSpec("", checkpoint="0c" * 16, workdir="/workspace/a"),
)
_PLACE = farm.Place(
    why="no_capacity",
    detail="d",
    position=2,
    slots_ahead=3,
    eta_s=4.5,
    waited_s=1.5,
    run_held=5,
    run_cap=8,
    run_fair_share=6.5,
    free=1,
    total=20,
)
_STATE = farm.AskState(request_id="r" * 16, state="granted", leases=(_GRANT,), place=_PLACE, error=_ERROR)
_SHARE = farm.RunShare(weight=2.0, guaranteed=3, cap=8, paused=True)
RUN = farm.RunStatus(
    run="team/exp7", share=_SHARE, held={"train": 4, "eval": 1}, waiting=6, oldest_wait_s=2.5, fair_share=6.5, granted=9
)
LOAD = farm.FarmLoad(slots={"free": 1}, containers={"ready": 2}, waiting=3, goal_containers=4, max_containers=5)
_VIEW = farm.LeaseView(
    lease="c/3/7",
    container="c",
    slot=3,
    trajectory="t",
    tags=leases.Tags(run="r", environment="repair", kind="eval", group="g", item="é"),
    age_s=1.5,
)
_SEEN = farm.ContainerSeen(
    id="c", index=2, base_url="http://10.0.0.1:4000", state=ContainerState.ready, slots={"free": 1},
    supervisor_silent_s=0.5,
)  # fmt: skip
_INFO = farm.FarmInfo(
    farm="default",
    version="0.1.0",
    boot="0011223344556677",
    generation=4,
    state="standby",
    slots_per_container=10,
    max_slots=50,
    isolation="full",
    require_sandbox=True,
    allow_network=False,
    limits={"processes": 400},
    relay_url="http://relay",
    images="farm",
    load=LOAD,
    run=RUN,
    problem="p",
)
_SLOT = sight.SlotSight(
    slot=3,
    state=SlotState.leased,
    since_s=1.5,
    epoch=7,
    run="team/exp7",
    kind="eval",
    environment="repair",
    trajectory="t",
)
_CONTAINER = sight.ContainerSight(id="c", index=2, node="10.0.0.1", state=ContainerState.ready, slots=(_SLOT,))
_QUEUE = sight.QueueSight(
    run="team/exp7", kind="eval", asks=2, slots=3, oldest_wait_s=1.5, why="no_capacity", detail="d", eta_s=2.5
)
_OTHERS = sight.OthersSight(runs=1, held=2, waiting=3)
_RATES = sight.RatesSight(
    at_s=12.0,
    calls_per_s=3.5,
    call_p50_s=0.01,
    call_p99_s=0.5,
    leases_per_s=1.5,
    calls_running=4,
    faults={"lease_lost": 1},
)

_PAUSED = farm.PausedView(
    container="c",
    trajectory="build",
    tags=leases.Tags(run="exp7", environment="named", kind="interactive"),
    root=RootSpec("", "0c" * 16),
    paused_s=2.5,
    resumed=True,
)

FARM_MODELS: tuple[WireModel, ...] = (
    _TAGS,
    _ASK,
    farm.AsksRequest(asks=(_ASK,), run="team/exp7", client="c-1", wait_s=2.5),
    _GRANT,
    _PLACE,
    _STATE,
    farm.AsksReply(asks=(_STATE,)),
    farm.Cancelled(cancelled=True),
    farm.NewsHello(boot="0011223344556677", generation=4),
    farm.NewsAsk(ask=_STATE),
    farm.NewsLost(lease="c/3/7", error=_ERROR),
    farm.NewsLeaving(),
    farm.NewsBeat(),
    farm.ReleaseLeases(leases=("c/3/7",)),
    farm.ReleasedLeases(states={"c/3/7": SlotState.resetting, "c/4/1": None}),
    _VIEW,
    farm.LeaseList(leases=(_VIEW,)),
    farm.EndedLeases(ended=2),
    _PAUSED,
    farm.PausedList(paused=(_PAUSED,)),
    farm.DroppedPaused(dropped=1),
    _SHARE,
    RUN,
    farm.RunList(runs=(RUN,)),
    _SEEN,
    farm.ContainerList(containers=(_SEEN,)),
    farm.Draining(container="c", leases=2),
    farm.Revoked(jti="0011223344556677", streams=2, asks=1, leases=3, ended=True, kept=True),
    farm.TokenRequest(run="team/*", scope="admin", cap=8, expires_s=3600.0),
    farm.MintedToken(token="h.c.s", jti="0011223344556677", run="team/*", scope="admin", cap=8, expires_s=3600.0),
    LOAD,
    _INFO,
    _SLOT,
    _CONTAINER,
    _QUEUE,
    _OTHERS,
    _RATES,
    sight.Sight(
        clock_s=12.5,
        farm=_INFO,
        containers=(_CONTAINER,),
        runs=(RUN,),
        others=_OTHERS,
        queue=(_QUEUE,),
        rates=(_RATES,),
    ),
    sight.SightChanges(
        clock_s=12.5,
        containers=(_CONTAINER,),
        gone=("c-2",),
        farm=_INFO,
        runs=(RUN,),
        others=_OTHERS,
        queue=(_QUEUE,),
        rates=(_RATES,),
    ),
)
