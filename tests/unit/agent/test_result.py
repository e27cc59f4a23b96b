from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from agentenv.agent.result import AgentResult, ToolError
from agentenv.agent.settings import AgentSettings
from agentenv.agent.tool_call import ToolCall, ToolResult, one_shot
from agentenv.agent.transcript import Step, ToolRecord
from agentenv.errors import ConfigError
from agentenv.wire.calls import CallResult


def called(tool: str, **result: object) -> ToolRecord:
    outcome = CallResult(id="c", **result)
    return ToolRecord(call_id="c", tool=tool, arguments={"a": 1}, started_s=0, ended_s=1, result=outcome, shown="seen")


def step(index: int, *calls: ToolRecord, reasoning: str = "") -> Step:
    ends = {"model_started_s": 0.0, "model_ended_s": 1.0}
    return Step(index=index, message={}, tool_calls=list(calls), reasoning=reasoning, **ends)


RESULT = AgentResult(
    messages=[],
    steps=[
        step(0, called("bash", exit_code=0, stdout="a\n", stderr="b"), called("bash", exit_code=2), reasoning="hm"),
        step(1, called("read_file", content={"text": "whole", "mode": 420}), called("", fault="model", message="none")),
        step(2, called("bash", timed_out=True, duration_s=7.2), called("bash", fault="model", message="bad")),
        step(3),
    ],
    final_response="fin",
)


def test_a_run_is_counted() -> None:
    assert (RESULT.num_steps, RESULT.turns_used, RESULT.total_tool_calls) == (4, 4, 5)
    assert (RESULT.success, RESULT.finished_naturally, RESULT.error) == (True, True, None)
    assert RESULT.reasoning_per_turn == ["hm", None, None, None]


def test_a_run_unpacks() -> None:
    final, debug = RESULT
    assert (final, debug) == ("fin", {"success": True, "error": None, "tool_calls": 5})


@pytest.mark.parametrize(("reason", "steps", "error"), [("max_steps", 1, "max_steps"), ("stop", 0, "no turn")])
def test_a_run_that_was_cut_short_is_no_success(reason: str, steps: int, error: str) -> None:
    result = AgentResult(messages=[], steps=[step(0)] * steps, finish_reason=reason)  # type: ignore[arg-type]
    assert (result.success, result.error) == (False, error)


def test_results_of_a_step() -> None:
    good, bad = RESULT.steps[0].tool_results
    assert good == ToolResult(True, "a\nb", "", {"exit_code": 0, "timed_out": False}, "c")
    assert (bad.success, bad.error) == (False, "exit code 2")
    assert [result.error for result in RESULT.steps[2].tool_results] == ["timed out after 7 s", "bad"]
    assert RESULT.steps[1].tool_results[0].output == "whole"


@pytest.mark.parametrize(
    ("content", "printed", "output"),
    [
        ({"session": "default", "state": "idle", "cwd": "/workspace"}, "", ""),
        ({"session": "default", "state": "idle", "cwd": "/workspace"}, "text", "text"),
        ({"session": None, "sessions": []}, "", '{"session": null, "sessions": []}'),
        ({"text": "whole", "mode": 420}, "", "whole"),
        ({"matches": []}, "", '{"matches": []}'),
        (None, "", ""),
    ],
)
def test_a_command_that_prints_nothing_has_no_output(content: object, printed: str, output: str) -> None:
    assert CallResult(id="c", content=content, stdout=printed).output == output


def test_what_verifiers_of_other_harnesses_read_of_calls() -> None:
    assert {c.name for s in RESULT.steps for c in s.tool_calls} == {"bash", "read_file", ""}
    pairs = [pair for s in RESULT.steps for pair in zip(s.tool_calls, s.tool_results, strict=True)]
    assert [(c.name, c.uniq_id, r.success) for c, r in pairs[:2]] == [("bash", "c", True), ("bash", "c", False)]
    assert [s.step_number for s in RESULT.steps] == [1, 2, 3, 4]
    assert [s.has_tool_calls for s in RESULT.steps] == [True, True, True, False]
    assert not step(0, called("", fault="model", message="none")).has_tool_calls


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ({"message": {"content": "a"}}, "a"),
        ({"message": {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}}, "ab"),
        ({"message": {"content": "a"}, "raw": "a<tool_call>{}</tool_call>"}, "a<tool_call>{}</tool_call>"),
        ({"message": {"content": None}, "reasoning": "hm"}, "hm"),
        ({"message": {}}, ""),
    ],
)
def test_the_text_of_a_turn(written: dict[str, Any], text: str) -> None:
    assert step(0).model_copy(update=written).assistant_message == text


def test_a_run_as_messages_of_text() -> None:
    turns = [step(0, called("bash", stdout="1"), called("bash", stdout="2")), step(1)]
    turns = [turn.model_copy(update={"message": {"content": f"turn {turn.index}"}}) for turn in turns]
    first, results, last = AgentResult(messages=[], steps=turns).to_messages()
    assert (first, last) == (
        {"role": "assistant", "content": "turn 0"},
        {"role": "assistant", "content": "turn 1"},
    )
    assert results["role"] == "user"
    assert results["content"] == "\n".join(result.to_xml() for result in turns[0].tool_results)


def test_a_working_directory_of_other_harnesses_is_refused_by_name() -> None:
    assert replace(AgentSettings(working_dir=None), max_steps=3).max_steps == 3
    with pytest.raises(ConfigError, match=r"working_dir: '/repo' is not supported: .*/workspace .*cwd"):
        AgentSettings(working_dir="/repo")


def test_errors_say_what_failed_and_where() -> None:
    assert [(error.turn, error.tool_name, error.error) for error in RESULT.tool_errors] == [
        (0, "bash", "exit code 2"),
        (1, "", "none"),
        (2, "bash", "timed out after 7 s"),
        (2, "bash", "bad"),
    ]
    assert RESULT.tool_errors[0] == ToolError(0, "bash", '{"a": 1}', "exit code 2", "seen")


def test_content_without_text_is_json() -> None:
    assert json.loads(CallResult(id="c", content={"entries": []}).output) == {"entries": []}


def test_a_result_as_a_model_is_shown_it() -> None:
    shown = ToolResult(False, "out", "exit code 1", {}, "u").to_xml()
    assert shown.startswith("<tool_response>")
    assert json.loads(shown[len("<tool_response>") : -len("</tool_response>")]) == {
        "success": False,
        "output": "out",
        "uniq_id": "u",
        "error": "exit code 1",
    }


@pytest.mark.parametrize(
    ("call", "made"),
    [
        (ToolCall("terminal", {"command": "ls", "timeout": 9}), ("bash", {"command": "ls"}, 9)),
        (ToolCall("terminal", {"command": "ls", "workdir": "a"}), ("bash", {"command": "ls", "cwd": "a"}, None)),
        (ToolCall("bash", {"command": "ls"}), ("bash", {"command": "ls"}, None)),
        (
            ToolCall("terminal", {"command": "ls", "background": True}),
            ("terminal", {"command": "ls", "background": True}, None),
        ),
        (
            ToolCall("terminal", {"command": "ls", "background": False, "timeout": None}),
            ("bash", {"command": "ls"}, None),
        ),
        (
            ToolCall("terminal_stateful", {"command": "ls", "timeout": 9}),
            ("terminal", {"command": "ls", "timeout": 9}, None),
        ),
        (ToolCall("read_file", {"path": "a"}), ("read_file", {"path": "a"}, None)),
        (ToolCall("write_file", {"path": "a", "timeout": 9}), ("write_file", {"path": "a"}, 9)),
    ],
)
def test_a_plain_command_runs_in_a_new_shell(call: ToolCall, made: tuple[str, dict[str, object], float | None]) -> None:
    assert one_shot(call) == made
