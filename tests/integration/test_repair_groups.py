"""Groups of the repair environment, end to end: real tasks, real slots, the scripted cast."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentenv.testing import Player
from examples.repair import policy
from tests.integration.repair_tasks import made, one_package, package, recorded, repairing, with_bugs
from tests.integration.test_env_local import leftovers


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path / "state"))


@pytest.mark.timeout(300)
async def test_the_cast_gets_what_it_deserves_and_nothing_is_left(tmp_path: Path) -> None:
    chosen = [*with_bugs(2)[:2], *with_bugs(1)[:1]]
    cast = [
        (policy.solver, policy.half_solver, policy.quitter, policy.fork_bomber),
        (policy.solver, policy.half_solver, policy.flooder, policy.sleeper),
        (policy.solver, policy.forger, policy.quitter, policy.solver),
    ]
    script: dict[str, list[Player]] = {
        task.id: [play(task, package()) for play in players] for task, players in zip(chosen, cast, strict=True)
    }
    async with repairing(tmp_path, script, chosen, tool_timeout_s=8.0) as env:
        items = [await env.get_next_item() for _ in chosen]
        groups = await asyncio.gather(*(env.collect_trajectories(item) for item in items))
    assert [left for _, left in groups] == [[], [], []]
    found = recorded(tmp_path)
    scores = [[t.score for t in found[task.id]] for task in chosen]
    halves = [pytest.approx(task.partial) for task in chosen[:2]]
    assert scores == [[1.0, halves[0], 0.0, 0.0], [1.0, halves[1], 0.0, 0.0], [1.0, 0.0, 0.0, 1.0]]
    assert all(0 < task.partial < 1 for task in chosen[:2])
    assert {t.fault for transcripts in found.values() for t in transcripts} == {"none"}
    sleeping = found[chosen[1].id][3].steps[0].tool_calls[0].result
    assert sleeping is not None
    assert sleeping.timed_out
    assert leftovers(tmp_path) == []


@pytest.mark.timeout(300)
async def test_tasks_are_the_same_for_the_same_seed_and_cached(tmp_path: Path) -> None:
    from examples.repair.tasks import make_tasks

    reports: list[int] = []
    again = make_tasks(one_package(), seed=1, report=lambda progress: reports.append(progress.done))
    assert tuple(again) == made()
    assert len({task.id for task in again}) == len(again) >= 6
    assert reports == sorted(reports)
