"""Groups of the repair environment, end to end: real tasks, real slots, the scripted cast."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.transcript import Transcript
from agentenv.sessions.asciicast import recordings
from agentenv.testing import Call, Player, Reply
from agentenv.wire.calls import CallResult
from agentenv.wire.sessions import ProcessReply
from examples.repair import moves, policy, tasks
from examples.repair.tracker import Tracker, report
from tests.integration.repair_tasks import PACKAGE, fetched, made, one_package, package, recorded, repairing, with_bugs
from tests.integration.test_env_local import leftovers

OTHERS = ["boltons", "parse", "semver", "toolz"]


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path / "state"))


def results(transcript: Transcript, *tools: str) -> list[CallResult]:
    """What came of every call of these tools."""
    calls = [call for step in transcript.steps for call in step.tool_calls if call.tool in tools]
    return [call.result for call in calls if call.result is not None]


async def test_the_cast_gets_what_it_deserves_and_nothing_is_left(tmp_path: Path) -> None:
    chosen = [*with_bugs(2)[:2], *with_bugs(1)[:1]]
    cast = [
        (policy.solver, policy.half_solver, policy.fork_bomber),
        (policy.half_solver, policy.flooder, policy.sleeper),
        (policy.solver, policy.forger, policy.quitter),
    ]
    script: dict[str, list[Player]] = {
        task.id: [moves.played(play(task, package())) for play in players]
        for task, players in zip(chosen, cast, strict=True)
    }
    async with repairing(tmp_path, script, chosen, group_size=3, tool_timeout_s=20.0) as env:
        items = [await env.get_next_item() for _ in chosen]
        groups = await asyncio.gather(*(env.collect_trajectories(item) for item in items))
    assert [left for _, left in groups] == [[], [], []]
    found = recorded(tmp_path)
    scores = [[t.score for t in found[task.id]] for task in chosen]
    halves = [pytest.approx(task.partial) for task in chosen[:2]]
    assert scores == [[1.0, halves[0], 0.0], [halves[1], 0.0, 0.0], [1.0, 0.0, 0.0]]
    assert all(0 < task.partial < 1 for task in chosen[:2])
    assert {t.fault for transcripts in found.values() for t in transcripts} == {"none"}
    asleep = results(found[chosen[1].id][2], "terminal", "bash")
    assert [(result.timed_out, result.error, result.exit_code) for result in asleep] == [
        (False, None, 0),  # at home
        (True, None, None),  # it goes on,
        (True, None, None),  # and on,
        (False, "session_busy", None),
        (False, None, 130),  # until it is interrupted
        (False, None, 0),
        (True, None, 137),
        (False, None, 0),
    ]
    came = "".join(result.stdout for result in asleep[1:5])  # by which of these calls depends on the machine
    assert "counting sheep" in came
    assert "one" not in came.partition("counting sheep")[0]
    assert "still in /workspace/bed, counting sheep" in asleep[5].stdout
    still_there = ProcessReply.model_validate(results(found[chosen[2].id][1], "process")[-1].content).process
    assert still_there is not None
    assert still_there.state == "running"
    assert leftovers(tmp_path) == []


async def test_whoever_mends_everything_scores_1_whatever_the_tools(tmp_path: Path) -> None:
    task = with_bugs(2)[0]
    script: dict[str, list[Player]] = {task.id: [moves.played(play(task, package())) for play in policy.SOLVERS]}
    async with repairing(tmp_path, script, [task], group_size=len(policy.SOLVERS)) as env:
        await env.collect_trajectories(await env.get_next_item())
    found = recorded(tmp_path)[task.id]
    assert [(t.score, t.fault) for t in found] == [(1.0, "none")] * len(policy.SOLVERS)
    every = [result for t in found for result in results(t, *t.tools)]
    assert {(result.fault, result.error) for result in every} == {("none", None)}
    by_files, in_a_shell, on_a_screen = found
    assert " passed" in results(by_files, "process")[-1].stdout
    assert " passed" in results(in_a_shell, "terminal")[-1].stdout
    screens = results(on_a_screen, "tmux")
    assert "(Pdb)" in screens[2].stdout
    assert " passed" in screens[-2].stdout
    assert "(Pdb)" in recordings(result.content for result in screens)["main"]


async def test_reports_are_to_be_had_and_the_key_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []

    def noted(self: Tracker, *args: Any) -> None:
        made(self, *args)
        keys.append(self.key)

    made = Tracker.__init__
    monkeypatch.setattr(Tracker, "__init__", noted)
    task, hunt = with_bugs(1)[0], "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'"
    asked = [
        Call("bug_report", {"task": task.id}),
        Call("bug_report", {"task": "x"}),
        Call("bug_report", {"task": "/"}),
    ]
    player = [Reply("", tuple(asked)), Reply("", (Call("bash", {"command": hunt}),)), Reply("I give up")]
    async with repairing(tmp_path, {task.id: [player]}, [task], group_size=1) as env:
        await env.collect_trajectories(await env.get_next_item())
    [transcript] = recorded(tmp_path)[task.id]
    told, unknown, malformed = results(transcript, "bug_report")
    assert told.content == report(task)
    assert (unknown.fault, unknown.exit_code, unknown.stderr) == ("none", 1, "x: nothing was reported of it")
    assert malformed.error == "invalid_arguments"
    assert len(keys) == 1
    assert keys[0] not in json.dumps(transcript.messages) + (tmp_path / "rollouts.jsonl").read_text()


async def test_tasks_are_the_same_for_the_same_seed_and_cached(tmp_path: Path) -> None:
    reports: list[int] = []
    again = tasks.make_tasks(one_package(), seed=1, report=lambda progress: reports.append(progress.done))
    assert tuple(again) == made()
    assert len({task.id for task in again}) == len(again) >= 6
    assert reports == sorted(reports)


@pytest.mark.parametrize("name", OTHERS)
def test_each_package_gives_tasks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "CANDIDATES_PER_PACKAGE", 4)  # of 20: running its tests is what takes long
    assert {PACKAGE, *OTHERS} == fetched().by_name.keys()
    some = tasks.make_tasks(one_package(name), seed=1)
    assert {task.package for task in some} == {name}
