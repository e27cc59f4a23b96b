"""When something belongs to nobody: the rules of gc, which must never take what is somebody's."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests

from agentenv.farm.gc_nomad import _engine_containers, has_a_client
from agentenv.farm.orphans import JobFacts, Orphan, SeenLease, is_sandbox, judge_job, unrenewed
from tests.waiting import START_S, loop_turns

ALIVE = JobFacts("j", registered=True, running=2, heard_s=(1.0, 2.5))


@pytest.mark.parametrize(
    "facts",
    [
        ALIVE,
        JobFacts("j", registered=True, running=2, heard_s=(900.0, 3.0)),
        JobFacts("j", registered=True, kept=True, running=1, heard_s=(9000.0,)),
        JobFacts("j", registered=True, running=0),
        JobFacts("j", registered=True, idle_s=900.0),
        JobFacts("j", registered=True, kept=True, idle_s=9000.0),
        JobFacts("j", registered=True, sandbox=False, idle_s=9000.0),
        JobFacts("j", registered=True, sandbox=False, stopped=True),
        JobFacts("j", registered=False, token_age_s=5.0),
    ],
    ids=[
        "heard",
        "heard by one",
        "left running on purpose",
        "only draining",
        "still to be placed",
        "left to be placed",
        "another's job without containers",
        "another's job",
        "being made",
    ],
)
def test_what_is_somebodys_is_not_touched(facts: JobFacts) -> None:
    assert judge_job(facts) is None


@pytest.mark.parametrize(
    ("facts", "kind", "why"),
    [
        (JobFacts("j", registered=True, running=2, heard_s=(61.0, 90.0)), "job", "its run is dead"),
        (
            JobFacts("j", registered=True, idle_s=1380.0),
            "job",
            "none of its containers is running, 23 min after it was last submitted; "
            "a run that needs the job submits it again",
        ),
        (JobFacts("j", registered=True, stopped=True), "job", "stopped"),
        (JobFacts("j", registered=False, token_age_s=61.0), "token", "no longer registered"),
    ],
)
def test_what_is_nobodys_is_found_with_the_reason(facts: JobFacts, kind: str, why: str) -> None:
    orphan = judge_job(facts)
    assert orphan is not None
    assert orphan.kind == kind
    assert why in orphan.why
    assert not orphan.problem


def test_a_job_whose_containers_are_silent_is_shown_and_left() -> None:
    orphan = judge_job(JobFacts("j", registered=True, running=2, heard_s=(900.0,)))
    assert isinstance(orphan, Orphan)
    assert "1 of 2 containers do not respond" in orphan.problem


def test_who_asks_for_more_patience_gets_it_for_jobs_without_containers_too() -> None:
    assert judge_job(JobFacts("j", registered=True, idle_s=1000.0), unattended_after_s=3600.0) is None


def test_a_farm_is_told_by_its_group_and_task() -> None:
    def job(group: str, task: str) -> dict[str, object]:
        return {"TaskGroups": [{"Name": group, "Tasks": [{"Name": task}]}]}

    assert is_sandbox(job("sandbox", "sandbox"))
    assert not is_sandbox(job("sandbox", "web"))
    assert not is_sandbox(job("web", "sandbox"))
    assert not is_sandbox({"TaskGroups": None})


def lease(expires_in_s: float, *, epoch: int = 1, slot: int = 0) -> SeenLease:
    return SeenLease("c", slot, epoch, "t", expires_in_s)


def test_a_lease_that_only_counts_down_is_nobodys() -> None:
    assert unrenewed([lease(30)], [lease(24)], 6.0) == [lease(24)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([lease(28)], [lease(29)]),
        ([lease(29)], [lease(27.5)]),  # renewed in between, then counting down again
        ([lease(30)], [lease(25)]),  # renewed just after the first look
        ([lease(30)], [lease(24, epoch=2)]),
        ([lease(30)], []),
        ([], [lease(24)]),
        ([lease(30, slot=1)], [lease(24, slot=0)]),
    ],
)
def test_a_lease_that_was_renewed_or_is_another_is_somebodys(before: list[SeenLease], after: list[SeenLease]) -> None:
    assert unrenewed(before, after, 6.0) == []


async def test_a_container_of_another_living_client_is_not_ours(tmp_path: Path) -> None:
    state = tmp_path / "client" / "state.db"
    state.parent.mkdir()
    state.touch()
    mounts = [{"Source": "/elsewhere"}, {"Source": f"{tmp_path}/alloc/abc/alloc"}]
    assert not await has_a_client(mounts, "abc", 0.0)
    waiting = asyncio.create_task(has_a_client(mounts, "abc", time.monotonic() + START_S))
    await loop_turns(3)
    descriptor = os.open(state, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # as a Nomad client holds its state
        assert await waiting, "it has restarted meanwhile"
        assert await has_a_client(mounts, "abc", 0.0)
        assert not await has_a_client(mounts, "def", time.monotonic() + START_S)
    finally:
        os.close(descriptor)
    assert not await has_a_client([], "abc", time.monotonic() + START_S)
    state.unlink()
    assert not await has_a_client(mounts, "abc", time.monotonic() + START_S)


OF_NOMAD = {"com.hashicorp.nomad.alloc_id": "abc"}
OF_OUR_IMAGE = {"agentenv.content": "0123456789abcdef"}
CONTAINERS = [
    SimpleNamespace(name="local", image="agentenv-sandbox:local", labels=OF_NOMAD | OF_OUR_IMAGE),
    SimpleNamespace(name="pushed", image="registry.example.com/agentenv-sandbox:1", labels=OF_NOMAD | OF_OUR_IMAGE),
    SimpleNamespace(name="of an image built anew", image="sha256:9", labels=OF_NOMAD | OF_OUR_IMAGE),
    SimpleNamespace(name="another job's", image="redis:7", labels=OF_NOMAD),
    SimpleNamespace(name="started by hand", image="agentenv-sandbox:local", labels=OF_OUR_IMAGE),
]


class Engine:
    """As much of a Docker client as gc uses: filters as the engine's, all of which must hold."""

    def __init__(self) -> None:
        self.containers = self

    def list(self, *, all: bool, filters: dict[str, list[str] | str], ignore_removed: bool) -> list[SimpleNamespace]:
        assert all, "those that have ended too"
        assert ignore_removed, "one that goes meanwhile is no failed engine"
        labels, image = filters["label"], filters.get("ancestor")
        wanted = {labels} if isinstance(labels, str) else set(labels)
        return [one for one in CONTAINERS if wanted <= one.labels.keys() and image in (None, one.image)]

    def close(self) -> None:
        pass


async def test_containers_of_every_image_of_ours_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("docker.from_env", lambda timeout: Engine())
    async with contextlib.AsyncExitStack() as stack:
        found = [one.name for one in _engine_containers(stack)]
    assert found == ["local", "pushed", "of an image built anew"]


async def test_an_engine_that_does_not_answer_in_time_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(**_: object) -> None:
        raise requests.ReadTimeout

    engine = Engine()
    monkeypatch.setattr(engine, "list", late)
    monkeypatch.setattr("docker.from_env", lambda timeout: engine)
    async with contextlib.AsyncExitStack() as stack:
        assert list(_engine_containers(stack)) == []
