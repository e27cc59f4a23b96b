"""What is left on a cluster on purpose, and what gc does to a job that has no containers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentenv.cli import nomad_up
from agentenv.config import ContainerSettings, NomadSettings
from agentenv.errors import ConfigError, SandboxUnavailableError
from agentenv.farm import gc_nomad
from agentenv.farm.orphans import Orphan

GROUPS = [{"Name": "sandbox", "Count": 1, "Tasks": [{"Name": "sandbox"}]}]


def allocation(client: str, desired: str = "run") -> dict[str, Any]:
    return {
        "ID": "0" * 8, "Name": "farm.sandbox[0]", "NodeID": "n", "ModifyIndex": 1, "DesiredStatus": desired,
        "ClientStatus": client,
    }  # fmt: skip


async def collected(
    monkeypatch: pytest.MonkeyPatch,
    allocations: list[dict[str, Any]],
    submitted_s: float,
    *,
    owned: bool = False,
    items: Mapping[str, str] | None = None,
) -> tuple[list[Orphan], list[str]]:
    """What gc finds at a Nomad that knows one farm, and the requests by which it changed something. ``owned``: a
    trainer elsewhere has the job's lock."""
    monkeypatch.setattr(gc_nomad, "_engine_containers", lambda stack: ())
    answers: dict[str, Any] = {
        "/v1/nodes": [],
        "/v1/allocations": [],
        "/v1/job/farm": {
            "ID": "farm", "ModifyIndex": 1, "Status": "running", "TaskGroups": GROUPS,
            "SubmitTime": int((time.time() - submitted_s) * 1e9),
        },
        "/v1/job/farm/allocations": allocations,
        "/v1/job/farm/evaluations": [],
        "/v1/var/nomad/jobs/farm": {"Items": {"token": "t", **(items or {})}, "ModifyTime": 0},
    }  # fmt: skip
    changes: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/v1/var/nomad/jobs/farm/owner":
            lock = {"Lock": {"ID": "l"}, "ModifyIndex": 1, "Items": {"run": "exp7", "host": "gpu3"}}
            return web.json_response(lock, status=409 if owned and request.method == "PUT" else 200)
        if request.method != "GET":
            changes.append(f"{request.method} {request.path} purge={request.query.get('purge')}")
        return web.json_response(answers.get(request.path, {}), headers={"X-Nomad-Index": "1"})

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(application) as server:
        settings = NomadSettings(address=str(server.make_url("")).rstrip("/"))
        return await gc_nomad.collect(settings, only="farm", unattended_after_s=60, dry_run=False), changes


@pytest.mark.parametrize(
    "allocations", [[], [allocation("pending")], [allocation("failed")]], ids=["blocked", "starting", "crash loop"]
)
async def test_a_job_without_containers_is_stopped_and_no_more(
    monkeypatch: pytest.MonkeyPatch, allocations: list[dict[str, Any]]
) -> None:
    """A farm that lives submits it again with the token that is there: to remove that would cut it off."""
    (orphan,), changes = await collected(monkeypatch, allocations, 23 * 60)
    assert orphan.removed
    assert "none of its containers is running, 23 min after it was last submitted" in orphan.why
    assert changes == ["DELETE /v1/job/farm purge=false"]


async def test_a_job_that_a_run_owns_is_left_and_the_run_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (orphan,), changes = await collected(monkeypatch, [], 23 * 60, owned=True)
    assert not orphan.removed
    assert "is owned by 'exp7'" in orphan.problem
    assert "gpu3" in orphan.problem
    assert changes == []


@pytest.mark.parametrize(
    ("allocations", "submitted_s", "items"),
    [
        ([], 600, {}),
        ([], 6000, {"kept": "up"}),
        ([allocation("running", "stop")], 6000, {}),
        ([allocation("unknown")], 6000, {}),
    ],
    ids=["submitted lately", "left by up", "draining", "out of sight"],
)
async def test_a_job_that_may_be_somebodys_is_left(
    monkeypatch: pytest.MonkeyPatch, allocations: list[dict[str, Any]], submitted_s: float, items: dict[str, str]
) -> None:
    assert await collected(monkeypatch, allocations, submitted_s, items=items) == ([], [])


class Backend:
    """A Nomad on which nothing starts; with ``refuses``, one that does not take the job."""

    refuses = False

    def __init__(self, *_: object, **__: object) -> None:
        pass

    async def __aenter__(self) -> Self:
        if self.refuses:
            raise ConfigError("job_file", "no such variable")
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def scale(self, count: int) -> None:
        pass

    async def events(self) -> AsyncIterator[object]:
        nothing: tuple[object, ...] = ()
        for event in nothing:
            yield event


@pytest.mark.parametrize(
    ("refuses", "error", "kept"), [(False, SandboxUnavailableError, ["farm"]), (True, ConfigError, [])]
)
async def test_the_job_of_an_up_that_gave_up_is_left_on_purpose(
    monkeypatch: pytest.MonkeyPatch, refuses: bool, error: type[Exception], kept: list[str]
) -> None:
    marked: list[str] = []

    class Api:
        async def keep(self, job_id: str, *, kept: bool) -> None:
            assert kept
            marked.append(job_id)

        @classmethod
        @asynccontextmanager
        async def opened(cls, settings: NomadSettings) -> AsyncIterator[Self]:
            yield cls()

    monkeypatch.setattr(Backend, "refuses", refuses)
    monkeypatch.setattr(nomad_up, "make_backend", Backend)
    monkeypatch.setattr(nomad_up, "OperatorApi", Api)
    with pytest.raises(error):
        await nomad_up.bring_up(ContainerSettings(), 1, 0.05, {"job_id": "farm"})
    assert marked == kept
