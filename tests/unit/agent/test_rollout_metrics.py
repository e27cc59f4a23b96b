from __future__ import annotations

import gc
import weakref
from collections import deque

import pytest

from agentenv.agent.rollout_metrics import (
    KEPT_VALUES,
    TIMES,
    RolloutMetrics,
    ToolErrors,
    conversation,
    percentile,
    readable,
    rollout_row,
)
from agentenv.agent.transcript import SequenceSummary, Shortening, Step, ToolRecord, Transcript
from agentenv.wire.calls import CallResult
from tests import programs_played


def call(latency_s: float, tool: str = "bash", **result: object) -> ToolRecord:
    made = CallResult(id="c", **result)
    return ToolRecord(call_id="c", tool=tool, arguments={}, started_s=1.0, ended_s=1.0 + latency_s, result=made)


def transcript(*calls: ToolRecord, **more: object) -> Transcript:
    step = Step(index=0, model_started_s=0, model_ended_s=1, message={}, tool_calls=list(calls))
    given = {"trajectory": "t-0", "item_id": "i", "began_unix_s": 0.0, "steps": [step], **more}
    return Transcript(**given)


def test_percentiles_are_values_that_occurred() -> None:
    assert [percentile([3.0, 1.0, 2.0, 4.0], percent) for percent in (0, 50, 95, 100)] == [1.0, 2.0, 4.0, 4.0]
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_a_group_s_numbers() -> None:
    metrics = RolloutMetrics()
    scored = transcript(
        call(0.1, exit_code=0), call(0.3, exit_code=1), call(0.2, timed_out=True), call(9.0, tool="", fault="model"),
        score=1.0, totals={"slot_wait_s": 2.0, "model_s": 3.0, "total_s": 9.0},
        sequences=[SequenceSummary(first_step=n, tokens=9, trained=trained) for n, trained in ((0, 4), (2, 2))],
        shortenings=[Shortening(step=2, outputs=1, bytes_removed=9)],
    )  # fmt: skip
    scored.steps[0].outcome = "truncated"
    metrics.add(3, [scored, transcript(fault="infra", finish_reason="fault")])
    found = metrics.drain()
    assert found["group_completeness"] == pytest.approx(1 / 3)
    assert (found["tool_calls"], found["tool_error_rate"], found["tool_timeout_rate"]) == (4, 0.75, 0.25)
    assert (found["call_fault_model_rate"], found["call_fault_policy_rate"]) == (0.25, 0.0)
    assert found["tool_latency_s_p50"] == pytest.approx(0.2), "an unreadable call took no tool's time"
    assert (found["slot_wait_s_mean"], found["slot_wait_s_p95"]) == (1.0, 2.0)
    assert (found["turn_truncated_rate"], found["turn_malformed_rate"], found["shortenings"]) == (0.5, 0.0, 1)
    assert (found["finish_stop_rate"], found["rollout_fault_infra_rate"]) == (0.5, 0.5)
    assert (found["sequences_per_rollout"], found["trained_tokens_per_rollout"]) == (1.0, 3.0)
    assert found["score_mean"] == 1.0
    assert metrics.drain() == {}


@pytest.mark.parametrize("tool", ["terminal", "process", "tmux"])
def test_a_wait_in_a_session_is_no_timeout_and_no_error(tool: str) -> None:
    metrics = RolloutMetrics()
    metrics.add(1, [transcript(call(0.1, tool, timed_out=True), call(0.1, tool, exit_code=2))])
    found = metrics.drain()
    assert (found["tool_timeout_rate"], found["tool_error_rate"]) == (0.0, 0.5)


def test_a_program_s_numbers_are_its_own_and_its_calls_are_neither_errors_nor_timed() -> None:
    metrics, errors = RolloutMetrics(), ToolErrors()
    played = [programs_played.several(), programs_played.failed(), programs_played.ended()]
    metrics.add(3, played)
    errors.add(played)
    found = metrics.drain()
    of_programs = {name: value for name, value in found.items() if name.startswith("program_") or "_chat_" in name}
    assert of_programs == pytest.approx(
        {
            "program_conversations_per_rollout": 5 / 3,
            "program_dropped_per_rollout": 7 / 3,
            "program_failed_rate": 1 / 3,
            "program_refused_per_rollout": 1 / 3,
            "turns_chat_per_rollout": 2.0,
            "prompt_tokens_chat_per_rollout": (20 + 30 + 40 + 50 + 10 + 10) / 3,
            "completion_tokens_chat_per_rollout": 4.0,
        }
    )
    assert found["turns_messages_per_rollout"] == pytest.approx(1 / 3)
    assert found["turns_per_rollout"] == pytest.approx(7 / 3)
    assert found["tool_calls"] == 5
    assert not {"tool_error_rate", "tool_latency_s_mean", "call_fault_model_rate"} & found.keys()
    assert errors.drain() == {"tool_errors_count": 0}
    metrics.add(2, [programs_played.failed(), transcript(call(0.1, exit_code=1), call(0.1, exit_code=0))])
    mixed = metrics.drain()
    assert (mixed["program_failed_rate"], mixed["finish_program_failed_rate"]) == (1.0, 0.5), "of programs, of all"
    assert (mixed["tool_calls"], mixed["tool_error_rate"]) == (3, 0.5)
    metrics.add(1, [transcript(call(0.1))])
    assert not any("program" in name for name in metrics.drain())


def test_a_group_without_a_call_or_a_score_has_numbers_too() -> None:
    metrics = RolloutMetrics()
    metrics.add(1, [transcript(steps=[])])
    found = metrics.drain()
    assert (found["tool_calls"], found["turns_per_rollout"]) == (0, 0)
    assert "score_mean" not in found


def test_nothing_of_a_transcript_is_kept_and_the_numbers_are_bounded() -> None:
    metrics = RolloutMetrics()
    forgotten = transcript(call(1.0), messages=[{"role": "user", "content": "x"}], score=1.0)
    gone = weakref.ref(forgotten)
    metrics.add(1, [forgotten])
    del forgotten
    gc.collect()
    assert gone() is None
    one = transcript(*(call(2.0) for _ in range(10)), score=0.0, totals={"total_s": 5.0})
    for _ in range(KEPT_VALUES + 5):
        metrics.add(1, [one])
    full = kept_values(metrics)
    assert full == KEPT_VALUES * (len(TIMES) + 3)  # completeness, scores, latencies of calls
    metrics.add(50, [one] * 50)
    assert kept_values(metrics) == full
    found = metrics.drain()
    assert found["tool_calls"] == (KEPT_VALUES + 55) * 10 + 1
    assert found["score_mean"] == pytest.approx(1 / (KEPT_VALUES + 56))
    assert found["tool_latency_s_p95"] == 2.0
    assert kept_values(metrics) == 0


def kept_values(metrics: RolloutMetrics) -> int:
    """The lengths of all that can grow below it."""
    seen: set[int] = set()
    waiting: list[object] = [vars(metrics)]
    total = 0
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        assert not isinstance(one, Transcript | ToolRecord | CallResult)
        total += len(one) if isinstance(one, (deque, list, tuple)) else 0
        waiting.extend(gc.get_referents(one))
    return total


def test_a_program_s_main_conversation_is_read_and_how_it_failed() -> None:
    assert "Repaired." in readable(programs_played.several(), conversation)
    assert "ended with" not in readable(programs_played.ended(), conversation)
    assert readable(programs_played.failed(), conversation).endswith("## small-agent ended with 7\nTraceback\n")


def test_a_rollout_reads_as_a_conversation() -> None:
    function = {"name": "bash", "arguments": '{"command": "ls"}'}
    told = transcript(
        messages=[
            {"role": "user", "content": "do it"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": function}]},
            {"role": "tool", "content": "x" * 100_000},
        ],
        error="ContainerLostError: gone",
        fault="infra",
    )
    text = readable(told, conversation)
    assert text.startswith('## user\ndo it\n\n## assistant\n-> bash {"command": "ls"}\n\n## tool\nxxx')
    assert text.endswith("## ended by infra\nContainerLostError: gone")
    assert len(text) < 10_000
    assert readable(told, lambda messages: str(len(messages))).startswith("3\n\n## ended")
    assert rollout_row(told, conversation)[:4] == ["i", "t-0", None, "infra"]
