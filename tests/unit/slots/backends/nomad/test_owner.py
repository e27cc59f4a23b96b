"""One owner per job: who is refused, who is succeeded, and what a backend that lost its job does no more."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from agentenv.config import NomadSettings
from agentenv.errors import JobOwnedError, SandboxUnavailableError
from agentenv.process_marks import process_mark
from agentenv.slots.backends.nomad import owner
from agentenv.slots.backends.nomad.api import Lock
from agentenv.slots.backends.nomad.explain import NomadError
from agentenv.slots.backends.nomad.lock_owner import LockOwner
from agentenv.slots.backends.nomad.owner import PATIENCE_S, SURE_S, WATCH_S, JobOwner, Watch
from tests.waiting import DEADLINE_S, until

THEIRS = LockOwner(
    run="exp7", user="ann", host="gpu3", pid="17", process="boot:pid:[1]:17:5", agentenv="0.1", since="then"
)


class Variable:
    """Nomad's variable with its lock, as far as an owner sees it."""

    settings, address = NomadSettings(job_id="farm"), "http://nomad"

    def __init__(self) -> None:
        self.held: Lock | None = None
        self.items: dict[str, str] = {}
        self.away = False
        self.knows_locks = True
        self.renews = True
        self.looks = 0
        self.numbers = iter(range(1, 1_000))

    def give(self, holder: LockOwner) -> None:
        self.held = Lock(f"id{next(self.numbers)}", next(self.numbers), holder)

    async def take_lock(self, items: Mapping[str, str], lock_id: str | None) -> Lock | None:
        await asyncio.sleep(0)
        if self.away:
            raise NomadError(0, "nobody answers")
        if not self.knows_locks:
            return None
        if self.held is not None and self.held.id != lock_id:
            raise NomadError(409, "conflict")
        self.items = dict(items)
        name = f"id{next(self.numbers)}" if self.held is None else self.held.id
        self.held = Lock(name, next(self.numbers), LockOwner.of(items))
        return self.held

    async def renew_lock(self, lock_id: str) -> bool:
        if self.away:
            raise NomadError(0, "nobody answers")
        return self.renews and self.held is not None and self.held.id == lock_id

    async def lock(self) -> Lock | None:
        self.looks += 1
        if self.away:
            raise NomadError(0, "nobody answers")
        return self.held

    async def unlock(self, lock_id: str) -> None:
        if self.held is None or self.held.id != lock_id:
            raise NomadError(409, "not yours")
        self.held = None

    async def forget_owner(self) -> None:
        self.items = {} if self.held is None else self.items


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "BEAT_S", 0.01)
    monkeypatch.setattr(owner, "LOOK_S", 0.005)
    monkeypatch.setattr(owner, "STANDBY_LOOK_S", 0.005)


def _owner(variable: Variable, **given: Any) -> JobOwner:
    return JobOwner(variable, "mine", **given)  # type: ignore[arg-type]


def test_a_holder_that_speaks_is_refused_for_and_a_silent_one_waited_for() -> None:
    watch, lock = Watch(), Lock("a", 1, THEIRS)
    assert watch.judge(lock, False, 0) == "wait"
    assert watch.judge(lock, False, WATCH_S / 2) == "wait"
    assert watch.judge(lock, False, WATCH_S + 1) == "tell"
    assert watch.judge(lock, False, WATCH_S + 2) == "wait", "said once"
    assert watch.judge(None, False, WATCH_S + 3) == "wait", "it was freed this moment"
    assert watch.judge(dataclasses.replace(lock, index=2), False, WATCH_S + 4) == "refuse"


def test_another_rival_has_its_own_time_and_the_dead_none() -> None:
    watch = Watch()
    assert watch.judge(Lock("a", 1, THEIRS), False, 0) == "wait"
    assert watch.judge(Lock("b", 5, THEIRS), False, WATCH_S + 1) == "wait", "it came while we waited"
    assert watch.judge(Lock("b", 5, THEIRS), True, WATCH_S + 2) == "succeed"
    assert watch.judge(Lock("b", 5, THEIRS), False, PATIENCE_S + 1) == "refuse", "nobody is waited for longer"


def test_a_process_of_this_machine_is_known_to_have_ended() -> None:
    ours = LockOwner.ourselves("")
    assert not ours.is_dead()
    assert not THEIRS.is_dead(), "of another machine nothing is known"
    child = subprocess.Popen(["sleep", "1000"])
    theirs = dataclasses.replace(ours, pid=str(child.pid), process=process_mark(child.pid))
    try:
        assert not theirs.is_dead()
        assert dataclasses.replace(theirs, process=theirs.process + "0").is_dead(), "another process has its pid now"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert theirs.is_dead(), "it has ended, though nobody has reaped it"
    finally:
        child.kill()
        child.wait()
    assert theirs.is_dead()
    assert LockOwner.of(ours.items()) == ours
    assert LockOwner.of({"beats": "7"}) == LockOwner()


async def test_the_refusal_names_the_holder_and_the_way_out() -> None:
    variable = Variable()
    variable.give(THEIRS)
    with pytest.raises(JobOwnedError) as error:
        await _owner(variable).acquire(wait=False)
    assert str(error.value).startswith(
        "Nomad job 'farm' is owned by 'exp7' (ann on gpu3, pid 17, agentenv 0.1) since then (give this run a"
    )
    assert "`kill 17` on gpu3" in error.value.next_step
    assert isinstance(error.value, SandboxUnavailableError)
    assert variable.held is not None, "it keeps it"


async def test_it_is_kept_and_given_back() -> None:
    variable = Variable()
    first, second = _owner(variable), _owner(variable)
    await first.acquire()
    assert first.holds
    index = variable.held.index if variable.held is not None else 0
    await until(lambda: variable.held is not None and variable.held.index > index + 2)
    with pytest.raises(JobOwnedError, match="'mine'"):
        await second.acquire()
    await first.release()
    await first.release()
    assert not first.holds
    assert (variable.held, variable.items) == (None, {})
    await second.acquire()
    assert second.holds
    await second.release()


async def test_what_nomad_does_not_confirm_is_not_ours_to_change() -> None:
    variable, clock = Variable(), Clock()
    owner = _owner(variable, clock=clock)
    await owner.acquire()
    variable.away = True
    clock.now += SURE_S - 0.1
    assert owner.holds
    clock.now += 0.2
    assert not owner.holds
    assert owner.lost is None
    variable.away = False
    await until(lambda: owner.holds)
    await owner.release()


async def test_one_that_lost_it_says_to_whom_and_has_it_back_when_it_is_free() -> None:
    variable, lost, back = Variable(), list[LockOwner](), list[int]()
    made: list[JobOwner] = []
    owner = _owner(variable, on_lost=lost.append, on_back=lambda: back.append(made[0].generation))
    made.append(owner)
    await owner.acquire()
    first = owner.generation
    variable.give(THEIRS)
    await until(lambda: lost)
    assert not owner.holds
    assert owner.lost is not None
    assert "'exp7'" in owner.lost.message
    looks = variable.looks
    await until(lambda: variable.looks > looks + 3)
    assert lost == [THEIRS], "said once"
    next_one = dataclasses.replace(THEIRS, run="exp8")
    variable.give(next_one)
    await until(lambda: len(lost) == 2)
    assert (lost[1], owner.generation) == (next_one, first)
    theirs = variable.held.index if variable.held is not None else 0
    variable.held = None
    await until(lambda: back)
    assert owner.holds
    assert owner.lost is None
    assert back == [owner.generation]
    assert owner.generation > theirs > first
    await owner.release()


async def test_a_cancelled_opening_leaves_no_lock() -> None:
    variable = Variable()
    owner = _owner(variable)
    opening = asyncio.create_task(owner.acquire())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await owner.release()
    assert variable.held is None


async def test_a_nomad_without_locks_is_refused() -> None:
    variable = Variable()
    variable.knows_locks = False
    with pytest.raises(SandboxUnavailableError, match=r"knows no locks.*Nomad 1.8 or newer"):
        await _owner(variable).acquire()


# -- generations -----------------------------------------------------------------------------------


async def test_each_owner_has_a_larger_generation_than_all_before_it_and_keeps_it() -> None:
    variable = Variable()
    first, second = _owner(variable), _owner(variable)
    assert first.generation == 0
    await first.acquire()
    generation = first.generation
    index = variable.held.index if variable.held is not None else 0
    await until(lambda: variable.held is not None and variable.held.index > index + 2)
    assert first.generation == generation > 0
    await first.release()
    await second.acquire()
    assert second.generation > generation
    await second.release()


@pytest.mark.parametrize("freed", [False, True])
async def test_after_a_cut_the_generation_is_another_if_nomad_has_freed_the_lock(freed: bool) -> None:
    """Somebody else may have had it then, and be gone again."""
    variable, clock, back = Variable(), Clock(), list[int]()
    ours = _owner(variable, clock=clock, on_back=lambda: back.append(1))
    await ours.acquire()
    generation = ours.generation
    variable.away = True
    clock.now += 100
    if freed:
        variable.held = None
    variable.away = False
    await until(lambda: ours.holds)
    assert (ours.generation > generation, bool(back)) == (freed, freed)
    assert ours.lost is None
    await ours.release()


async def test_a_lock_that_nomad_neither_renews_nor_frees_is_nobody_elses() -> None:
    variable, clock, lost = Variable(), Clock(), list[LockOwner]()
    owner = _owner(variable, clock=clock, on_lost=lost.append)
    await owner.acquire()
    variable.renews = False
    clock.now += 100
    looks = variable.looks
    await until(lambda: variable.looks > looks + 3)
    assert not owner.holds
    variable.held = None
    await until(lambda: owner.holds)
    assert lost == []
    await owner.release()


def test_an_earlier_run_of_this_nomad_task_is_known_to_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOMAD_ALLOC_ID", "a1")
    monkeypatch.setenv("NOMAD_TASK_NAME", "farm")
    ours = LockOwner.ourselves("farm", "http://farm:8700")
    assert LockOwner.of(ours.items()) == ours
    assert str(ours).startswith("'farm' at http://farm:8700 (")
    before = dataclasses.replace(THEIRS, task="a1/farm")
    assert before.is_dead()
    assert not dataclasses.replace(before, task="a2/farm").is_dead()
    assert not dataclasses.replace(before, task="a1/sidecar").is_dead()
    assert not ours.is_dead(), "another process of the same run of the task, as `nomad alloc exec` starts them"
    monkeypatch.delenv("NOMAD_ALLOC_ID")
    assert not before.is_dead()
    assert not dataclasses.replace(before, task="").is_dead()


async def test_a_farm_that_nomad_restarts_in_place_is_its_own_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOMAD_ALLOC_ID", "a1")
    monkeypatch.setenv("NOMAD_TASK_NAME", "farm")
    variable = Variable()
    variable.give(dataclasses.replace(THEIRS, task="a1/farm"))
    before = variable.held.index if variable.held is not None else 0
    owner = _owner(variable)
    async with asyncio.timeout(DEADLINE_S):
        await owner.stand_by()
    assert owner.generation > before
    await owner.release()


# -- standing by -----------------------------------------------------------------------------------


async def test_a_standby_waits_for_each_owner_in_turn_and_survives_nomads_absence() -> None:
    variable, seen = Variable(), list[LockOwner]()
    variable.give(THEIRS)
    owner = _owner(variable)
    waiting = asyncio.create_task(owner.stand_by(seen.append))
    await until(lambda: variable.looks > 3)
    assert seen == [THEIRS], "each is told once"
    variable.away = True
    looks = variable.looks
    await until(lambda: variable.looks > looks + 3)
    variable.away = False
    other = dataclasses.replace(THEIRS, url="http://other:8700")
    variable.give(other)
    await until(lambda: len(seen) == 2)
    assert seen[1] == other
    assert not waiting.done()
    assert (owner.holds, owner.generation) == (False, 0)
    variable.held = None
    async with asyncio.timeout(DEADLINE_S):
        await waiting
    assert owner.holds
    await owner.release()


async def test_a_standby_that_is_cancelled_leaves_the_lock_as_it_is() -> None:
    variable = Variable()
    variable.give(THEIRS)
    before = variable.held
    owner = _owner(variable)
    waiting = asyncio.create_task(owner.stand_by())
    await until(lambda: variable.looks)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await owner.release()
    assert variable.held == before


async def test_a_refusal_by_a_farm_service_refers_to_it() -> None:
    variable = Variable()
    variable.give(dataclasses.replace(THEIRS, url="http://farm:8700"))
    with pytest.raises(JobOwnedError, match="'exp7' at http://farm:8700 ") as error:
        await _owner(variable).acquire(wait=False)
    assert error.value.next_step.startswith("lease from that farm (farm_url='http://farm:8700'), or give this run")
