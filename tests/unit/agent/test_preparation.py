"""Preparing once: one prepares, the others wait and begin as forks; what becomes of them when that fails."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from agentenv.agent.failure_log import FailureLog
from agentenv.agent.group import run_group
from agentenv.agent.preparation import Preparation, Preparations, fork_patience_s
from agentenv.agent.prepared import PreparedState
from agentenv.agent.rollout import Rollout
from agentenv.agent.transcript import Transcript
from agentenv.errors import (
    AcquireTimeoutError,
    CheckpointError,
    ContainerLostError,
    InfraError,
    LeaseLostError,
    TaskError,
)
from agentenv.executor.session import Checkpoint
from agentenv.wire.network import NetworkPolicy
from tests.unit.agent.agent_stubs import ROOT, StubHooks, StubSession, StubSessions, checkpoint_name, echo, farm
from tests.waiting import loop_turns

FULL = CheckpointError("no checkpoint was made: checkpoint_bytes: 9 bytes more would be kept, beside 9 of at most 10")
FIRST = checkpoint_name("g1-0")
UNKEPT = CheckpointError("no checkpoint was made: the workspace could not be copied")


class Preparing(StubHooks):
    """Counts what it prepares; ``fails`` are raised by the first preparations."""

    def __init__(self, *fails: BaseException | None) -> None:
        self.fails = list(fails)
        self.prepared: list[str] = []
        self.set_up: list[str] = []
        self.metas: list[dict[str, Any]] = []

    async def prepare(self, item: Any, *, exec_tool: Any) -> dict[str, Any]:
        self.prepared.append(exec_tool.trajectory_id)
        await loop_turns(5)
        if self.fails and (error := self.fails.pop(0)) is not None:
            raise error
        return {"made": ["by", exec_tool.trajectory_id]}

    def setup_trajectory_workspace(self, item: Any, *, trajectory_id: str, exec_tool: Any) -> Any:
        self.set_up.append(trajectory_id)
        return {"mine": trajectory_id}

    async def verify_and_score_trajectory(self, item: Any, final_response: str, **given: Any) -> Any:
        self.metas.append(given["workspace_meta"])
        given["workspace_meta"]["made"].append("changed by its verifier")
        return 1.0, {}


class Environment:
    """Groups of rollouts over stub slots."""

    def __init__(self, hooks: Preparing, **services: Any) -> None:
        self.hooks = hooks
        self.counts: Counter[str] = Counter()
        self.failures = FailureLog()
        self.sessions = StubSessions()
        preparations = Preparations(self.failures, self.counts)
        self.services = farm(self.sessions, failures=self.failures, preparations=preparations, **services)
        self.groups = 0

    async def group(self, size: int = 4, item: str = "it") -> list[Transcript]:
        self.groups += 1
        rollout = Rollout(self.services, self.hooks, item, item)
        transcripts = await run_group([f"g{self.groups}-{n}" for n in range(size)], rollout.run, item)
        assert self.sessions.leased == 0
        return transcripts

    def forks(self, group: int) -> list[str]:
        """The checkpoints with which slots of a group began."""
        return [
            session.root.checkpoint if session.root else ""
            for session in self.sessions.opened
            if session.trajectory.startswith(f"g{group}-")
        ]


async def test_one_member_prepares_and_the_others_are_forks_also_in_the_next_epoch() -> None:
    env = Environment(Preparing())
    transcripts = await env.group()
    assert [one.score for one in transcripts] == [1.0] * 4
    assert env.hooks.prepared == ["g1-0"]
    assert env.hooks.set_up == ["g1-0", "g1-1", "g1-2", "g1-3"]
    assert env.forks(1) == ["", checkpoint_name("g1-0"), checkpoint_name("g1-0"), checkpoint_name("g1-0")]
    assert {one.container_id for one in env.sessions.opened} == {"c0"}
    await env.group()
    assert env.hooks.prepared == ["g1-0"]
    assert env.forks(2) == [checkpoint_name("g1-0")] * 4
    assert env.counts == {"prepared_count": 1, "prepared_reused": 7}
    made = ["by", "g1-0", "changed by its verifier"]
    assert env.hooks.metas == [{"made": made, "mine": f"g{g}-{n}"} for g in (1, 2) for n in range(4)], (
        "each has its own"
    )
    await env.group(item="other")
    assert env.hooks.prepared == ["g1-0", "g3-0"]


async def test_who_waits_for_a_preparation_holds_no_slot() -> None:
    env = Environment(hooks := Preparing())
    running = asyncio.create_task(env.group())
    while not hooks.prepared:
        await loop_turns(1)
    assert env.sessions.leased == 1
    assert [phase.name for phase in (await running)[1].phases][:3] == ["prepare", "slot_wait", "prepare"]


async def test_items_whose_key_is_the_same_share_and_those_without_one_do_not() -> None:
    env = Environment(Preparing())
    env.hooks.prepare_key = lambda item: None if item == "own" else item[0]  # type: ignore[method-assign]
    await env.group(2, "aa")
    await env.group(2, "ab")
    assert env.hooks.prepared == ["g1-0"]
    await env.group(2, "own")
    assert env.hooks.prepared == ["g1-0", "g3-0", "g3-1"]
    env.hooks.prepare_key = lambda item: 7  # type: ignore[method-assign,assignment,return-value]
    assert [one.fault for one in await env.group(2)] == ["task"] * 2


async def test_an_infrastructure_failure_hands_the_preparation_to_the_next() -> None:
    env = Environment(Preparing(ContainerLostError("gone")))
    transcripts = await env.group()
    assert [(one.score, one.attempt) for one in transcripts] == [(1.0, 2), (1.0, 1), (1.0, 1), (1.0, 1)]
    assert env.hooks.prepared == ["g1-0", "g1-1"]
    assert env.counts == {"prepared_count": 1, "prepared_reused": 3}


async def test_the_environments_own_error_is_that_of_all_who_wait_and_of_nobody_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = Environment(Preparing(ValueError("bug")))
    transcripts = await env.group()
    assert [(one.score, one.fault) for one in transcripts] == [(None, "task")] * 4
    assert {one.error for one in transcripts} == {"TaskError: prepare raised ValueError: bug"}
    assert env.hooks.prepared == ["g1-0"]
    assert len([record for record in caplog.records if "ValueError: bug" in record.getMessage()]) == 1
    assert [one.score for one in await env.group()] == [1.0] * 4


async def test_what_cannot_be_kept_is_prepared_by_each_at_the_same_time(caplog: pytest.LogCaptureFixture) -> None:
    env = Environment(Preparing())
    env.sessions.unkept = UNKEPT
    assert [one.score for one in await env.group()] == [1.0] * 4
    assert env.hooks.prepared == ["g1-0", "g1-1", "g1-2", "g1-3"]
    assert env.counts == {"prepared_count": 1}
    await env.group()
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == [f"prepared slots cannot be checkpointed, so every rollout prepares its own: {UNKEPT}"], "once"


async def test_a_state_that_is_gone_is_prepared_again() -> None:
    env = Environment(Preparing())
    await env.group()
    env.sessions.refuse_root = lambda root: (
        CheckpointError("gone") if root and root.checkpoint == checkpoint_name("g1-0") else None
    )
    assert [(one.score, one.attempt) for one in await env.group()] == [(1.0, 1)] * 4
    assert env.hooks.prepared == ["g1-0", "g2-0"]
    assert env.forks(2) == ["", checkpoint_name("g2-0"), checkpoint_name("g2-0"), checkpoint_name("g2-0")]


async def test_a_state_from_which_no_slot_can_be_made_is_met_once() -> None:
    env = Environment(Preparing())
    await env.group(1)
    env.sessions.refuse_root = lambda root: (
        InfraError("odd") if root and root.checkpoint == checkpoint_name("g1-0") else None
    )
    (transcript,) = await env.group(1)
    assert (transcript.score, transcript.earlier_attempts) == (1.0, ["InfraError: odd"])
    assert env.hooks.prepared == ["g1-0", "g2-0-try2"]


async def test_where_its_container_is_full_another_is_prepared_in_another() -> None:
    env = Environment(Preparing())
    await env.group(1)
    env.sessions.container_id = "c1"
    env.sessions.refuse_root = lambda root: (
        AcquireTimeoutError("full") if root and root.checkpoint == checkpoint_name("g1-0") else None
    )
    assert [(one.score, one.attempt) for one in await env.group(3)] == [(1.0, 1)] * 3
    assert env.forks(2) == ["", checkpoint_name("g2-0"), checkpoint_name("g2-0")]
    assert [one.container_id for one in env.sessions.opened] == ["c0", "c1", "c1", "c1"]


def full(env: Environment) -> None:
    """The container has no slot for forks, but a moment later for others."""
    env.sessions.refuse_root = lambda root: AcquireTimeoutError("full") if root and root.checkpoint else None


async def test_a_slot_of_the_same_container_after_all_is_given_the_prepared_files() -> None:
    env = Environment(Preparing())
    await env.group(1)
    full(env)
    assert [(one.score, one.attempt) for one in await env.group(3)] == [(1.0, 1)] * 3
    assert env.hooks.prepared == ["g1-0"]
    restored = [[each.root.checkpoint for each in one.restored] for one in env.sessions.opened]
    assert restored == [[], [checkpoint_name("g1-0")], [checkpoint_name("g1-0")], [checkpoint_name("g1-0")]]
    assert env.counts == {"prepared_count": 1, "prepared_reused": 3}
    assert env.hooks.metas[3]["made"] == ["by", "g1-0", "changed by its verifier"]


async def test_files_that_cannot_be_restored_are_prepared_again() -> None:
    env = Environment(Preparing())
    await env.group(1)
    full(env)
    env.sessions.unrestored = LeaseLostError("there is no checkpoint")
    (transcript,) = await env.group(1)
    assert (transcript.score, transcript.attempt) == (1.0, 2)
    assert env.hooks.prepared == ["g1-0", "g2-0-try2"]


def test_files_are_restored_under_the_same_root_only() -> None:
    preparations = Preparations(FailureLog(), Counter())
    other = replace(ROOT, network=NetworkPolicy("public"), checkpoint="c" * 32)
    preparations._states.keep(PreparedState(("a", ""), Checkpoint("c0", other), 1.0))
    session = StubSession("t", echo)
    assert preparations.here(("a", ""), session, ROOT) is None
    assert preparations.here(("a", ""), session, replace(other, checkpoint="")) is not None
    assert preparations.here(("b", ""), session, replace(other, checkpoint="")) is None
    session.container_id = "c1"
    assert preparations.here(("a", ""), session, replace(other, checkpoint="")) is None


def test_a_slot_is_waited_for_no_longer_than_a_preparation_takes() -> None:
    def waits(took_s: float, patience_s: float | None) -> float:
        return fork_patience_s(PreparedState(("a", ""), Checkpoint("c0", ROOT), took_s), patience_s)

    assert (waits(60.0, None), waits(60.0, 30.0), waits(0.01, 30.0)) == (60.0, 30.0, 1.0)


async def test_where_there_is_no_room_the_oldest_unused_states_of_the_container_make_some() -> None:
    class Small(StubSession):
        room = 2

        async def checkpoint(self) -> Checkpoint:
            if not type(self).room:
                raise FULL
            type(self).room -= 1
            return await super().checkpoint()

        async def drop(self, checkpoint: Checkpoint) -> None:
            type(self).room += 1
            await super().drop(checkpoint)

    counts: Counter[str] = Counter()
    preparations = Preparations(FailureLog(), counts)

    async def prepared(name: str) -> StubSession:
        session = Small(name, echo)
        begun = await preparations.begin((name, ""))
        assert isinstance(begun, Preparation)
        with begun:
            await begun.keep(session, {}, 1.0)
        return session

    await prepared("a")
    await prepared("b")
    used = await preparations.begin(("a", ""))
    assert isinstance(used, PreparedState)
    with preparations.standing_on(used):
        third = await prepared("c")
        assert [one.root.checkpoint for one in third.dropped] == [checkpoint_name("b")], "nobody stands on it"
        with preparations.standing_on(await _state(preparations, "c")):
            fourth = await prepared("d")
            assert fourth.dropped == []
            assert isinstance(await preparations.begin(("d", "")), Preparation), "it was not kept"
    assert await _state(preparations, "a") is used


async def test_states_are_dropped_from_containers_that_outlive_the_environment() -> None:
    env = Environment(Preparing())
    await env.group(2, "a")
    await env.group(1, "b")
    env.sessions.container_id = "c1"
    await env.group(1, "c")
    preparations = env.services.preparations
    assert preparations is not None
    await preparations.drop_all(env.sessions)
    dropped = {one.container_id: [each.root.checkpoint for each in one.dropped] for one in env.sessions.opened[-2:]}
    assert dropped == {"c0": [checkpoint_name("g1-0"), checkpoint_name("g2-0")], "c1": [checkpoint_name("g3-0")]}
    await preparations.drop_all(env.sessions)
    assert len(env.sessions.opened) == 4 + 2
    await env.group(1, "a")
    env.sessions.refuse = lambda _: AcquireTimeoutError("full")
    await preparations.drop_all(env.sessions)
    assert env.sessions.leased == 0


async def _state(preparations: Preparations, name: str) -> PreparedState:
    begun = await preparations.begin((name, ""))
    assert isinstance(begun, PreparedState)
    return begun


@pytest.mark.parametrize("seed", range(30))
async def test_of_one_key_one_prepares_at_a_time_whatever_fails_or_is_cancelled(seed: int) -> None:
    chance = random.Random(seed)
    preparations = Preparations(FailureLog(), Counter())
    busy: Counter[str] = Counter()
    ended: Counter[str] = Counter()

    async def member(key: str) -> None:
        await loop_turns(chance.randrange(20))
        try:
            begun = await preparations.begin((key, ""))
        except TaskError:
            ended["task"] += 1
            return
        if isinstance(begun, PreparedState):
            with preparations.standing_on(begun):
                ended["fork"] += 1
                await loop_turns(chance.randrange(4))
            if chance.random() < 0.2:
                preparations.lost(begun)
        elif begun is None:
            ended["own"] += 1
        else:
            with begun:
                busy[key] += 1
                try:
                    assert busy[key] == 1
                    await loop_turns(chance.randrange(6))
                    if (error := chance.choice([InfraError("x"), TaskError("x"), None, None])) is not None:
                        raise error
                    session = StubSession(f"t{chance.random()}", echo)
                    session.unkept = chance.choice([None, None, UNKEPT])
                    await begun.keep(session, {}, 1.0)
                    ended["prepared"] += 1
                finally:
                    busy[key] -= 1

    tasks = [asyncio.create_task(member(chance.choice("ab"))) for _ in range(60)]
    for task in chance.sample(tasks, 15):
        await loop_turns(chance.randrange(3))
        task.cancel()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert not [one for one in results if isinstance(one, BaseException) and not _expected(one)]
    assert preparations._running == {}
    assert ended["prepared"] > 0


def _expected(error: BaseException) -> bool:
    return isinstance(error, (InfraError, TaskError, asyncio.CancelledError))
