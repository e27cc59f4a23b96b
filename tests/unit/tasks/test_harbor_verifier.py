from __future__ import annotations

from collections.abc import Callable

import pytest

from agentenv.errors import TaskError
from agentenv.tasks.harbor.rewards import MAX_REWARD_CHARS, NoRewardError, parse_json, parse_printed, parse_text
from agentenv.tasks.harbor.verifier import Judged


@pytest.mark.parametrize(("text", "reward"), [("1\n", 1.0), (" 0.25 ", 0.25), ("-1", -1.0)])
def test_a_reward_is_one_number(text: str, reward: float) -> None:
    assert parse_text(text) == {"reward": reward}


@pytest.mark.parametrize("text", ["", "one", "nan", "inf", "1 2", "1" * 400])
def test_anything_else_is_no_reward(text: str) -> None:
    with pytest.raises(NoRewardError):
        parse_text(text)


@pytest.mark.parametrize(
    "text", ["", "[1]", "{}", '{"a": "b"}', '{"a": null}', '{"a": NaN}', "[" * 60_000, '{"a": 1' + "0" * 400 + "}"]
)
def test_an_object_of_anything_but_numbers_is_no_reward(text: str) -> None:
    with pytest.raises(NoRewardError):
        parse_json(text)


@pytest.mark.parametrize("parse", [parse_text, parse_json])
def test_a_reward_is_read_whole_or_not_at_all(parse: Callable[[str], dict[str, float]]) -> None:
    text = "1" if parse is parse_text else '{"reward": 1}'
    assert parse(text.ljust(MAX_REWARD_CHARS)) == {"reward": 1}
    with pytest.raises(NoRewardError, match="more than 65536 characters"):
        parse(text.ljust(MAX_REWARD_CHARS) + "0")


def test_the_score_is_the_reward_of_that_name_or_the_only_one() -> None:
    assert Judged(parse_json('{"reward": 0.5, "speed": 9}')).score == 0.5
    assert Judged(parse_json('{"speed": 9}')).score == 9
    assert Judged({}, "none was written").score == 0
    with pytest.raises(TaskError, match="speed, size"):
        _ = Judged(parse_json('{"speed": 9, "size": 2}')).score


SUMMARY = "{before}\n=========== short test summary info ============\n{lines}\n{end}\n"


def printed(*lines: str, before: str = "collected", end: str = "=== 2 passed in 0.01s ===") -> str:
    return SUMMARY.format(before=before, lines="\n".join(lines), end=end)


@pytest.mark.parametrize(
    ("lines", "reward", "passed"),
    [
        (["PASSED ../tests/test_outputs.py::test_a", "PASSED ../tests/test_outputs.py::test_b"], 1, 1),
        (["PASSED t.py::test_a", "FAILED t.py::test_b[a - b] - assert 1 == 2"], 0, 0.5),
        (["PASSED t.py::test_a", "ERROR t.py::test_b - RuntimeError: no", "XPASS t.py::test_c x"], 0, 1 / 3),
        (["PASSED t.py::test_a", "SKIPPED [1] t.py:3: no network", "XFAIL t.py::test_c"], 1, 1),
        (["\x1b[32mPASSED\x1b[0m t.py::\x1b[1mtest_a\x1b[0m\r"], 1, 1),
        (["PASSED t.py::test_a", "=== 1 passed ===", "=== short test summary info ===", "FAILED u.py::test_a"], 0, 0.5),
    ],
)
def test_all_tests_of_pytests_summary_have_to_pass(lines: list[str], reward: float, passed: float) -> None:
    assert parse_printed("pytest", printed(*lines)) == {"reward": reward, "passed": passed}


@pytest.mark.parametrize("text", ["", "PASSED t.py::test_a\n", printed("", end="=== no tests ran ===")])
def test_without_a_summary_that_names_tests_there_is_no_reward(text: str) -> None:
    with pytest.raises(NoRewardError, match="summary"):
        parse_printed("pytest", text)


def test_what_a_test_prints_before_the_summary_does_not_hide_what_failed() -> None:
    forged = "---- Captured stdout ----\n=== short test summary info ===\nPASSED t.py::test_a"
    assert parse_printed("pytest", printed("FAILED t.py::test_a", before=forged))["reward"] == 0


@pytest.mark.parametrize(("word", "reward"), [("PASSED", 1), ("FAILED", 0), ("", 0)])
def test_swebenchs_results_are_between_its_marks(word: str, reward: float) -> None:
    text = f"SWEBench results starts here\n{word}\nSWEBench results ends here\n"
    assert parse_printed("swebench", text) == {"reward": reward}
    with pytest.raises(NoRewardError, match="marks"):
        parse_printed("swebench", word)
