"""Which turn wrote which message, whatever a program puts beside them; and records as they were before programs."""

from __future__ import annotations

import json

from agentenv.agent.conversations import conversations_of, main_steps
from agentenv.agent.transcript import Transcript
from tests import programs_played
from tests.browser import synthetic


def roles(played: Transcript) -> list[list[tuple[str, int | None]]]:
    return [
        [(message["role"], None if step is None else step.index) for message, step in one.said]
        for one in conversations_of(played)
    ]


def test_every_message_of_a_program_has_the_turn_that_wrote_it() -> None:
    title, main, sub = roles(programs_played.several())
    begin = [("system", None), ("user", None), ("assistant", None), ("assistant", 1), ("tool", None)]
    assert title == [("user", None), ("assistant", 0)]
    assert main == [*begin, ("assistant", 2), ("tool", None), ("assistant", 4)]
    assert sub == [*begin, ("user", None), ("assistant", 3)]


def test_a_conversation_knows_its_own_turns_and_what_it_shares() -> None:
    played = programs_played.several()
    title, main, sub = conversations_of(played)
    assert [one.is_main for one in (title, main, sub)] == [False, True, False]
    assert [[step.index for step in one.steps] for one in (title, main, sub)] == [[0], [1, 2, 4], [3]]
    assert (title.shared, main.shared, sub.shared) == (0, 0, 4)
    assert [step.index for step in main_steps(played)] == [1, 2, 4]


def test_the_built_in_loop_has_one_conversation_with_every_turn() -> None:
    played = synthetic.transcript("t", score=1.0, commands=["ls", "pwd"])
    (only,) = conversations_of(played)
    assert only.is_main
    assert only.steps == main_steps(played) == played.steps
    assert [step.index for _, step in only.said if step is not None] == [0, 1]
    (empty,) = conversations_of(Transcript(trajectory="t", item_id="i", began_unix_s=0.0))
    assert (empty.said, empty.steps, empty.shared) == ([], [], 0)


def test_records_of_a_program_are_read_back_and_others_have_no_field_for_it() -> None:
    for record in [programs_played.group(), *synthetic.few()[:4]]:
        assert type(record).model_validate_json(record.model_dump_json()) == record
    document = json.loads(programs_played.several().model_dump_json())
    assert [step.get("after") for step in document["steps"]] == [None, None, 1, 1, 2]
    plain = synthetic.few()[0].trajectories[0].model_dump()
    assert "program" not in plain
    assert not {"conversation", "after", "dialect"} & plain["steps"][0].keys()


def test_turns_that_contradict_each_other_are_read_too() -> None:
    """A line is walked backwards only, so that no record of whatever origin keeps a reader from its end."""
    played = programs_played.several()
    played.steps[4].after, played.steps[2].after = 4, 99
    assert [step.index for _, step in conversations_of(played)[1].said if step] == [4]
