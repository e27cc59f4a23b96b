"""HTTP interface of the farm service: a FastAPI application. Types are in :mod:`agentenv.wire.farm`; who may use which
route is in :mod:`agentenv.api.farm_server.access`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated

from fastapi import FastAPI, Query
from starlette.exceptions import HTTPException

from agentenv._version import __version__
from agentenv.api.farm_server.access import ROUTES, Access, MyRight, checking
from agentenv.api.farm_server.ask_routes import AskRoutes
from agentenv.api.farm_server.farm import Farm
from agentenv.api.farm_server.openapi import document
from agentenv.api.farm_server.page_routes import page_routes
from agentenv.api.farm_server.paused import drop_paused, paused_in
from agentenv.api.farm_server.plain import plain_routes
from agentenv.api.farm_server.replies import handle_errors
from agentenv.api.farm_server.request_gate import RequestGate, elsewhere
from agentenv.api.farm_server.revocations import Revocations
from agentenv.api.farm_server.tokens import Right
from agentenv.errors import ConfigError, ForbiddenError, LeaseLostError
from agentenv.slots.records import LeaseRecord
from agentenv.wire import farm as wire
from agentenv.wire import images
from agentenv.wire.base import TrajectoryName
from agentenv.wire.leases import Tags
from agentenv.wire.server import ErrorReply, Health
from agentenv.wire.states import SlotState

TagFilter = Annotated[list[str], Query(alias="tag", max_length=8, description="`name:value`; all of them must match")]


def farm_app(farm: Farm, access: Access, revocations: Revocations | None = None) -> FastAPI:
    """The application over an open farm. Raises AssertionError when a route has no line in the table of rights."""
    app = FastAPI(
        title="agentenv farm",
        version=__version__,
        description="Slots of one farm for many training runs.",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # it would refer to the host that the client names
        generate_unique_id_function=lambda route: route.name,
    )
    app.router.route_class = checking(access)
    asks = AskRoutes(farm, access)
    app.add_middleware(RequestGate, farm=farm, asks=asks)
    handle_errors(app)
    _health_routes(app, farm)
    asks.declare(app)
    _lease_routes(app, farm)
    _paused_routes(app, farm)
    _run_routes(app, farm)
    _token_routes(app, farm, access, revocations or Revocations(access, farm))
    _image_routes(app, farm, access)
    plain_routes(app, farm, access)
    page_routes(app, farm)
    unlisted = {f"{method} {route.path}" for route in app.routes for method in route.methods} - ROUTES.keys()  # type: ignore[attr-defined]
    assert not unlisted, f"routes without a line in the table of rights: {unlisted}"
    return app


def _health_routes(app: FastAPI, farm: Farm) -> None:
    @app.get("/health")
    async def health() -> Health:
        """The process is alive."""
        leader_url = "" if farm.leads else farm.leader_url
        return Health(status="draining" if farm.ended.is_set() else "ok", version=__version__, leader_url=leader_url)

    @app.get("/ready", responses={503: {"model": ErrorReply}})
    async def ready() -> Health:
        """Asks are taken here."""
        if not farm.leads:
            raise elsewhere(farm)
        return Health(status="ok", version=__version__)

    described = functools.cache(functools.partial(document, app))

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> dict[str, object]:
        return described()

    @app.get("/v1/farm")
    async def info(right: MyRight) -> wire.FarmInfo:
        """The farm, and the run of the token."""
        return farm.info(right.only_run)


def _lease_routes(app: FastAPI, farm: Farm) -> None:
    @app.get("/v1/leases")
    async def leases(right: MyRight, run: wire.RunName = "", tag: TagFilter = []) -> wire.LeaseList:  # noqa: B006
        """Leases of the runs that the token covers."""
        chosen, now_s = _chosen(right, run, tag), farm.queue.now_s()
        return wire.LeaseList(leases=tuple(_view(lease, now_s) for lease in farm.queue.leases(chosen)))

    @app.post("/v1/leases/release")
    async def release(request: wire.ReleaseLeases, right: MyRight) -> wire.ReleasedLeases:
        """Release leases; their slots are reset."""
        states: dict[str, SlotState | None] = {}
        wanted = set(request.leases)
        for lease in farm.queue.leases(lambda one: right.covers(one.tags.run) and one.name in wanted):
            states[lease.name] = SlotState.resetting
            farm.queue.end(lease.id, None, right.jti)
        return wire.ReleasedLeases(states={name: states.get(name) for name in request.leases})

    @app.delete("/v1/leases/{container}/{slot}/{epoch}")
    async def end(container: str, slot: int, epoch: int, right: MyRight) -> wire.EndedLeases:
        """End a lease; its holder gets an error."""
        name = f"{container}/{slot}/{epoch}"
        return _end(farm, right, lambda one: right.covers(one.tags.run) and one.name == name)

    @app.delete("/v1/leases")
    async def end_many(right: MyRight, run: wire.RunName = "", tag: TagFilter = []) -> wire.EndedLeases:  # noqa: B006
        """End the leases of a run, or those with these tags."""
        if not run and not tag:
            raise ConfigError("run", "is missing", next_step="give the run or a tag of the leases to end")
        return _end(farm, right, _chosen(right, run, tag))


def _paused_routes(app: FastAPI, farm: Farm) -> None:
    @app.get("/v1/paused")
    async def paused(right: MyRight, run: wire.RunName = "") -> wire.PausedList:
        """What was paused, of the runs that the token covers; every container is asked."""
        found = await paused_in(farm.manager.links)
        return wire.PausedList(paused=tuple(one for one in found if _is_of(one.tags.run, right, run)))

    @app.delete("/v1/paused")
    async def drop(right: MyRight, trajectory: TrajectoryName, run: wire.RunName = "") -> wire.DroppedPaused:
        """Drop what was paused of a trajectory, with its files."""
        found = await paused_in(farm.manager.links)
        chosen = [one for one in found if one.trajectory == trajectory and _is_of(one.tags.run, right, run)]
        await drop_paused(farm.manager.links, chosen)
        return wire.DroppedPaused(dropped=sum(not one.resumed for one in chosen))


def _is_of(run: str, right: Right, wanted: str) -> bool:
    return right.covers(run) and wanted in ("", run)


def _run_routes(app: FastAPI, farm: Farm) -> None:
    @app.get("/v1/runs")
    async def runs(right: MyRight) -> wire.RunList:
        """Runs that hold or wait for slots."""
        return wire.RunList(runs=tuple(one for one in farm.runs() if right.covers(one.run)))

    @app.delete("/v1/runs/{run:path}")
    async def end_run(run: str, right: MyRight) -> wire.EndedLeases:
        """End every lease of a run and withdraw its asks."""
        if not right.covers(run):
            raise ForbiddenError("farm_token", f"the token is not for run {run!r}")
        farm.queue.withdraw_run(run)
        return _end(farm, right, lambda one: one.tags.run == run)

    @app.post("/v1/containers/{container}/drain")
    async def drain(container: str, right: MyRight) -> wire.Draining:
        """Give no new leases on a container, and replace it when those it has have ended. May be repeated."""
        if (leases := farm.drain(container, right.jti)) is None:
            raise HTTPException(404, f"there is no container {container!r}")
        return wire.Draining(container=container, leases=leases)

    @app.get("/v1/containers")
    async def containers(right: MyRight) -> wire.ContainerList:  # noqa: ARG001 - checked by its scope
        """The containers, for relays and operators."""
        return wire.ContainerList(containers=farm.containers_seen())


def _image_routes(app: FastAPI, farm: Farm, access: Access) -> None:
    @app.post("/v1/images")
    async def want_images(request: images.ImagesRequest, right: MyRight) -> images.ImagesReply:
        """Have images fetched, and learn what references mean; repeat it to follow them."""
        access.limit(right, len(request.references) + len(request.images))
        return await farm.images.want_images(request)

    @app.post("/v1/images/commit")
    async def commit(request: images.CommitRequest, right: MyRight) -> images.ImageState:
        """Make an image of a checkpoint; repeat it to follow it."""
        access.limit(right, 1)
        run = access.run_of(right, request.run)
        return await farm.images.commit_image(request.model_copy(update={"run": run}))

    @app.get("/v1/images")
    async def image_map(right: MyRight) -> images.ImageMap:  # noqa: ARG001 - checked by its scope
        """Which images are where."""
        return farm.images.map()


def _token_routes(app: FastAPI, farm: Farm, access: Access, revocations: Revocations) -> None:
    @app.post("/v1/tokens")
    async def mint(request: wire.TokenRequest, right: MyRight) -> wire.MintedToken:
        """Make a token, which allows no more than the one that asks for it."""
        access.limit_minting(right)
        minted = access.mint(request, right)
        farm.audit.token_minted(
            right.jti, minted.run, minted.jti, scope=minted.scope, cap=minted.cap, expires_s=minted.expires_s
        )
        return minted

    @app.delete("/v1/tokens/{jti}")
    async def revoke(jti: wire.TokenId, right: MyRight, end_leases: bool = False) -> wire.Revoked:
        """Accept a token no longer, nor those that it made; end their streams, asks and leases. May be repeated."""
        return revocations.revoke(jti, right.jti, end_leases=end_leases)


def _view(lease: LeaseRecord, now_s: float) -> wire.LeaseView:
    return wire.LeaseView(
        lease=lease.name,
        container=lease.container,
        slot=lease.slot,
        trajectory=lease.trajectory,
        tags=lease.tags,
        age_s=now_s - lease.held_since_s,
    )


def _chosen(right: Right, run: str, tags: list[str]) -> Callable[[LeaseRecord], bool]:
    """Leases of that run (any, if empty) with these tags, as far as the token covers them."""
    wanted = [_tag(tag) for tag in tags]

    def chosen(lease: LeaseRecord) -> bool:
        if not right.covers(lease.tags.run) or (run and lease.tags.run != run):
            return False
        return all(getattr(lease.tags, name) == value for name, value in wanted)

    return chosen


def _tag(given: str) -> tuple[str, str]:
    name, colon, value = given.partition(":")
    if not colon or name not in Tags.model_fields:
        raise ConfigError(
            "tag", f"got {given!r}", next_step=f"allowed: NAME:VALUE, NAME one of {', '.join(Tags.model_fields)}"
        )
    return name, value


def _end(farm: Farm, right: Right, chosen: Callable[[LeaseRecord], bool]) -> wire.EndedLeases:
    ended = 0
    for lease in farm.queue.leases(chosen):
        why = f"the lease of {lease.trajectory!r} was ended at the farm, by the token {right.jti}"
        ended += farm.queue.end(lease.id, LeaseLostError(why), right.jti)
    return wire.EndedLeases(ended=ended)
