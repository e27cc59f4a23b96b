"""The benchmarks' own parts: baselines, records, the generated table."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import table
from benchmarks.__main__ import busy, main, told
from benchmarks.baselines import bare_bash, output_file
from benchmarks.chaos import Tally
from benchmarks.harbor_trials import Measured, Missing, check
from benchmarks.ledger_costs import decisions, moves
from benchmarks.measure import MIB, Latencies, at_least, at_most, beside, percentile
from benchmarks.processes import (
    container_roots,
    cpu_s,
    descriptors,
    mounts,
    process_tree,
    pss_bytes,
    root_of,
    rss_bytes,
)
from benchmarks.targets import TARGETS
from benchmarks.targets.effort import BARE, Effort, Rounds
from benchmarks.targets.killed import killed_outcomes
from benchmarks.targets.runs import Stay, off_by_weight
from benchmarks.workloads import slow_of


def test_percentiles_are_of_the_nearest_rank() -> None:
    values = [float(n) for n in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([7.0], 0.99)) == (50, 99, 7)
    assert Latencies([0.002, 0.004], 0.5).rate == 4


@pytest.mark.parametrize(("share", "slow"), [(0.0, 0), (0.01, 1), (0.1, 3)])
def test_each_trajectory_has_its_slow_calls(share: float, slow: int) -> None:
    assert slow_of(33, share) == slow


def test_bare_bash_times_every_call() -> None:
    timed = bare_bash(6, 2)
    assert len(timed.seconds) == 6
    assert 0 < min(timed.seconds) < timed.total_s


def test_bare_bash_reads_whole_outputs_and_refuses_others() -> None:
    command = f"cat {output_file(MIB)}"
    assert len(bare_bash(2, 1, command=command, read_bytes=MIB).seconds) == 2
    with pytest.raises(subprocess.CalledProcessError):
        bare_bash(1, 1, command=command, read_bytes=MIB - 1)
    with pytest.raises(subprocess.CalledProcessError):
        bare_bash(1, 1, command="false")


def test_slow_calls_of_bare_bash_are_made_and_not_timed() -> None:
    timed = bare_bash(6, 2, slow=1)
    assert len(timed.seconds) == 4
    assert timed.total_s >= 5


def test_rounds_become_one_outcome_for_each_backend() -> None:
    rounds = Rounds(Effort(backends=("local", "nomad")))
    for value in (1.0, 3.0, 2.0):
        rounds.add("rate", "local", value)
        rounds.add("rate", "nomad", value * 10)
        rounds.add("rate", BARE, 4.0)
    goal = at_least("T1", "short calls", "calls/s", 2.0)
    local, nomad = rounds.outcomes(goal, "rate", lambda backend: rounds.beside("rate", "calls/s", backend, "bwrap"))
    assert (local.target, local.value, local.holds, local.goal) == ("T1", 2.0, True, ">= 2")
    assert (nomad.target, nomad.value) == ("T1@nomad", 20.0)
    assert local.beside == beside("calls/s", [2.0], [4.0])
    assert local.details["rounds"] == [1.0, 3.0, 2.0]
    assert not at_most("T2", "alone", "x", 0.5).outcome([0.6]).holds


RECORD = {
    "measured_at": "2026-11-21T10:00:00+00:00",
    "machine": {"cores": 2, "kernel": "6.18", "python": "3.11.7"},
    "targets": {
        "T1": dataclasses.asdict(
            at_least("T1", "short calls", "x", 0.75).outcome([0.7], beside("calls/s", [1250.0], [1700.0], [300.5]))
        ),
        "S1": dataclasses.asdict(at_most("S1", "a decision", "ms", 1.0).outcome([0.25])),
    },
}


def test_the_table_is_made_of_the_results() -> None:
    lines = table.markdown(RECORD).splitlines()
    assert lines[0] == "2026-11-21, 2 cores, kernel 6.18, Python 3.11.7, in one run:"
    columns = "| T1 | short calls | 0.7 x | ≥ 0.75 | 1,250 calls/s | 1,700 calls/s | 300 calls/s | **no** |"
    assert lines[-2] == columns
    assert lines[-1] == "| S1 | a decision | 0.25 ms | ≤ 1 |  |  |  | yes |"


def test_the_table_is_put_between_its_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    results.write_text(json.dumps(RECORD))
    page.write_text("before\n<!-- results -->\nold \\1\n<!-- /results -->\nafter\n")
    monkeypatch.setattr("sys.argv", ["table", "--results", str(results), "--page", str(page)])
    assert table.main() == table.main() == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- results -->\n\n2026-11-21")
    assert text.endswith("| yes |\n\n<!-- /results -->\nafter\n")
    assert "old \\1" not in text
    with pytest.raises(ValueError, match="no <!-- other -->"):
        table.replace_between(text, "other", "new")


def test_the_pages_have_their_markers() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for page, name in (
        ("performance.md", "results"),
        ("performance.md", "farm"),
        ("scaling.md", "scaling"),
        ("farm.md", "sharing"),
    ):
        assert "new figures" in table.replace_between((docs / page).read_text(), name, "new figures")


def test_processes_are_measured() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert pss_bytes(child.pid) > 0
        assert descriptors(child.pid) >= 3
        assert [process.pid for process in process_tree(child.pid)] == [child.pid]
        assert child.pid not in container_roots()
        assert root_of("a container that is not there") is None
        assert rss_bytes(child.pid) > 0
        assert cpu_s(child.pid) < 60
        assert mounts([child.pid]) == 0, "it is in our own namespace"
    finally:
        child.kill()
        child.wait()
    assert (pss_bytes(child.pid), descriptors(child.pid), process_tree(child.pid)) == (0, 0, [])


def test_deciding_is_cheap_at_ten_thousand_slots() -> None:
    """Medians, because the machine may have other things to do; `make bench` looks at the 99th percentile."""
    assert max(decisions(9, 0.5).values()) < 1.0
    assert max(moves(100, waiting=10_000, share=0.5).values()) < 0.5


def test_a_place_that_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--out", str(tmp_path / "file/below")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "--out: cannot make" in capsys.readouterr().err


def test_a_busy_machine_is_mentioned_and_every_target_explained() -> None:
    assert busy(0.1) == ""
    assert "load 64.0" in busy(64.0)
    entries = {"T1": {"what": "short calls"}}
    assert told(entries, 80) == ["T1: short calls"]
    assert told(entries, 200) == [], "the table itself has room for it"


def test_there_is_a_measurement_for_every_id() -> None:
    farm = {f"F{number}" for number in range(1, 15)} | {"F3.real"}
    images = {"I1", "I4", "I5", "I6", "I7", "I8", "I9", "I10"}
    assert TARGETS.keys() == {f"T{number}" for number in range(1, 10)} | farm | images | {
        "S1",
        "A",
        "A4",
        "A6",
        "N1",
        "N2",
    }


def _stays(run: str, slots: int, lengths_s: Sequence[float]) -> list[Stay]:
    """So many slots, on each of which one stay follows the other."""
    starts = [sum(lengths_s[:number]) for number in range(len(lengths_s))]
    return [Stay(run, start, start + stay_s) for start, stay_s in zip(starts, lengths_s, strict=True)] * slots


def test_shares_are_compared_while_all_runs_want_more() -> None:
    fair = _stays("a", 10, [10.0] * 4) + _stays("b", 30, [5.0] * 8)
    assert off_by_weight(fair, {"a": 1, "b": 3}, settled_s=5) == pytest.approx({"a": 0, "b": 0})
    off = off_by_weight(fair, {"a": 1, "b": 1}, settled_s=5)
    assert off == pytest.approx({"a": -0.5, "b": 0.5})
    late = [*_stays("a", 10, [10.0] * 4), Stay("b", 30.0, 40.0)]
    assert off_by_weight(late, {"a": 1, "b": 1}, settled_s=5) == pytest.approx({"a": 1, "b": -1})
    with pytest.raises(AssertionError, match="oversubscribed"):
        off_by_weight(fair, {"a": 1, "b": 3}, settled_s=31)


def test_what_kills_of_the_service_did_is_told() -> None:
    tally = Tally()
    tally.counted.update({"calls": 90, "sessions verified": 7})
    well = killed_outcomes(tally, 0, [0.5, 2.0])
    assert [(one.target, one.value, one.holds) for one in well] == [
        ("F5", 0, True), ("F5.leaked", 0, True), ("F5.twice", 0, True), ("F5.again", 2.0, True),
    ]  # fmt: skip
    tally.counted["LeaseLostError"] += 2
    tally.wrongs += ["slot ('a', 1) serves two", "a release has not ended after 60 s"]
    bad = killed_outcomes(tally, 1, [4.0])
    assert [(one.value, one.holds) for one in bad] == [(4, False), (1, False), (1, False), (4.0, False)]
    assert bad[0].details["errors"] == {"LeaseLostError": 2}


def harbor_result(began_s: int, *ends_s: int) -> dict[str, object]:
    """Of a trial whose environment, agent and verifier ended then, and the trial last."""
    times = [f"2026-01-01T00:00:{second:02}Z" for second in (began_s, *ends_s)]
    spans = [{"started_at": times[0], "finished_at": end} for end in times[1:]]
    return {**dict(zip(("environment_setup", "agent_execution", "verifier"), spans, strict=False)), **spans[-1]}


def test_a_trial_of_harbor_is_divided_into_its_phases() -> None:
    measured = Measured()
    measured.add([harbor_result(0, 4, 5, 8, 18), harbor_result(2, 3, 4, 5, 6)])
    assert measured.phases == {
        "environment": [4, 1],
        "agent": [1, 1],
        "verifier": [3, 1],
        "end": [10, 1],
        "trial": [18, 4],
    }
    assert measured.per_trial == [9]


def test_trials_of_harbor_need_harbor_an_engine_and_compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)

    monkeypatch.setenv("PATH", str(tmp_path))
    for programs, why in (
        ({}, "no program harbor"),
        ({"harbor": "echo 1.2.3"}, "no program docker"),
        ({"docker": "echo of the daemon >&2; exit 1"}, "no Docker engine (of the daemon)"),
        ({"docker": '[ "$1" = version ] && echo 20.10'}, "no docker compose"),
    ):
        for name, text in programs.items():
            program(name, text)
        with pytest.raises(Missing) as raised:
            check("harbor")
        assert str(raised.value).startswith(why)
    program("docker", 'if [ "$1" = version ]; then echo 20.10; else echo 2.26; fi')
    assert check("harbor") == "Harbor 1.2.3, Docker engine 20.10, docker compose 2.26"
