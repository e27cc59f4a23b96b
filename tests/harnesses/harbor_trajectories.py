"""Rollouts in ATIF, read with Harbor's own models: what they read is what was written."""

from __future__ import annotations

from pathlib import Path

import pytest
from harbor.models.trajectories import Trajectory

from agentenv.agent.transcript import GroupRecord
from agentenv.runs.atif import trajectory, write_trajectories
from tests.browser import synthetic
from tests.golden import atif_cases

RECORDS = [atif_cases.group(), atif_cases.of_programs(), *synthetic.few()[:4], *synthetic.many(40)]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.group)
def test_every_sort_of_rollout_is_a_trajectory(record: GroupRecord) -> None:
    for member in record.trajectories:
        for document in (trajectory(member, record), trajectory(member)):
            assert Trajectory.model_validate(document).to_json_dict() == document


def test_the_conversations_of_a_program_are_a_trajectory_and_its_sub_agents() -> None:
    record = atif_cases.of_programs()
    read = Trajectory.model_validate(trajectory(record.trajectories[0], record))
    title, sub = read.subagent_trajectories or []
    assert [step.source for step in read.steps] == ["system", "user", "agent", "agent", "agent", "agent"]
    assert [bool(step.is_copied_context) for step in sub.steps] == [True] * 4 + [False] * 2
    assert title.trajectory_id != sub.trajectory_id
    assert {read.session_id} == {title.session_id, sub.session_id}
    copied = [step for step in sub.steps if step.is_copied_context]
    assert not any(step.metrics for step in copied), "no token is counted or trained on twice"
    own = sub.steps[-1]
    assert own.metrics is not None
    assert own.metrics.completion_token_ids == [31, 32]


def test_files_are_trajectories(tmp_path: Path) -> None:
    write_trajectories([atif_cases.of_programs()], tmp_path)
    names = {Trajectory.model_validate_json(path.read_text()).agent.name for path in tmp_path.iterdir()}
    assert names == {"small-agent"}
