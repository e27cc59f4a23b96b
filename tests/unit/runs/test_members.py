"""The rollouts of groups that have not ended, and what a resumed run makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.rollout_log import append_record
from agentenv.agent.token_sequences import TokenSequence
from agentenv.agent.transcript import GroupRecord, RunRecord, SequenceSummary, Transcript
from agentenv.errors import Fault
from agentenv.runs import members as module
from agentenv.runs.kept import read_kept, reopened, to_reopen
from agentenv.runs.members import MembersFile, read_members

RUN = RunRecord(id="r", environment="e", model="m", settings="s", agentenv="0", began_unix_s=0)
TOKENS = TokenSequence([1, 2], [-100, 2], [1.0, -0.5], 0)


def rollout(name: str, score: float | None = 1.0, fault: Fault = "none", **more: Any) -> Transcript:
    return Transcript(trajectory=name, item_id=name.partition("-")[0], began_unix_s=0, score=score, fault=fault, **more)


def record(group: str, position: int, *transcripts: Transcript, run: RunRecord = RUN) -> GroupRecord:
    scored = sum(one.score is not None for one in transcripts)
    outcome: Any = "retry" if not scored else "complete" if scored == len(transcripts) else "partial"
    return GroupRecord(
        run=run, group=group, position=position, item_id=group.partition("-")[0], group_size=len(transcripts),
        outcome=outcome, trajectories=list(transcripts),
    )  # fmt: skip


def test_members_are_kept_until_their_group_ends(tmp_path: Path) -> None:
    file = MembersFile(path := tmp_path / "members.jsonl")
    exact = rollout("a-0").model_copy(update={"token_sequences": [TOKENS]})
    file.add("a", 0, 0, exact)
    file.add("b", 1, 0, rollout("b-0"))
    file.add("a", 0, 1, rollout("a-1", None, "infra"))
    assert [(one.group, one.position, one.member) for one in read_members(path)] == [
        ("a", 0, 0),
        ("a", 0, 1),
        ("b", 1, 0),
    ]
    assert next(read_members(path)).whole() == exact
    assert next(read_members(path)).whole().token_sequences == [TOKENS]
    file.ended("a")
    assert [one.group for one in read_members(path)] == ["b"]
    file.close()
    assert path.exists()
    file.ended("b")
    file.close()
    assert not path.exists()


def test_what_means_nothing_is_removed_when_it_is_the_larger_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAST_REMOVED_BYTES", 2000)
    file = MembersFile(path := tmp_path / "members.jsonl")
    file.add("open", 0, 0, rollout("open-0"))
    for number in range(50):
        file.add(f"g{number}", number + 1, 0, rollout(f"g{number}-0"))
        file.ended(f"g{number}")
    assert path.stat().st_size < 5000
    assert [one.group for one in read_members(path)] == ["open"]


def test_half_a_line_of_a_killed_writer_is_left_out(tmp_path: Path) -> None:
    file = MembersFile(path := tmp_path / "members.jsonl")
    file.add("a", 0, 0, rollout("a-0"))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:50])
    assert [one.group for one in read_members(path)] == ["a"]
    file.add("b", 1, 0, rollout("b-0"))
    assert [one.group for one in read_members(path)] == ["a", "b"]
    path.write_bytes(b'{"odd": 1}\n' + whole)
    with pytest.raises(ValueError, match=r"members\.jsonl:1 is not the record of a rollout"):
        list(read_members(path))


def kept_of(directory: Path, *, groups: bool = True, **more: Any) -> Any:
    seen: list[tuple[str, bool]] = []
    kept = read_kept(
        directory / "rollouts.jsonl", directory / "groups.jsonl" if groups else None, directory / "members.jsonl", "r",
        **{"size": 2, "item_retries": 1, "each": lambda one, dropped: seen.append((one.group, dropped)), **more},
    )  # fmt: skip
    return kept, seen


def test_only_what_infrastructure_failed_is_reopened(tmp_path: Path) -> None:
    rollouts = tmp_path / "rollouts.jsonl"
    other = RUN.model_copy(update={"id": "other"})
    groups = [
        record("whole-1", 0, rollout("whole-1-0"), rollout("whole-1-1")),
        record("cut-2", 1, rollout("cut-2-0"), rollout("cut-2-1", None, "infra")),
        record("doubt-3", 2, rollout("doubt-3-0"), rollout("doubt-3-1", None, "infra", doubtful=True)),
        record("task-4", 3, rollout("task-4-0"), rollout("task-4-1", None, "task")),
        record("theirs-5", 4, rollout("theirs-5-0"), rollout("theirs-5-1", None, "infra"), run=other),
    ]
    for each in groups:
        append_record(rollouts, each)
    written = [{"group": each.group, "scores": [1.0]} for each in groups[:4]]
    (tmp_path / "groups.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in written))
    assert list(to_reopen(rollouts, "r", evaluated=False)) == ["cut-2"]
    lines = rollouts.read_bytes().splitlines(keepends=True)
    for _ in range(2):  # ended in the middle, it can be done again
        reopened(rollouts, tmp_path / "groups.jsonl", tmp_path / "members.jsonl", "r", evaluated=False)
        assert rollouts.read_bytes() == b"".join(lines[:1] + lines[2:])
        assert '"cut-2"' not in (tmp_path / "groups.jsonl").read_text()
    kept, seen = kept_of(tmp_path)
    assert (kept.done, kept.groups, kept.doubtful) == ({0, 2, 3}, 3, 1)
    assert {position: (one.group, sorted(one.members)) for position, one in kept.open.items()} == {1: ("cut-2", [0])}
    assert seen == [("whole-1", False), ("doubt-3", False), ("task-4", False)]
    assert kept.items == {0: "whole", 1: "cut", 2: "doubt", 3: "task"}


def test_a_group_whose_tokens_are_lost_is_left_as_it_is(tmp_path: Path) -> None:
    exact = rollout("cut-2-0", sequences=[SequenceSummary(first_step=0, tokens=2, trained=1)])
    append_record(tmp_path / "rollouts.jsonl", record("cut-2", 1, exact, rollout("cut-2-1", None, "infra")))
    before = (tmp_path / "rollouts.jsonl").read_bytes()
    reopened(tmp_path / "rollouts.jsonl", tmp_path / "groups.jsonl", tmp_path / "members.jsonl", "r", evaluated=False)
    assert (tmp_path / "rollouts.jsonl").read_bytes() == before


def test_a_group_that_was_recorded_and_not_written_is_formed_again(tmp_path: Path) -> None:
    members = MembersFile(tmp_path / "members.jsonl")
    exact = rollout("a-0").model_copy(
        update={"token_sequences": [TOKENS], "sequences": [SequenceSummary(first_step=0, tokens=2, trained=1)]}
    )
    members.add("a", 0, 0, exact)
    append_record(tmp_path / "rollouts.jsonl", record("a", 0, exact))
    kept, _ = kept_of(tmp_path, size=1)
    assert kept.unwritten == {"a": [exact]}
    assert kept.unwritten["a"][0].token_sequences == [TOKENS]
    assert (kept.done, len(kept.members)) == ({0}, 1)


def test_failed_groups_are_retried_so_often_as_without_an_end(tmp_path: Path) -> None:
    rollouts = tmp_path / "rollouts.jsonl"
    failed: list[tuple[str, int, Fault]] = [
        ("a-1", 0, "task"), ("b-1", 1, "task"), ("b-2", 1, "task"), ("c-1", 2, "infra"), ("c-2", 2, "infra"),
    ]  # fmt: skip
    for group, position, fault in failed:
        append_record(rollouts, record(group, position, rollout(f"{group}-0", None, fault)))
    kept, seen = kept_of(tmp_path, size=1)
    assert kept.failures == {0: 1}, "once more"
    assert kept.done == {1}, "dropped, by the task's doing"
    assert seen == [("a-1", False), ("b-1", False), ("b-2", True), ("c-1", False), ("c-2", False)]
    assert kept.groups == 0


def test_groups_that_no_record_knows_are_refused(tmp_path: Path) -> None:
    append_record(tmp_path / "rollouts.jsonl", record("a-1", 0, rollout("a-1-0")))
    (tmp_path / "groups.jsonl").write_text('{"group": "a-1"}\n{"scores": [1.0]}\n')
    with pytest.raises(ValueError, match="has 1 groups that no record knows"):
        kept_of(tmp_path, size=1)


def test_a_group_whose_record_was_lost_is_formed_again_of_its_members(tmp_path: Path) -> None:
    append_record(tmp_path / "rollouts.jsonl", record("a-1", 0, rollout("a-1-0")))
    (tmp_path / "groups.jsonl").write_text('{"group": "a-1"}\n{"group": "b-2"}\n')
    MembersFile(tmp_path / "members.jsonl").add("b-2", 1, 0, rollout("b-2-0"))
    reopened(tmp_path / "rollouts.jsonl", tmp_path / "groups.jsonl", tmp_path / "members.jsonl", "r", evaluated=False)
    assert (tmp_path / "groups.jsonl").read_text() == '{"group": "a-1"}\n'
    kept, _ = kept_of(tmp_path, size=1)
    assert (kept.done, sorted(kept.open[1].members)) == ({0}, [0])


def test_a_group_whose_members_have_all_ended_is_open(tmp_path: Path) -> None:
    members = MembersFile(tmp_path / "members.jsonl")
    for number in range(2):
        members.add("a-1", 4, number, rollout(f"a-1-{number}"))
    kept, seen = kept_of(tmp_path)
    assert (kept.done, seen, sorted(kept.open[4].members), kept.last) == (set(), [], [0, 1], 4)
