"""The table of a check of records or tasks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from agentenv.agent.transcript import GroupRecord, Transcript
from agentenv.cli.output import InterruptedBySignalError
from agentenv.errors import ConfigError, InfraError, SandboxUnavailableError
from agentenv.tasks.scripted import Result, Table, busy, is_played, played, report, result_of
from agentenv.wire.calls import CallResult


def member(**fields: object) -> Transcript:
    return Transcript.model_validate({"trajectory": "t", "item_id": "one", "began_unix_s": 0.0, **fields})


def group(*members: Transcript) -> GroupRecord:
    return GroupRecord(
        group="g", item_id="one", group_size=len(members), outcome="complete", trajectories=list(members)
    )


IDLE = member(score=0.0)
FAILED = {
    "index": 0,
    "model_started_s": 0.0,
    "model_ended_s": 0.0,
    "message": {},
    "tool_calls": [
        {
            "call_id": "c",
            "tool": "bash",
            "arguments": {},
            "started_s": 0.0,
            "ended_s": 0.0,
            "result": CallResult(id="c", exit_code=3, stderr="no luck\n"),
        }
    ],
}


def test_a_record_is_good_when_each_player_scores_as_it_must() -> None:
    found = result_of(group(member(score=1.0), member(score=0.0)), ["oracle", "empty"], 1.5)
    assert (found.record, found.scores, found.seconds) == ("one", (1.0, 0.0), 1.5)
    assert found.good


@pytest.mark.parametrize(
    ("oracle", "empty", "reason"),
    [
        (member(score=0.0, verification={"reason": "too\n slow", "output": "x"}), IDLE, "oracle: too slow"),
        (member(score=0.0, verification={"still failing": ["a", "b"]}), IDLE, "oracle: still failing: a, b"),
        (member(score=0.0, verification={"not run": ["b"], "still failing": ["b"]}), IDLE, "oracle: not run: b"),
        (member(score=1.0), member(score=1.0, verification={"output": "fine"}), "empty: output: fine"),
        (member(score=1.0), member(score=0.5), "empty: the verifier gave no reason"),
        (
            member(score=0.0, steps=[FAILED]),
            IDLE,
            "oracle: the verifier gave no reason; a command ended with 3: no luck",
        ),
        (member(fault="task", error="TaskError: no"), IDLE, "oracle: TaskError: no"),
    ],
)
def test_the_reason_of_the_first_that_does_not(oracle: Transcript, empty: Transcript, reason: str) -> None:
    assert result_of(group(oracle, empty), ["oracle", "empty"], 0.0).reason == reason


def test_a_long_reason_keeps_both_ends() -> None:
    said = result_of(group(member(error="begin " + "x" * 5000 + " end")), ["oracle"], 0.0).reason
    assert said.startswith("oracle: begin x")
    assert said.endswith("x end")
    assert len(said) < 300


async def partly(_directory: Path, table: Table) -> None:
    table.refused = {"three": "environment.gpus: slots\nhave none"}
    with table.open(["one"]):
        table.add(Result("one", (1.0, 0.0), 1.25))


def test_what_is_not_played_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(["oracle", "empty"], partly, None) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "--  three   refused: environment.gpus: slots have none",
        "1 of 1 ok, 1 refused",
    ]


async def play(_directory: Path, table: Table) -> None:
    with table.open(["one", "another"]):
        for record, scores, reason in (("one", (1.0, 0.0), ""), ("another", (None, 0.0), "oracle: no")):
            with table.playing(record):
                table.add(Result(record, scores, 1.25, reason))


def test_the_table_and_the_exit_code(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert report(["oracle", "empty"], play, tmp_path / "out") == 1
    assert capsys.readouterr().out == (
        "    record   oracle   empty  seconds  reason\n"
        "ok  one           1       0      1.2\n"
        "BAD another    none       0      1.2  oracle: no\n"
        "1 of 2 ok\n"
    )


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("tasks", "is not set"), 2), (SandboxUnavailableError("no slots"), 1)]
)
def test_what_ends_the_check_is_said_in_a_line(capsys: pytest.CaptureFixture[str], error: Exception, code: int) -> None:
    async def failing(_directory: Path, _table: Table) -> None:
        raise error

    assert report(["oracle"], failing, None) == code
    told = capsys.readouterr()
    assert told.err == f"{type(error).__name__}: {error}\n"
    assert told.out == ""


def test_nothing_played_is_not_well() -> None:
    async def idle(_directory: Path, _table: Table) -> None:
        return None

    assert report(["oracle"], idle, None) == 1


def test_an_interrupted_check_says_how_far_it_came_and_how_to_go_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def ended_by(error: BaseException, directory: Path, table: Table) -> None:
        await play(directory, table)
        raise error

    full = InfraError("the record of one could not be written")
    for out, said in ((tmp_path, "to play the rest, add --resume"), (None, "with --out DIRECTORY can be resumed")):
        for error, raised in (
            (InterruptedBySignalError(2), InterruptedBySignalError),
            (ExceptionGroup("", [full]), InfraError),
        ):
            with pytest.raises(raised):
                played(Table(["oracle", "empty"]), partial(ended_by, error), out)
            err = capsys.readouterr().err
            assert "2 of 2 were played, 1 ok" in err
            assert said in err


def test_records_of_other_players_are_not_resumed(tmp_path: Path) -> None:
    played(Table(["oracle", "empty"]), play, tmp_path)
    with pytest.raises(ConfigError, match="has no check by these agents: oracle"):
        played(Table(["oracle"]), play, tmp_path, resume=True)


def test_what_is_written_is_kept_up_to_the_last_whole_line(tmp_path: Path) -> None:
    played(Table(["oracle", "empty"]), play, tmp_path)
    (tmp_path / "rollouts.jsonl").write_bytes(b"{}\n{}\n{")
    played(Table(["oracle", "empty"]), play, tmp_path, resume=True)
    assert (tmp_path / "rollouts.jsonl").read_bytes() == b"{}\n{}\n"


def test_what_infrastructure_has_failed_is_played_again() -> None:
    assert is_played(group(member(score=1.0), member(fault="task", error="TaskError: no")))
    assert not is_played(group(member(score=1.0), member(fault="infra", error="InfraError: no")))


def test_what_takes_minutes_is_said_in_a_log_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Making a base image was two minutes of silence."""
    with busy("making an image") as say:
        assert capsys.readouterr().err == "making an image\n"
        say("and its second part")
    with busy(""):
        assert capsys.readouterr().err == ""
