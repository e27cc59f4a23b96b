"""A farm in a namespace of its own: whatever Nomad is asked, it is asked there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentenv.config import ContainerSettings, NomadSettings
from agentenv.farm.nomad import OperatorApi, follow_log
from agentenv.slots.backends.nomad.api import EventStream, open_stream_session
from agentenv.slots.backends.nomad.job import job_text, job_variables

ID = "0" * 8
JOB = {"ID": "farm", "ModifyIndex": 1, "TaskGroups": []}
ALLOCATION = {"ID": ID, "Name": "farm.sandbox[0]", "NodeID": "n", "ModifyIndex": 1, "DesiredStatus": "run"}
ANSWERS = {
    "/v1/nodes": [],
    "/v1/allocations": [],
    "/v1/vars": [],
    "/v1/job/farm": JOB,
    "/v1/job/farm/allocations": [ALLOCATION],
    "/v1/job/farm/evaluations": [],
    f"/v1/allocation/{ID}": ALLOCATION,
    "/v1/var/nomad/jobs/farm": {"Items": {"token": "t"}, "ModifyTime": 0},
}
OF_THE_CLUSTER = ("/v1/nodes", "/v1/jobs/parse")
"""What is in no namespace."""


async def everything(api: OperatorApi) -> None:
    await api.parse("job {}", "")
    await api.register(JOB)
    await api.job()
    await api.scale(1, "test")
    await api.reschedule()
    await api.snapshot()
    await api.allocation(ID)
    await api.left_over()
    await api.stop(ID)
    await api.log_tail(ID, "stderr")
    await api.agree_on_token("t")
    await api.is_kept()
    await api.created_at()
    await api.variable("farm")
    await api.keep("farm", kept=True)
    await api.variable_owners()
    await api.whole_job("farm")
    await api.status_of(ID)
    await api.deregister(purge=True)
    await api.forget_token()


async def follow_events(api: OperatorApi) -> None:
    async with open_stream_session(api.settings) as session:
        await anext(EventStream(session, api.settings, api.address).lines(after=0, nodes=True))


async def follow_a_log(api: OperatorApi) -> None:
    assert [line async for line in follow_log(api.settings, ID, tail_bytes=1)] == ["{}"]


@pytest.mark.parametrize("ask", [everything, follow_events, follow_a_log])
async def test_every_request_names_it(ask: Callable[[OperatorApi], Awaitable[None]]) -> None:
    heard: list[tuple[str, str, str | None]] = []

    async def answer(request: web.Request) -> web.Response:
        heard.append((request.method, request.path, request.query.get("namespace")))
        found: Any = ANSWERS.get(request.path, {})
        return web.json_response(found, headers={"X-Nomad-Index": "1"})

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(application) as server:
        address = str(server.make_url("")).rstrip("/")
        api = OperatorApi(NomadSettings(address=address, namespace="team", job_id="farm"), address)
        try:
            await ask(api)
        finally:
            await api.aclose()
    assert heard
    assert [one for one in heard if one[1] not in OF_THE_CLUSTER and one[2] != "team"] == []


def test_the_job_is_registered_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOMAD_NAMESPACE", "team")
    settings = NomadSettings.from_environment()
    assert 'namespace = "team"\n' in job_variables(job_text(settings), ContainerSettings(), settings)
