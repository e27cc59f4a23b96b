"""A Nomad with one job, as far as its owner's requests go, and a backend over it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from agentenv.config import ContainerSettings, NomadSettings
from agentenv.slots.backends.nomad.backend import NomadBackend

JOB = {"ID": "farm", "ModifyIndex": 1, "TaskGroups": [{"Name": "sandbox", "Count": 0}]}
LOCK = "/v1/var/nomad/jobs/farm/owner"


class Cluster:
    """A Nomad with one job. ``when``: the request, as ``changes`` has them, after which another run owns the job.
    It is answered only when the first owner has heard so: whatever it sends then, it sends on an older look."""

    def __init__(self, when: str = "") -> None:
        self.when = when
        self.changes: list[str] = []
        self.theirs = False
        self.owner: dict[str, str] | None = {"run": "exp7", "host": "gpu3", "pid": "17"}
        """What is found under the lock; None: nobody holds it."""
        self.index = 0
        self.looks = 0
        """How often it was read."""
        self.refusals = 0
        self.told = asyncio.Event()
        self.job: dict[str, Any] | None = dict(JOB)

    async def answer(self, request: web.Request) -> web.Response:
        said = f"{request.method} {request.path} {request.query.get('purge', '')}".rstrip()
        if request.path == LOCK:
            return self._lock(request)
        if request.method not in ("GET", "HEAD") and said != "PUT /v1/jobs/parse":
            self.changes.append(said)
        if said == self.when:
            self.theirs = True
            await self.told.wait()
        if request.path == "/v1/job/farm":
            return web.json_response(self.job, status=404 if self.job is None else 200)
        lists = ("/v1/allocations", "/v1/job/farm/allocations", "/v1/job/farm/evaluations", "/v1/nodes")
        answer: Any = [] if request.path in lists else {}
        if request.path == "/v1/var/nomad/jobs/farm" and request.method == "GET":
            answer = {"Items": {"token": "t"}}
        return web.json_response(answer, headers={"X-Nomad-Index": "1"})

    def _lock(self, request: web.Request) -> web.Response:
        if self.theirs and request.method == "PUT":
            self.refusals += 1
            if self.refusals > 1:  # it has read the first one
                self.told.set()
            return web.json_response({}, status=409)
        if request.method == "GET":
            self.looks += 1
            if self.owner is None:
                return web.json_response({}, status=404)
        else:
            self.index += 1
        return web.json_response({"Lock": {"ID": "l"}, "ModifyIndex": self.index, "Items": self.owner})


@asynccontextmanager
async def served(cluster: Cluster) -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", cluster.answer)
    async with TestServer(application) as server:
        yield str(server.make_url("")).rstrip("/")


def farm_at(address: str, options: Mapping[str, Any] | None = None, **settings: Any) -> NomadBackend:
    """A backend over its job. ``options`` are the backend's own."""
    nomad = NomadSettings(address=address, job_id="farm", **{"build_image": False, **settings})
    return NomadBackend(ContainerSettings(slots_per_container=2), nomad, **(options or {}))
