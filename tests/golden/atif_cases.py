"""Rollouts with a bit of everything that a trajectory of ATIF has a place for, or has not.

``atif.json`` has their trajectories, which Harbor's own models have read; ``python -m tests.golden.atif_cases`` writes
it anew. In an environment that has Harbor (``harbor_answers.py``), ``HARBOR/bin/python tests/golden/atif_check.py``
reads it with those models again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentenv.agent.token_sequences import IGNORED, NO_LOGPROB, TokenSequence
from agentenv.agent.transcript import GroupRecord, Phase, RunRecord, Shortening, Step, ToolRecord, Transcript
from agentenv.runs.atif import trajectory
from agentenv.wire.calls import CallResult
from tests import programs_played

GOLDEN = Path(__file__).with_name("atif.json")
RUN = RunRecord(
    id="20250615-150000-abc123",
    environment="answer",
    model="Qwen/Qwen3-4B",
    settings="d1g357",
    agentenv="1.0",
    began_unix_s=1_750_000_000.0,
)


def call(name: str, tool: str, arguments: Any, result: CallResult | None, shown: str) -> ToolRecord:
    return ToolRecord(
        call_id=name,
        tool=tool,
        arguments=arguments,
        started_s=1.0,
        ended_s=1.5,
        batch_wait_s=0.002,
        result=result,
        shown=shown,
    )


def played() -> Transcript:
    """Good, wrong, unreadable and lost calls; reasoning; an output that was shortened; tokens."""
    done = CallResult(id="c1", stdout="42\n", exit_code=0, duration_s=0.25, queue_s=0.125)
    unknown = CallResult(id="c2", fault="model", error="unknown_tool", message="no tool is called 'bsh'")
    text = CallResult(id="c3", fault="model", error="invalid_arguments", message="arguments are no object")
    unreadable = CallResult(id="call_1_unreadable", fault="model", error="malformed_call", message="no JSON")
    first = Step(
        index=0,
        model_started_s=0.5,
        model_ended_s=1.0,
        message={"role": "assistant", "content": "I look.", "tool_calls": [{"id": "c1"}, {"id": "c2"}, {"id": "c3"}]},
        usage={
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
        outcome="tool_calls",
        reasoning="The answer may be there.",
        raw="<think>The answer may be there.</think>I look.<tool_call>",
        tool_calls=[
            call("c1", "bash", {"command": "cat answer"}, done, "42\nexit code: 0"),
            call("c2", "bsh", {}, unknown, "error: no tool is called 'bsh'"),
            call("c3", "bash", "{not json", text, "error: arguments are no object"),
        ],
    )
    second = Step(
        index=1,
        model_started_s=2.0,
        model_ended_s=2.5,
        message={"role": "assistant", "content": "<tool_call>{"},
        usage={"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8},
        outcome="malformed",
        problem="no JSON",
        tool_calls=[call("call_1_unreadable", "", "<tool_call>{", unreadable, "error: no JSON")],
    )
    third = Step(
        index=2,
        model_started_s=3.0,
        model_ended_s=3.5,
        message={"role": "assistant", "content": "It is 42."},
        usage={"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
        tool_calls=[],
    )
    tokens = [101, 102, 103, 7, 8, 104, 105, 9, 106, 10]
    own = {3, 4, 7, 9}
    return Transcript(
        trajectory="item-1-0a1b2c3d-0",
        item_id="item-1",
        attempt=2,
        began_unix_s=1_750_000_001.5,
        messages=[
            {"role": "system", "content": "You solve tasks."},
            {"role": "user", "content": "What is the answer?"},
            {"role": "assistant", "content": "I look."},
            {"role": "tool", "tool_call_id": "c1", "content": "[shortened]"},
            {"role": "tool", "tool_call_id": "c2", "content": "error: no tool is called 'bsh'"},
            {"role": "tool", "tool_call_id": "c3", "content": "error: arguments are no object"},
            {"role": "assistant", "content": "<tool_call>{"},
            {"role": "user", "content": "error: no JSON"},
            {"role": "assistant", "content": "It is 42."},
        ],
        steps=[first, second, third],
        tools=["bash", "read_file"],
        phases=[
            Phase(name="slot_wait", started_s=0.0, ended_s=0.25),
            Phase(name="model", label="step 1", started_s=0.5, ended_s=1.0),
        ],
        final_response="It is 42.",
        score=1.0,
        earlier_attempts=["ContainerLostError: it died"],
        workspace_meta={"seed": 3},
        verification={"exit_code": 0},
        model_faults=3,
        shortenings=[Shortening(step=1, outputs=1, bytes_removed=9)],
        totals={"total_s": 4.0},
        token_sequences=[
            TokenSequence(
                tokens=tokens,
                masks=[token if at in own else IGNORED for at, token in enumerate(tokens)],
                logprobs=[-0.5 if at in own else NO_LOGPROB for at in range(len(tokens))],
            )
        ],
    )


def failed() -> Transcript:
    """A rollout that never began."""
    return Transcript(
        trajectory="item-1-0a1b2c3d-1",
        item_id="item-1",
        began_unix_s=1_750_000_002.0,
        finish_reason="fault",
        fault="infra",
        error="AcquireTimeoutError: no slot became free in 30 s",
    )


def group() -> GroupRecord:
    return GroupRecord(
        run=RUN,
        group="item-1-0a1b2c3d",
        item_id="item-1",
        item={"id": "item-1"},
        group_size=2,
        outcome="partial",
        trajectories=[played(), failed()],
    )


def of_programs() -> GroupRecord:
    """Those of agent programs: the first has three conversations, and tokens."""
    record = programs_played.group()
    record.trajectories[0] = programs_played.with_tokens()
    return record


def trajectories() -> list[dict[str, Any]]:
    return [trajectory(member, record) for record in (group(), of_programs()) for member in record.trajectories]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(trajectories(), indent=1) + "\n")
