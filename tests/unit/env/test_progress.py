"""What is written while a command runs, and at its end."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path

import pytest

from agentenv.agent.failure_log import FailureLog
from agentenv.agent.results import ERROR_CHARACTERS
from agentenv.agent.transcript import Transcript
from agentenv.env.progress import Ending, RunLog, RunProgress, result_document, result_rows, set_up_logging
from agentenv.errors import Fault
from tests import programs_played


def rollout(score: float | None, fault: Fault = "none", error: str = "") -> Transcript:
    return Transcript(trajectory="t", item_id="i", began_unix_s=0, score=score, fault=fault, error=error)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [0.0]
    monkeypatch.setattr("agentenv.env.progress.time.monotonic", lambda: clock[0])
    return clock


def test_a_line_per_group_and_the_results_at_the_end(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    shown = RunProgress()

    def ending(incomplete: bool) -> Ending:
        assert incomplete
        return Ending([("records", "r.jsonl")], ["agentenv runs resume x", "agentenv report r.jsonl"], "id", "runs/x")

    with suppress(KeyboardInterrupt), shown.shown("process", "4 groups of 2", 4, ending):
        now[0] += 10
        shown.add("item-1", [rollout(1.0), rollout(None, "infra", "ContainerLostError: it died")])
        now[0] += 10
        shown.add("item-2", [rollout(None, "task", "TaskError: bug")] * 2)
        raise KeyboardInterrupt
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "process: 4 groups of 2",
        "group 1/4: item-1: 1 –; mean score 1, faults: 1 infra; 10 s, about 30 s left",
        "group 1/4: item-2: no score; mean score 1, faults: 2 task, 1 infra; 20 s, about 1 min left",
    ]
    assert out.splitlines() == [
        "scored   1 of 4 rollouts, in 20 s",
        "mean     1.000",
        "faults   2 task, 1 infra",
        "errors   2 × TaskError: bug",
        "         1 × ContainerLostError: it died",
        "records  r.jsonl",
        "run      runs/x",
        "next     agentenv runs resume x",
        "         agentenv report r.jsonl",
    ]


def test_lines_become_rarer_in_a_long_run(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    shown = RunProgress()
    with shown.shown("serve", "groups of 1", None):
        for _ in range(100_000):
            now[0] += 1
            shown.add("item", [rollout(0.5)])
    lines = capsys.readouterr().err.splitlines()
    assert 100 < len(lines) < 600
    assert lines[-1].startswith("group ")


def test_outside_of_a_command_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    RunProgress().add("item", [rollout(1.0)])
    assert capsys.readouterr() == ("", "")


def test_long_errors_and_many_kinds_are_cut() -> None:
    results = RunProgress().results
    results.add([rollout(None, "task", f"{'abcdefghijkl'[n]} {'x' * 999}\nline") for n in range(12)])
    rows = result_rows(results, 1.0, Ending(then=["look at it"]))
    assert rows[-2:] == [("", "2 more kinds"), ("next", "look at it")]
    assert all(len(text) < ERROR_CHARACTERS + 20 and "\n" not in text for _, text in rows)


def test_agent_programs_are_counted_at_the_end() -> None:
    results = RunProgress().results
    results.add(programs_played.group().trajectories)
    rows = dict(result_rows(results, 1.0, Ending()))
    assert rows["programs"] == "small-agent: played 3, failed 1, conversations 5, dropped parts 7, refused requests 1"
    assert rows["dialects"] == "messages: turns 1, prompt tokens 10, completion tokens 2"
    assert result_document(results, 1.0, Ending())["dialects"]["chat"]["turns"] == 6


def test_atropos_is_heard_from_warnings_on_and_not_of_every_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("AGENTENV_DEBUG", raising=False)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's, while the test runs
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    atropos = logging.getLogger("atroposlib.envs.base")
    level = atropos.level
    atropos.setLevel(logging.DEBUG)
    try:
        set_up_logging()
        logging.warning("installs no handler of its own")
        for number in range(12):
            atropos.info("Status dict: %d", number)
            atropos.warning("group %d: scores are the same", number)
            logging.getLogger("agentenv.test").warning("ours")
    finally:
        atropos.setLevel(level)
    shown = capsys.readouterr().err.splitlines()
    assert [line for line in shown if "ours" not in line] == [
        "WARNING installs no handler of its own",
        "WARNING group 0: scores are the same",
        "WARNING group 9: scores are the same",
    ]
    assert shown.count("WARNING ours") == 12


def test_the_document_of_a_command_says_what_its_lines_say() -> None:
    results = RunProgress().results
    results.add([rollout(1.0), rollout(None, "task", "TaskError: a bug\nin a hook")])
    results.missing.lost.add("record", "No space left on device", "")
    document = result_document(results, 1.25, Ending([("records", "r.jsonl")], run="id"))
    assert json.loads(json.dumps(document)) == document
    assert (document["rollouts"], document["scored"], document["mean"], document["sd"]) == (2, 1, 1.0, None)
    assert document["errors"] == [{"count": 1, "fault": "task", "text": "TaskError: a bug in a hook"}]
    assert document["missing"] == [{"what": "lost", "text": "1 record: No space left on device"}]
    assert (document["files"], document["run"], document["took_s"]) == ({"records": "r.jsonl"}, "id", 1.25)


def test_a_command_for_programs_prints_its_document_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(as_json=True).shown("process", "2 groups", 2):
        pass
    out = capsys.readouterr().out
    assert json.loads(out)["rollouts"] == 0
    assert out.count("\n") == 1


def test_an_evaluation_says_how_sure_its_mean_is(capsys: pytest.CaptureFixture[str]) -> None:
    shown = RunProgress()
    with shown.shown("evaluate", "2 items, 2 attempts each", 2):
        for item, scores in (("a", [1.0, 0.0]), ("b", [1.0, None])):
            shown.add(item, [rollout(score).model_copy(update={"item_id": item}) for score in scores])
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["mean"] == "0.667 ± 0.222 (sd 0.577)"
    assert rows["pass@k"] == "pass@1 0.750, pass@2 1.000 (1 item with fewer scored attempts left out)"
    document = shown.document(Ending())
    assert (document["pass_at"], document["stderr"]) == ({"1": 0.75, "2": 1.0}, pytest.approx(0.2222, abs=1e-3))


def test_the_log_of_a_run_has_what_the_screen_counts_and_no_secret(tmp_path: Path) -> None:
    log = RunLog(["sk-secret-key", "unused"])
    try:
        failures = FailureLog()
        for number in range(4):
            failures.add(f"lost {number}", f"rollout {number}: the container is lost")
        logging.getLogger("agentenv.x").info("not this")
        log.open(path := tmp_path / "log.txt")
        logging.getLogger("openai").error("refused: sk-secret-key is unused")
        failures.close()
        log.add("the command ended: %s", "sk-secret-key")
    finally:
        log.close()
    assert logging.getLogger("agentenv.agent.failure_log").level == logging.NOTSET, "as it was"
    logging.getLogger("openai").error("after its end")
    lines = [line.split(maxsplit=2)[2] for line in path.read_text().splitlines()]
    assert lines == [
        "WARNING agentenv.agent.failure_log: rollout 0: the container is lost",
        *(f"INFO agentenv.agent.failure_log: again: rollout {number}: the container is lost" for number in (1, 2, 3)),
        "ERROR openai: refused: *** is unused",
        "WARNING agentenv.agent.failure_log: again ×3: lost 0",
        "ERROR agentenv.env.progress: the command ended: ***",
    ]


def test_a_log_without_a_line_is_no_file(tmp_path: Path) -> None:
    log = RunLog([])
    log.open(tmp_path / "log.txt")
    log.close()
    assert not (tmp_path / "log.txt").exists()


@pytest.mark.parametrize(("own", "said"), [(False, "no rollout has ended"), (True, "evaluate() is your own")])
def test_a_command_without_a_rollout_says_why(own: bool, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = RunProgress()
    with shown.shown("evaluate", "it", None, lambda _: Ending(directory="runs/a")):
        shown.results.returned = {"eval/right": 0.25} if own else None
    out = capsys.readouterr().out
    assert f"{said}, in " in out.splitlines()[0]
    assert "0 of 0" not in out
    assert ("returned eval/right 0.25" in out) is own
