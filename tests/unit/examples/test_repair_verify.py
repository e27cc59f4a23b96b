"""The score of a repair."""

from __future__ import annotations

import pytest

from agentenv.tasks.judging import Verdict
from examples.repair.verify import Found, repaired_share
from tests.unit.examples.repair_sample import task

OTHER = "test_sample.py::test_other"


@pytest.mark.parametrize(
    ("clamp", "count", "other", "score"),
    [
        ("passed", "passed", "passed", 1.0),
        ("passed", "failed", "passed", 0.5),
        ("failed", "failed", "passed", 0.0),
        ("passed", "passed", "failed", 0.0),
        ("passed", "passed", "skipped", 0.0),
        ("passed", "skipped", "passed", 0.5),
    ],
)
def test_the_score_is_the_repaired_share_unless_another_test_breaks(
    clamp: str, count: str, other: str, score: float
) -> None:
    wanted = task("clamp", "count")
    outcomes = {wanted.broken[0]: clamp, wanted.broken[1]: count, OTHER: other}
    verdict = Verdict(outcomes, 1.0)
    assert repaired_share(wanted, verdict) == score
    assert bool(Found(verdict, "", "").details(wanted).get("reason")) == (score < 1)


def test_no_verdict_is_zero_with_the_reason() -> None:
    wanted = task("clamp")
    assert repaired_share(wanted, None) == 0.0
    told = Found(None, "score 0: cut short", "").details(wanted)
    assert told["reason"] == "score 0: cut short"
    assert told["repaired"] == "0 of 1 broken tests"


def test_a_test_that_is_gone_is_not_repaired() -> None:
    wanted = task("clamp")
    assert repaired_share(wanted, Verdict({OTHER: "passed"}, 1.0)) == 0.0
    assert repaired_share(wanted, Verdict({wanted.broken[0]: "passed"}, 1.0)) == 0.0
