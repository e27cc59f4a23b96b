"""Reading the judge's answer: only a whole one, with the nonce and true control tests, is a verdict."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentenv.tasks import judging
from agentenv.tasks.judging import Canary, VoidVerdictError

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
