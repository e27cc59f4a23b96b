from __future__ import annotations

import pytest

from agentenv.errors import TaskError
from examples.harbor import verifier
from examples.harbor.verifier import Judged, parse_json, parse_text


@pytest.mark.parametrize(("text", "reward"), [("1\n", 1.0), (" 0.25 ", 0.25), ("-1", -1.0)])
def test_a_reward_is_one_number(text: str, reward: float) -> None:
    assert parse_text(text) == {"reward": reward}


@pytest.mark.parametrize("text", ["", "one", "nan", "inf", "1 2", "1" * 400])
def test_anything_else_is_no_reward(text: str) -> None:
    with pytest.raises(verifier.NoRewardError):
        parse_text(text)


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"a": "b"}', '{"a": true}', '{"a": NaN}', "[" * 100_000])
def test_an_object_of_anything_but_numbers_is_no_reward(text: str) -> None:
    with pytest.raises(verifier.NoRewardError):
        parse_json(text)


def test_the_score_is_the_reward_of_that_name_or_the_only_one() -> None:
    assert Judged(parse_json('{"reward": 0.5, "speed": 9}')).score == 0.5
    assert Judged(parse_json('{"speed": 9}')).score == 9
    assert Judged({}, "none was written").score == 0
    with pytest.raises(TaskError, match="speed, size"):
        _ = Judged(parse_json('{"speed": 9, "size": 2}')).score
