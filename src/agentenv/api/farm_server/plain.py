"""Tools over plain HTTP, for programs in any language: routes of the farm service. Types are in
:mod:`agentenv.wire.plain`."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from agentenv.api.farm_server import plain_artifacts as artifacts
from agentenv.api.farm_server.access import Access, MyRight
from agentenv.api.farm_server.farm import Farm
from agentenv.api.farm_server.tokens import Right
from agentenv.wire import plain as wire
from agentenv.wire.calls import CallResult
from agentenv.wire.farm import RunName
from agentenv.wire.server import ErrorReply

_REFUSALS = {
    409: "call_id is in use for another call, the slot is of another image, or the image is broken",
    413: "the request is too large",
    429: "too many requests; retry after Retry-After",
    502: "the slot or the call was lost; release the trajectory",
    503: "no slot or image was there in time, or the farm is starting or ending; retry after Retry-After",
    504: "the slot's container cannot be reached now",
}
_NO_SLOT = {404: "the trajectory has no slot"}


def plain_routes(app: FastAPI, farm: Farm, access: Access) -> None:
    """Add the routes."""
    _call_routes(app, farm, access)
    _artifact_routes(app, farm, access)


def _call_routes(app: FastAPI, farm: Farm, access: Access) -> None:
    @app.post("/execute", responses=_replies(_REFUSALS))
    async def execute(request: wire.ExecuteRequest, right: MyRight) -> wire.ExecuteReply:
        """Call a tool on the trajectory's slot; the first call leases it, and may name its image."""
        run = access.run_of(right, request.run)
        if not farm.plain.knows(run, request.trajectory_id):
            access.limit(right, 1)
        return await farm.plain.execute(run, right, request)

    @app.post("/release")
    async def release_trajectory(request: wire.ReleaseRequest, right: MyRight) -> wire.ReleaseDone:
        """Release the trajectory's slot: what runs there ends, and the workspace is gone."""
        run = access.run_of(right, request.run)
        return wire.ReleaseDone(released=await farm.plain.release(run, request.trajectory_id, right.jti))

    @app.get("/status")
    async def status(right: MyRight, run: RunName = "") -> wire.PlainStatus:
        """Slots, queue, and the runs and trajectories that the token covers, or one of the runs."""
        load = farm.load()
        calls, failed = farm.plain.counts(right)
        return wire.PlainStatus(
            queue_size=load.waiting,
            total_requests=calls,
            total_errors=failed,
            pool=load,
            runs=tuple(one for one in farm.runs() if right.covers(one.run) and run in ("", one.run)),
            trajectories=tuple(one for one in farm.plain.trajectories(right) if run in ("", one.run)),
        )


def _artifact_routes(app: FastAPI, farm: Farm, access: Access) -> None:
    async def look(request: wire.OfTrajectory, right: Right, tool: wire.PlainTool) -> CallResult:
        run = access.run_of(right, request.run)
        if not farm.plain.knows(run, request.trajectory_id):
            raise HTTPException(404, f"trajectory {request.trajectory_id!r} of run {run!r} has no slot (any more)")
        return await farm.plain.look(run, right, request, tool)

    @app.post("/artifacts/read", responses=_replies(_REFUSALS | _NO_SLOT))
    async def read(request: wire.ArtifactReadRequest, right: MyRight) -> wire.ArtifactRead:
        """Read a file of the trajectory's slot, or a part of it."""
        return artifacts.read(await look(request, right, artifacts.reading(request)), request)

    @app.post("/artifacts/list", responses=_replies(_REFUSALS | _NO_SLOT))
    async def listed(request: wire.ArtifactListRequest, right: MyRight) -> wire.ArtifactList:
        """List a directory of the trajectory's slot."""
        return artifacts.listed(await look(request, right, artifacts.listing(request)))

    @app.post("/artifacts/archive", responses=_replies(_REFUSALS | _NO_SLOT))
    async def archive(request: wire.ArtifactArchiveRequest, right: MyRight) -> wire.ArtifactArchive:
        """Pack files of the trajectory's slot into a tar.gz."""
        result = await look(request, right, artifacts.packing(request))
        return await asyncio.to_thread(artifacts.packed, result, request)


def _replies(refusals: dict[int, str]) -> dict[int | str, dict[str, object]]:
    return {status: {"model": ErrorReply, "description": text} for status, text in refusals.items()}
