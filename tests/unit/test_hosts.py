"""What `make hosts` says of what it found; the machines themselves are booted by it alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from hosts import __main__ as hosts
from hosts.guests import GUESTS
from hosts.machine import Done
from hosts.rows import ROWS, Outcome, Row, agentenv

OK = '{"findings": [{"name": "cgroups", "level": "ok", "detail": "v2"}]}'
BROKEN = '{"findings": [{"name": "cgroups", "level": "broken", "detail": "none"}]}'
IMAGES = '{"findings": [{"name": "slots with images", "level": "weaker", "detail": "tree:\\nslower"}]}'


class Told:
    """A machine that answers as it is told, by a part of the command."""

    def __init__(self, answers: dict[str, tuple[int, str]]) -> None:
        self._answers = answers
        self.commands: list[str] = []
        self.time_factor = 1

    def run(self, command: str, *, user: str = "root", within_s: float = 600.0, log: Path | None = None) -> Done:
        self.commands.append(command)
        code, output = next((answer for part, answer in self._answers.items() if part in command), (0, ""))
        return Done(code, output, 0.0)


def tried(
    row: Row, answers: dict[str, tuple[int, str]], tmp_path: Path, long: frozenset[str] = frozenset()
) -> hosts.Trial:
    trial = hosts.Trial(Told(answers), row, tmp_path / "log", long)  # type: ignore[arg-type]
    trial.run()
    return trial


@pytest.mark.parametrize(
    ("doctor", "slot", "outcome", "wrong"),
    [
        (OK, (0, "hi\n"), "full", 0),
        (IMAGES, (0, "hi\n"), "full", 0),
        (BROKEN, (125, "error no"), "refused", 0),
        (OK, (125, "error no"), "full", 1),
        (BROKEN, (0, "hi\n"), "refused", 1),
        (BROKEN, (0, "hi\n"), "full", 1),
        ("Traceback", (0, "hi\n"), "full", 1),
        (OK, (0, "error: hi there\n"), "full", 1),
    ],
)
def test_what_doctor_says_must_be_what_then_happens(
    doctor: str, slot: tuple[int, str], outcome: Outcome, wrong: int, tmp_path: Path
) -> None:
    answers = {"doctor --json": (0, doctor), "exec": slot}
    assert len(tried(Row("it", outcome), answers, tmp_path).wrong) == wrong


def test_a_cure_is_run_as_it_stands_and_must_help(tmp_path: Path) -> None:
    answers = {"doctor --json": (2, BROKEN), "doctor --cure": (0, "sysctl it=1\n"), "exec": (125, "no")}
    trial = tried(Row("it", "refused", cured="full"), answers, tmp_path)
    assert trial.found["cure"] == "sysctl it=1"
    assert [wrong.partition(":")[0] for wrong in trial.wrong] == ["doctor, cured", "exec, cured"]


def test_rules_of_the_machine_are_taken_back_after_a_failure(tmp_path: Path) -> None:
    machine = Told({"doctor --json": (0, OK), "exec": (0, "hi\n")})
    hosts.Trial(machine, Row("it", "full", before="begin", after="end"), tmp_path / "log", frozenset()).run()  # type: ignore[arg-type]
    assert machine.commands[0] == "begin"
    assert machine.commands[-1] == "end"


def test_a_proof_that_did_not_hold_and_a_traceback_of_the_demo_are_wrong(tmp_path: Path) -> None:
    answers = {
        "doctor --json": (0, OK),
        "exec": (0, "hi\n"),
        "hosts.inside": (
            1,
            '{"check": "calls", "held": true, "seen": 1}\n{"check": "memory", "held": false, "seen": 2}\n',
        ),
        "make demo": (0, "Traceback (most recent call last):"),
        "pytest": (0, "3 passed in 1 s"),
    }
    trial = tried(
        Row("it", "full", long=frozenset({"proofs", "demo", "tests"})),
        answers,
        tmp_path,
        frozenset({"proofs", "demo", "tests"}),
    )
    assert trial.found["proofs"] == {"calls": True, "memory": False}
    assert trial.found["tests"] == "3 passed in 1 s"
    assert [wrong.partition(":")[0] for wrong in trial.wrong] == ["memory", "make demo"]
    assert "| bookworm | it | full | works |  |  | 1 of 2 |" in hosts.table({"bookworm": [trial]})


def test_rows_are_told_apart_and_are_of_guests_that_there_are() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(row.suites <= GUESTS.keys() for row in ROWS)
    assert agentenv(ROWS[0], "exec -- true").endswith("/.venv/bin/agentenv exec -- true")
