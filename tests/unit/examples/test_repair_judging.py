"""Reading the judge's answer: only a whole one, with the nonce and true control tests, is a verdict."""

from __future__ import annotations

import json
from typing import Any

import pytest

from examples.repair import judging
from examples.repair.judging import Canary, Verdict, VoidVerdictError
from examples.repair.verify import Found, repaired_share
from tests.unit.examples.repair_sample import task

NONCE = "n" * 32


def answer(outcomes: dict[str, str], nonce: str = NONCE, **changed: Any) -> str:
    found = {"outcomes": outcomes, "finished": True, "timed_out": False, "exit_code": 0, "duration_s": 1.0, **changed}
    return f"noise\n{nonce} {json.dumps(found)}\n"


def test_a_whole_answer_is_a_verdict_without_its_control_tests() -> None:
    canary = Canary.draw()
    verdict = judging.read(answer({"a": "passed", "b": "error", **canary.expected}), NONCE, canary)
    assert verdict.outcomes == {"a": "passed", "b": "error"}
    assert verdict.broken == {"b"}
    assert verdict.passed == {"a"}


@pytest.mark.parametrize(
    "stdout",
    [
        "",
        answer({}, nonce="x" * 32),
        answer({}) + answer({}),
        answer({}, timed_out=True),
        answer({}, finished=False),
        f"{NONCE} not json",
        answer({})[:-20],
    ],
)
def test_anything_else_is_void(stdout: str) -> None:
    with pytest.raises(VoidVerdictError):
        judging.read(stdout, NONCE)


def test_control_tests_have_both_outcomes_and_expose_a_runner_that_lies() -> None:
    canary = Canary.draw()
    assert set(canary.expected.values()) == {"passed", "failed"}
    for lie in ("passed", "failed", None):
        outcomes = {test: lie for test in canary.expected if lie}
        with pytest.raises(VoidVerdictError, match="control tests"):
            judging.read(answer(outcomes), NONCE, canary)
    assert Canary.draw().file != canary.file


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
    assert bool(Found(verdict, "", "").told(wanted).get("reason")) == (score < 1)


def test_no_verdict_is_zero_with_the_reason() -> None:
    wanted = task("clamp")
    assert repaired_share(wanted, None) == 0.0
    told = Found(None, "score 0: cut short", "").told(wanted)
    assert told["reason"] == "score 0: cut short"
    assert told["repaired"] == "0 of 1 broken tests"


def test_a_test_that_is_gone_is_not_repaired() -> None:
    wanted = task("clamp")
    assert repaired_share(wanted, Verdict({OTHER: "passed"}, 1.0)) == 0.0
    assert repaired_share(wanted, Verdict({wanted.broken[0]: "passed"}, 1.0)) == 0.0
