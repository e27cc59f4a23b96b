"""``agentenv logs`` of a container that is no more."""

from __future__ import annotations

import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentenv.config import NomadSettings
from agentenv.farm.nomad import NomadFarm

ID = "0" * 8
REFUSAL = {"event": "failed", "code": "self_test_failed", "message": "no cgroup", "next_step": "set cgroupns"}
LOGS = {"stderr": "one\ntwo\n", "stdout": json.dumps(REFUSAL) + "\n"}


@pytest.mark.parametrize(
    ("client", "said"),
    [("failed", ["one", "two", "it did not become ready: no cgroup (set cgroupns)"]), ("running", ["one", "two"])],
)
async def test_why_a_container_refused_to_serve_is_in_its_log(client: str, said: list[str]) -> None:
    stub = {"ID": ID, "Name": "farm.sandbox[0]", "NodeID": "n", "ModifyIndex": 1, "ClientStatus": client}

    async def answer(request: web.Request) -> web.Response:
        if request.path.startswith("/v1/client/fs/logs/"):
            return web.Response(text=LOGS[request.query["type"]])
        found = {"/v1/job/farm/allocations": [stub], "/v1/job/farm/evaluations": [], "/v1/nodes": []}
        job = {"ID": "farm", "ModifyIndex": 1, "TaskGroups": []}
        return web.json_response(found.get(request.path, job), headers={"X-Nomad-Index": "1"})

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(application) as server:
        farm = NomadFarm(NomadSettings(address=str(server.make_url("")).rstrip("/"), job_id="farm"))
        assert [line async for _, line in farm.logs("0", tail=10, follow=False)] == said
        assert [line async for _, line in farm.logs(ID[:4], tail=1, follow=False)] == said[-1:]
        assert [line async for _, line in farm.logs("0", tail=0, follow=False)] == []
