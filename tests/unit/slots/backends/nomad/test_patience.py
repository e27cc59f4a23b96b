"""Nomad refuses, is silent, forgets the job: the count is kept and changes are followed all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentenv.config import NomadSettings
from agentenv.slots.backends.nomad import count, follow
from agentenv.slots.backends.nomad.api import EventStream, open_stream_session
from agentenv.slots.backends.nomad.count import CountKeeper
from agentenv.slots.backends.nomad.explain import NomadError
from agentenv.slots.backends.nomad.facts import Fact, Job, Snapshot
from agentenv.slots.backends.nomad.follow import Follower
from agentenv.slots.backends.nomad.view import FleetView
from tests.waiting import START_S, until


class _Api:
    """Answers as told; what it was asked is kept."""

    settings = NomadSettings(job_id="farm")

    def __init__(self, *refusals: Exception) -> None:
        self.refusals = list(refusals)
        self.counts: list[int] = []
        self.rescheduled = 0
        self.looks = 0

    async def scale(self, count: int, why: str) -> int:
        if self.refusals:
            raise self.refusals.pop(0)
        self.counts.append(count)
        return 100 + len(self.counts)

    async def reschedule(self) -> None:
        self.rescheduled += 1
        raise NomadError(500, "busy")

    async def snapshot(self) -> Snapshot:
        self.looks += 1
        if self.refusals:
            raise self.refusals.pop(0)
        return Snapshot(40 + self.looks, ())


class _Stream:
    """Lines of each connection in turn; an error cuts it; the last one stays open."""

    def __init__(self, *connections: list[Any]) -> None:
        self.connections = list(connections)
        self.asked: list[tuple[int, bool]] = []

    async def lines(self, *, after: int, nodes: bool) -> AsyncIterator[dict[str, Any]]:
        self.asked.append((after, nodes))
        for line in self.connections.pop(0) if self.connections else []:
            if isinstance(line, NomadError):
                raise line
            yield line
        await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (count, follow):
        monkeypatch.setattr(module, "RETRY_MIN_S", 0.01)
    monkeypatch.setattr(follow, "TICK_S", 0.01)
    monkeypatch.setattr(follow, "POLL_S", 0.02)
    monkeypatch.setattr(count, "RESCHEDULE_GAP_S", 0.01)


async def _keep(api: _Api, resubmitted: list[int]) -> tuple[CountKeeper, asyncio.Task[None]]:
    async def resubmit() -> None:
        resubmitted.append(1)

    view = FleetView(start_timeout_s=60)
    view.job = Job(1, 0)
    keeper = CountKeeper(api, view, resubmit)  # type: ignore[arg-type]
    return keeper, asyncio.create_task(keeper.keep_count())


async def test_a_count_refused_during_a_deployment_is_asked_for_again() -> None:
    api, resubmitted = (
        _Api(NomadError(400, "job scaling blocked due to active deployment"), NomadError(0, "gone")),
        list[int](),
    )
    keeper, task = await _keep(api, resubmitted)
    keeper.aim(3)
    await until(lambda: keeper.asked == 3)
    keeper.aim(2)
    keeper.aim(5)
    await until(lambda: keeper.asked == 5)
    assert api.counts == [3, 5]
    assert not resubmitted
    task.cancel()


async def test_a_count_that_was_found_is_not_gone_through_again_in_steps() -> None:
    """None of its containers has answered yet, and one less would be stopped."""
    api = _Api()
    keeper, task = await _keep(api, [])
    keeper.adopt(100)
    keeper.aim(100)
    keeper.compare(Job(1, 100))
    await asyncio.sleep(0.05)
    assert api.counts == []
    keeper.aim(99)
    await until(lambda: api.counts == [99])
    task.cancel()


async def test_a_job_that_is_gone_is_submitted_again() -> None:
    api, resubmitted = _Api(NomadError(404, "job not found")), list[int]()
    keeper, task = await _keep(api, resubmitted)
    keeper.aim(1)
    await until(lambda: keeper.asked == 1)
    assert len(resubmitted) == 1
    keeper.compare(Job(150, 1))
    keeper.compare(Job(7, 9))
    assert keeper.asked == 1, "as asked, and older than that"
    keeper.compare(None)
    await until(lambda: keeper.asked == 1 and len(api.counts) == 2)
    keeper.compare(Job(200, 6))
    await until(lambda: keeper.asked == 1 and len(api.counts) == 3)
    task.cancel()


async def test_while_the_job_is_anothers_nothing_is_asked_and_then_everything() -> None:
    api, ours = _Api(), asyncio.Event()
    view = FleetView(start_timeout_s=60)
    view.job = Job(1, 0)
    keeper = CountKeeper(api, view, lambda: asyncio.sleep(0), ours.is_set)  # type: ignore[arg-type]
    tasks = [asyncio.create_task(work) for work in (keeper.keep_count(), keeper.keep_rescheduling())]
    keeper.aim(3)
    keeper.reschedule()
    await asyncio.sleep(0.1)
    assert (api.counts, api.rescheduled) == ([], 0)
    ours.set()
    await until(lambda: keeper.asked == 3)
    keeper.begin_anew()
    await until(lambda: api.counts == [3, 3])
    keeper.reschedule()
    await until(lambda: api.rescheduled)
    for task in tasks:
        task.cancel()


async def test_somebody_elses_count_is_put_right(caplog: pytest.LogCaptureFixture) -> None:
    api = _Api()
    keeper, task = await _keep(api, [])
    keeper.aim(1)
    await until(lambda: keeper.asked == 1)
    keeper.compare(Job(200, 6))
    assert "has a count of 6, not 1" in caplog.text
    await until(lambda: api.counts == [1, 1])
    task.cancel()


async def test_replacing_failed_allocations_may_fail_too() -> None:
    api = _Api()
    keeper, keeping = await _keep(api, [])
    task = asyncio.create_task(keeper.keep_rescheduling())
    keeper.reschedule()
    await until(lambda: api.rescheduled == 1)
    keeper.reschedule()
    await until(lambda: api.rescheduled == 2)
    task.cancel()
    keeping.cancel()


async def test_a_cut_stream_is_resumed_and_lists_fill_the_gap() -> None:
    heard: list[Fact] = []
    job = {"Topic": "Job", "Payload": {"Job": {"ID": "farm", "ModifyIndex": 60, "TaskGroups": []}}}
    stream = _Stream(
        [NomadError(403, "no node:read")], [{}, {"Index": 30, "Events": [job]}, NomadError(0, "cut")], [{}]
    )
    api = _Api()
    follower = Follower(api, stream, heard.append, lambda: None)  # type: ignore[arg-type]
    tasks = [asyncio.create_task(follower.follow()), asyncio.create_task(follower.keep_looking())]
    await until(lambda: len(stream.asked) == 3 and follower.following == "stream")
    assert [nodes for _, nodes in stream.asked] == [True, False, False]
    assert stream.asked[2][0] > stream.asked[0][0], "after what is known"
    await until(lambda: any(isinstance(fact, Snapshot) for fact in heard))
    assert Job(60, 0) in heard
    for task in tasks:
        task.cancel()


async def test_what_is_not_understood_ends_neither_the_stream_nor_the_lists(caplog: pytest.LogCaptureFixture) -> None:
    """Another version of Nomad may say things differently; the farm goes on with what it does understand."""
    strange = {"Index": 30, "Events": [{"Topic": "Job", "Payload": {"Job": {"ID": "farm"}}}]}
    stream = _Stream([{}, strange], [{}])
    api = _Api(KeyError("ID"))
    follower = Follower(api, stream, lambda _: None, lambda: None)  # type: ignore[arg-type]
    tasks = [asyncio.create_task(follower.follow()), asyncio.create_task(follower.keep_looking())]
    await until(lambda: len(stream.asked) == 2 and api.looks >= 2 and follower.following == "stream")
    assert "its answer is not understood: KeyError('ModifyIndex')" in caplog.text
    await until(lambda: follower.problem == "")
    for task in tasks:
        task.cancel()


async def test_a_stream_that_is_silent_for_too_long_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats keep it; without them it would be waited for for ever where no packet says that the server is gone."""
    monkeypatch.setattr("agentenv.slots.backends.nomad.api.SILENT_AFTER_S", 12.0)

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(6):
            await response.write(b"{}\n")
            await asyncio.sleep(2.2)  # in all longer than it may be silent
        await asyncio.sleep(2 * START_S)
        return response

    application = web.Application()
    application.router.add_get("/v1/event/stream", stream)
    heard: list[object] = []

    async def hear(address: str) -> None:
        async for line in EventStream(session, NomadSettings(), address).lines(after=0, nodes=True):
            heard.append(line)

    async with TestServer(application) as server, open_stream_session(NomadSettings()) as session:
        with pytest.raises(NomadError, match="the event stream was cut"):
            await asyncio.wait_for(hear(str(server.make_url("")).rstrip("/")), START_S)
    assert len(heard) == 7, "the connection, and every heartbeat"


async def test_without_a_stream_lists_are_polled_and_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    stream = _Stream(*[[NomadError(404, "no such endpoint")]] * 1000)
    api = _Api(NomadError(0, "connection refused"), NomadError(0, "connection refused"))
    follower = Follower(api, stream, lambda _: None, lambda: None)  # type: ignore[arg-type]
    tasks = [asyncio.create_task(follower.follow()), asyncio.create_task(follower.keep_looking())]
    await until(lambda: follower.following == "unreachable")
    assert follower.problem == "connection refused"
    await until(lambda: api.looks >= 5)
    assert (follower.following, follower.problem) == ("polling", "")
    assert "no event stream of Nomad, listing every" in caplog.text
    assert caplog.text.count("Nomad does not respond") == 1
    for task in tasks:
        task.cancel()
