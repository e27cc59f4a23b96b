"""What the page has of rollouts that agent programs played."""

from __future__ import annotations

import pytest

from agentenv.report.page import render
from agentenv.report.shaping import bars, group_row, text_cap, trajectory_body
from agentenv.report.summary import summarise
from tests import programs_played
from tests.browser import synthetic


def test_every_conversation_is_on_the_page_with_its_place_and_its_turns() -> None:
    body = trajectory_body(programs_played.several(), 1000)
    title, main, sub = body["conversations"]
    assert [(one["main"], one["trained"], one["tools"], one["steps"]) for one in (title, main, sub)] == [
        (False, False, [], 1),
        (True, True, ["bash"], 3),
        (False, True, ["bash"], 1),
    ]
    assert "behind" not in main
    assert (sub["behind"], sub["of"]) == (1, 1)
    assert [turn["text"] for turn in sub["before"]] == [
        "You are a small agent.",
        "Repair the package.",
        "I am ready.",
        "I look.",
    ]
    assert [turn["text"] for turn in sub["turns"]] == ["How old is it?", "It is old."]
    assert [turn.get("index") for turn in main["turns"]] == [None, None, None, 1, 2, 4]
    assert [turn.get("own") for turn in main["turns"]][:3] == [None, None, True], "a program wrote it"
    assert (title["turns"][1]["dialect"], main["turns"][3]["dialect"]) == ("messages", "chat")
    assert body["turns"] == []


def test_a_call_that_a_program_ran_is_not_lost_and_has_a_bound_for_its_time() -> None:
    body = trajectory_body(programs_played.several(), 1000)
    _, main, sub = body["conversations"]
    (listed,), (asked,) = main["turns"][3]["calls"], sub["turns"][1]["calls"]
    (again,) = sub["before"][3]["calls"]
    assert (listed["back"], listed["within"], listed["shown"]) == (True, 0.75, "setup.py")
    assert (again["back"], again.get("within"), again["shown"]) == (True, None, "README"), "it was shown something else"
    assert (asked["back"], asked.get("within"), asked["shown"]) == (False, None, "")
    assert not {"lost", "took"} & listed.keys()


def test_outputs_of_calls_in_an_answer_that_the_program_edited_are_messages() -> None:
    """Even if a turn of the same conversation has a call of the same name."""
    played = programs_played.several()
    edited = programs_played.answer("Edited.", ("call_2_0", "rm"))
    played.messages[2:3] = [edited, programs_played.shown("call_2_0", "gone")]
    main = trajectory_body(played, 1000)["conversations"][1]
    said = [(turn["role"], turn["text"]) for turn in main["turns"]]
    assert said[2:4] == [("assistant", "Edited."), ("tool", "gone")]
    assert [call["shown"] for turn in main["turns"] for call in turn.get("calls", ())] == ["setup.py", "exit code 0"]


def test_what_a_program_printed_and_was_refused_is_said() -> None:
    about = trajectory_body(programs_played.several(), 1000)["program"]
    assert about["out"] == {"text": "begin of output\nend of output\n", "dropped": 3_000_000, "length": 30}
    facts = dict(about["facts"])
    assert facts["exit code"] == "0"
    assert facts["settings overruled"] == "temperature"
    assert facts["dropped from requests"] == "5 × tools[].cache_control\n2 × messages[].content[].image"
    assert facts["refused requests"] == "messages[3]: pictures are not taken"
    assert facts["asked in"] == "messages × 1, chat × 4"
    ended = trajectory_body(programs_played.ended(), 1000)["program"]
    assert dict(ended["facts"]) == {"exit code": "none: it was ended", "asked in": "chat × 1"}
    assert (ended["out"], ended["err"]) == (None, None)


def test_a_program_s_own_time_is_one_bar_per_pause_whatever_it_called_there() -> None:
    own = [bar for bar in bars(programs_played.several()) if bar[0] == "program"]
    assert own == [("program", "bash ls", 1.75, 2.5), ("program", "bash patch", 2.75, 4.5)]
    assert not [bar for bar in bars(programs_played.failed()) if bar[0] == "lost"]


def test_the_summary_has_programs_and_dialects_and_no_latency_of_their_calls() -> None:
    found = summarise([programs_played.group()])
    assert found["programs"]["small-agent"] == {
        "rollouts": 3, "failed": 1, "conversations": 5, "dropped": 7, "refused": 1,
    }  # fmt: skip
    assert found["dialects"]["chat"] == {"turns": 6, "prompt_tokens": 160, "completion_tokens": 12}
    assert (found["calls"], found["unobserved"]) == (5, 5)
    assert {row["name"] for row in found["latencies"]} == {
        "Waiting for a slot",
        "Model turns",
        "Agent programs between turns",
    }
    assert sum(part["share"] for part in found["time"]) == pytest.approx(1.0)
    page = "".join(render([programs_played.group()], title="t"))
    assert "<figcaption>Agent programs" in page
    assert "run by agent programs" in page


def test_marks_of_a_rollout() -> None:
    rows = group_row(programs_played.group(), 0, 1000)["members"]
    assert [(row["exit"], row["conversations"], row["callFaults"]) for row in rows] == [
        (0, 3, 0),
        (7, 1, 0),
        (None, 1, 0),
    ]


def test_the_built_in_loop_s_page_has_nothing_of_programs() -> None:
    page = "".join(render(synthetic.few(), title="t"))
    assert "<figcaption>Agent programs" not in page
    assert "run by agent programs" not in page
    played = synthetic.transcript("t", score=1.0, commands=["ls"])
    body = trajectory_body(played, 1000)
    assert not {"program", "conversations"} & body.keys()
    assert [turn["role"] for turn in body["turns"]] == ["system", "user", "assistant", "assistant"]
    assert not {"dialect", "own"} & body["turns"][2].keys()
    assert body["turns"][2]["calls"][0]["took"] > 0
    assert not {"exit", "conversations"} & group_row(synthetic.group("g", [played]), 0, 1000)["members"][0].keys()


def test_messages_of_conversations_count_for_the_page_s_size() -> None:
    long = programs_played.several()
    assert long.program is not None
    long.program.conversations[2].messages *= 400
    assert text_cap([synthetic.group("g", [long])]) < text_cap([synthetic.group("g", [programs_played.several()])])
