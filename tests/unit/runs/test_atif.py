"""Rollouts as trajectories of Harbor's format: by its rules, and with nothing left out."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from agentenv.agent.transcript import GroupRecord, Transcript
from agentenv.runs.atif import trajectory, write_trajectories
from tests import programs_played
from tests.browser import synthetic
from tests.golden.atif_cases import GOLDEN, failed, group, played, trajectories

TEXT, NUMBER, OBJECT, LIST = str, (int, float), dict, list
RULES: dict[str, dict[str, Any]] = {
    "trajectory": {
        "schema_version": TEXT, "session_id": TEXT, "trajectory_id": TEXT, "agent": OBJECT, "steps": LIST,
        "notes": TEXT, "final_metrics": OBJECT, "continued_trajectory_ref": TEXT, "extra": OBJECT,
        "subagent_trajectories": LIST,
    },
    "agent": {"name": TEXT, "version": TEXT, "model_name": TEXT, "tool_definitions": LIST, "extra": OBJECT},
    "step": {
        "step_id": int, "timestamp": TEXT, "source": TEXT, "model_name": TEXT, "reasoning_effort": (str, float),
        "message": TEXT, "reasoning_content": TEXT, "tool_calls": LIST, "observation": OBJECT, "metrics": OBJECT,
        "is_copied_context": bool, "llm_call_count": int, "extra": OBJECT,
    },
    "call": {"tool_call_id": TEXT, "function_name": TEXT, "arguments": OBJECT, "extra": OBJECT},
    "observation": {"results": LIST},
    "result": {"source_call_id": TEXT, "content": TEXT, "subagent_trajectory_ref": LIST, "extra": OBJECT},
    "metrics": {
        "prompt_tokens": int, "completion_tokens": int, "cached_tokens": int, "cost_usd": NUMBER,
        "prompt_token_ids": LIST, "completion_token_ids": LIST, "logprobs": LIST, "extra": OBJECT,
    },
    "final_metrics": {
        "total_prompt_tokens": int, "total_completion_tokens": int, "total_cached_tokens": int,
        "total_cost_usd": NUMBER, "total_steps": int, "extra": OBJECT,
    },
}  # fmt: skip
"""The fields of each object of ATIF 1.7, and their types; there may be no others. From Harbor's description of the
format (rfcs/0001-trajectory-format.md) and the models of harbor 0.26.0, which have read ``tests/golden/atif.json``."""
REQUIRED = {
    "trajectory": {"schema_version", "agent", "steps"},
    "agent": {"name", "version"},
    "step": {"step_id", "source", "message"},
    "call": {"tool_call_id", "function_name", "arguments"},
    "observation": {"results"},
}
OF_AGENTS = {"model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics"}


def check(kind: str, found: dict[str, Any]) -> None:
    assert REQUIRED.get(kind, set()) <= found.keys()
    for name, value in found.items():
        assert name in RULES[kind], f"{kind} has no field {name!r}"
        assert isinstance(value, RULES[kind][name]), f"{kind}.{name} is {value!r}"


def check_trajectory(found: dict[str, Any]) -> None:
    check("trajectory", found)
    assert found["schema_version"] == "ATIF-v1.7"
    check("agent", found["agent"])
    check("final_metrics", found["final_metrics"])
    assert [step["step_id"] for step in found["steps"]] == [*range(1, len(found["steps"]) + 1)]
    assert found["steps"]
    assert found["final_metrics"]["total_steps"] == len(found["steps"])
    others = found.get("subagent_trajectories", [])
    assert len({other["trajectory_id"] for other in others}) == len(others)
    for other in others:
        check_trajectory(other)
    for step in found["steps"]:
        check("step", step)
        datetime.fromisoformat(step["timestamp"])
        assert step["source"] in ("system", "user", "agent")
        assert step["source"] == "agent" or not OF_AGENTS & step.keys()
        check("metrics", step.get("metrics", {}))
        for call in step.get("tool_calls", []):
            check("call", call)
        ids = {call["tool_call_id"] for call in step.get("tool_calls", [])}
        if "observation" in step:
            check("observation", step["observation"])
            for result in step["observation"]["results"]:
                check("result", result)
                assert result.get("source_call_id") in {None, *ids}
    json.loads(json.dumps(found, allow_nan=False).encode())


def test_the_trajectories_are_those_that_harbor_has_read() -> None:
    assert trajectories() == json.loads(GOLDEN.read_text())


def test_every_sort_of_rollout_follows_the_rules() -> None:
    records = [*synthetic.few(), *synthetic.many(40), group(), programs_played.group()]
    for record in records:
        for member in record.trajectories:
            check_trajectory(trajectory(member, record))
            check_trajectory(trajectory(member))


def test_a_rollout_that_never_began_has_its_error_for_a_step() -> None:
    (step,) = trajectory(failed())["steps"]
    assert step["source"] == "system"
    assert step["message"] == "AcquireTimeoutError: no slot became free in 30 s"


def test_tokens_belong_to_their_turns_and_are_kept_whole_where_they_do_not() -> None:
    member = played()
    turns = [step["metrics"] for step in trajectory(member)["steps"] if step["source"] == "agent"]
    assert [turn["completion_token_ids"] for turn in turns] == [[7, 8], [9], [10]]
    assert [len(turn["prompt_token_ids"]) for turn in turns] == [3, 7, 9]
    assert turns[0]["logprobs"] == [-0.5, -0.5]
    member.steps.pop()
    found = trajectory(member)
    assert all("completion_token_ids" not in step.get("metrics", {}) for step in found["steps"])
    assert found["extra"]["token_sequences"][0]["tokens"] == played().token_sequences[0].tokens


def leaves(value: Any) -> set[str]:
    """Every text and number in a document, but for lists of tokens."""
    if isinstance(value, dict):
        return {leaf for entry in value.values() for leaf in leaves(entry)}
    if isinstance(value, list):
        return {leaf for entry in value for leaf in leaves(entry)}
    return {repr(value)} if isinstance(value, (str, float)) and value not in ("", 0.0) else set()


def said(member: Transcript) -> dict[str, Any]:
    """All of it but defaults, roles, and the answers to calls, whose records have the whole text."""
    document = member.model_dump(mode="json", exclude_defaults=True)
    texts = [message.get("content") for message in document.get("messages", []) if message["role"] != "tool"]
    conversations = document.get("program", {}).get("conversations", [])
    answers = [step["message"] for step in document.get("steps", [])]
    for message in [*answers, *(each for one in conversations for each in one.get("messages", []))]:
        del message["role"]
    return {**document, "messages": texts}


def test_nothing_of_a_record_is_lost() -> None:
    by_programs = programs_played.group().trajectories
    for member in (played(), failed(), *by_programs, *(m for g in synthetic.few()[:4] for m in g.trajectories)):
        assert leaves(said(member)) <= leaves(trajectory(member))


def test_messages_that_no_turn_accounts_for_are_kept() -> None:
    member = played()
    member.messages.append({"role": "user", "content": "more"})
    assert trajectory(member)["extra"]["messages"] == [{"role": "user", "content": "more"}]


def test_other_conversations_of_a_program_are_sub_agents() -> None:
    found = trajectory(programs_played.with_tokens(), programs_played.group())
    title, sub = found["subagent_trajectories"]
    assert (found["agent"]["name"], found["agent"]["extra"]["environment"]) == ("small-agent", "repair")
    assert [step["source"] for step in found["steps"]] == ["system", "user", *["agent"] * 4]
    assert [step.get("llm_call_count") for step in found["steps"]] == [None, None, 0, 1, 1, 1], "it wrote one itself"
    assert found["steps"][3]["observation"] == {"results": [{"source_call_id": "call_1_0", "content": "setup.py"}]}
    assert (title["extra"], sub["extra"]) == (
        {"conversation": 0, "behind": None, "trained": False},
        {"conversation": 2, "behind": 1, "trained": True},
    )
    copied = [step for step in sub["steps"] if step.get("is_copied_context")]
    assert [step["message"] for step in copied] == [step["message"] for step in found["steps"][:4]]
    assert copied[3]["observation"]["results"][0]["content"] == "README", "what it was shown, not the other"
    assert "metrics" not in copied[3]
    assert (found["final_metrics"]["total_prompt_tokens"], sub["final_metrics"]["total_prompt_tokens"]) == (150, 40)
    assert "messages" not in found["extra"]["program"]["conversations"][2], "each is written once"


def test_tokens_of_a_program_belong_to_their_turns() -> None:
    found = trajectory(programs_played.with_tokens())
    title, sub = found["subagent_trajectories"]
    turns = [step["metrics"] for step in found["steps"] if step.get("llm_call_count")]
    assert [turn["completion_token_ids"] for turn in turns] == [[11, 12], [21, 22], [41, 42]]
    assert [len(turn["prompt_token_ids"]) for turn in turns] == [3, 6, 9]
    assert sub["steps"][-1]["metrics"]["completion_token_ids"] == [31, 32]
    assert "completion_token_ids" not in title["steps"][-1]["metrics"], "it is not trained on"
    assert "token_sequences" not in found["extra"]
    odd = programs_played.with_tokens()
    assert odd.steps[3].usage is not None
    odd.steps[3].usage["completion_tokens"] = 3
    found = trajectory(odd)
    assert [rest["first_step"] for rest in found["extra"]["token_sequences"]] == [3], "of that conversation alone"
    assert "completion_token_ids" in found["steps"][-1]["metrics"]


def test_odd_messages_of_programs_are_kept_within_the_format() -> None:
    """An edited answer with a call, an output of a call that nobody made, roles that the format does not have."""
    member = programs_played.several()
    edited = {**programs_played.answer("Edited.", ("call_9_0", "rm")), "name": "me"}
    outputs = [programs_played.shown("call_9_0", "gone"), programs_played.shown("call_8_0", "whose?")]
    member.messages[2:3] = [
        programs_played.shown("call_7_0", "before all"),
        {"role": "odd", "content": "?"},
        edited,
        *outputs,
    ]
    found = trajectory(member)
    check_trajectory(found)
    tool, odd, written = found["steps"][2:5]
    assert (tool["source"], tool["extra"]["message"]["tool_call_id"]) == ("user", "call_7_0")
    assert (odd["source"], odd["extra"]["message"]) == ("user", {"role": "odd"})
    assert (written["tool_calls"][0]["tool_call_id"], written["extra"]["message"]) == ("call_9_0", {"name": "me"})
    known, unknown = written["observation"]["results"]
    assert (known["source_call_id"], known["content"]) == ("call_9_0", "gone")
    assert (unknown.get("source_call_id"), unknown["extra"]["message"]["tool_call_id"]) == (None, "call_8_0")


def test_each_rollout_is_a_file_whatever_its_name(tmp_path: Path) -> None:
    odd = played().model_copy(update={"trajectory": "../../etc/x"})
    twice = [group(), GroupRecord(**{**dict(group()), "trajectories": [odd, odd]})]
    assert write_trajectories(twice, tmp_path / "new" / "atif") == 4
    names = sorted(path.name for path in (tmp_path / "new" / "atif").iterdir())
    assert names == ["_.._etc_x.2.json", "_.._etc_x.json", "item-1-0a1b2c3d-0.json", "item-1-0a1b2c3d-1.json"]
    for path in (tmp_path / "new" / "atif").iterdir():
        check_trajectory(json.loads(path.read_text()))
