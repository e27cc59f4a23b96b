"""``agentenv tasks``: what it lists, and how many tasks a check plays at once."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentenv.agent.transcript import Phase, Transcript
from agentenv.cli.app import app, imported
from agentenv.tasks.scripted import PARTS, Room, parts_of
from tests.integration.task_corpus import CASES
from tests.waiting import loop_turns


@pytest.mark.parametrize("verb", ["check", "play", "list"])
def test_every_verb_of_it_teaches_by_example_and_speaks_json(verb: str) -> None:
    said = CliRunner().invoke(app, ["tasks", verb, "--help"], env={"COLUMNS": "80"})
    assert said.exit_code == 0
    assert f"agentenv tasks {verb} " in said.stdout
    assert "--json" in said.stdout
    assert max(map(len, said.stdout.splitlines())) <= 80
    assert set(imported("tasks").commands) == {"check", "play", "list"}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    for name in ("usual", "steps", "a-gpu", "tests-in-the-same-shell"):
        CASES[name].write(tmp_path / name)
    return tmp_path


def test_tasks_are_listed_with_what_they_request_and_why_they_are_refused(tasks: Path) -> None:
    done = CliRunner().invoke(app, ["tasks", "list", str(tasks), "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == 0
    assert [(row["name"], row["format"], row["steps"], row["verifier"]) for row in found["tasks"]] == [
        ("steps", "harbor", ["first", "second part", "third"], "separate"),
        ("tests-in-the-same-shell", "terminal-bench", [], "shared"),
        ("usual", "harbor", [], "shared"),
    ]
    assert [row["services"] for row in found["tasks"]] == [[], [], []]
    assert found["tasks"][1]["unused"] == ["run_tests_in_same_shell"]
    assert found["refused"] == {"a-gpu": "environment.gpus: task a-gpu: slots have no GPU (task.toml)"}
    shown = CliRunner().invoke(app, ["tasks", "list", str(tasks), "--strict"])
    assert shown.exit_code == 1
    assert "steps" in shown.stdout
    assert "Dockerfile, 3 steps, own verifier" in shown.stdout
    assert "a-gpu" in shown.stdout
    assert "3 tasks can be played, 1 cannot" in shown.stderr


def test_a_directory_without_tasks_is_a_malformed_setting(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["tasks", "list", str(tmp_path)])
    assert done.exit_code == 2
    assert "has no task.toml or task.yaml" in done.stderr


@pytest.mark.parametrize("seed", range(20))
async def test_as_many_are_played_as_have_room_and_each_has_its_turn(seed: int) -> None:
    chance = random.Random(seed)
    jobs, all_mib = chance.randint(1, 4), 100
    room, playing, ended = Room(jobs, all_mib), set[int](), list[int]()
    needs = [chance.choice([0, 10, 40, 60, 100, 500]) for _ in range(30)]

    async def one(number: int) -> None:
        async with room.of(needs[number]):
            playing.add(number)
            assert len(playing) <= jobs
            assert sum(min(needs[each], all_mib) for each in playing) <= all_mib
            await loop_turns(chance.randint(0, 3))
            playing.remove(number)
            ended.append(number)

    rest = [asyncio.create_task(one(number)) for number in range(len(needs))]
    for task in chance.sample(rest, 5):
        await loop_turns(1)
        if task.cancel():
            playing.discard(rest.index(task))
    found = await asyncio.gather(*rest, return_exceptions=True)
    assert {type(each) for each in found} <= {type(None), asyncio.CancelledError}
    assert len(ended) >= len(needs) - 5
    async with room.of(500):
        assert playing == set()


def test_the_parts_of_a_rollout_are_all_of_its_time() -> None:
    phases = [("slot_wait", 2.0, 3.0), ("prepare", 3.0, 4.0), ("model", 4.0, 6.0), ("tool", 6.0, 7.0)]
    phases += [("verify", 7.0, 11.0), ("verify", 11.0, 12.0), ("release", 12.0, 12.5)]
    member = Transcript(
        trajectory="t",
        item_id="one",
        began_unix_s=0.0,
        phases=[Phase(name=name, started_s=began, ended_s=ended) for name, began, ended in phases],
        totals={"total_s": 12.5},
    )
    found = parts_of(member)
    assert found == {"image": 2.0, "slot": 1.0, "prepare": 1.0, "agent": 3.0, "verify": 5.0, "release": 0.5}
    assert list(found) == ["image", *PARTS]
    assert sum(found.values()) == 12.5
