"""Rollouts that agent programs played, as records, without playing anything: a title asked for without tools, a main
conversation, a sub-agent behind one of its answers; a program that failed, and one that was ended."""

from __future__ import annotations

from typing import Any

from agentenv.agent.token_sequences import IGNORED, NO_LOGPROB, TokenSequence
from agentenv.agent.transcript import (
    ConversationRecord,
    GroupRecord,
    Phase,
    ProgramRecord,
    RunRecord,
    Step,
    ToolRecord,
    Transcript,
)

RUN = RunRecord(
    id="20250615-160000-def456",
    environment="repair",
    model="Qwen/Qwen3-4B",
    settings="d1g357",
    agentenv="1.0",
    began_unix_s=1_750_000_000.0,
)
SYSTEM = {"role": "system", "content": "You are a small agent."}
TASK = {"role": "user", "content": "Repair the package."}
TITLE = {"role": "user", "content": "A title for: Repair the package."}
OWN = {"role": "assistant", "content": "I am ready."}
"""Written by the program."""


def answer(text: str, *calls: tuple[str, str]) -> dict[str, Any]:
    made = [
        {"id": name, "type": "function", "function": {"name": "bash", "arguments": f'{{"command": "{command}"}}'}}
        for name, command in calls
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


def shown(name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": text}


def call(name: str, command: str, started_s: float, ended_s: float, text: str) -> ToolRecord:
    return ToolRecord(
        call_id=name,
        tool="bash",
        arguments={"command": command},
        started_s=started_s,
        ended_s=ended_s,
        shown=text,
    )


def step(index: int, message: dict[str, Any], conversation: int, dialect: str = "chat", **more: Any) -> Step:
    """A turn of a quarter of a second; its prompt has ten tokens more than the one before, its answer has two."""
    usage = {"prompt_tokens": 10 * (index + 1), "completion_tokens": 2}
    times = {"model_started_s": 0.5 + index, "model_ended_s": 0.75 + index}
    given = {"index": index, "message": message, "conversation": conversation, "dialect": dialect, "usage": usage}
    return Step(**{**given, **times, **more})


def several() -> Transcript:
    """Steps 0: the title; 1, 2, 4: the main conversation; 3: a sub-agent behind step 1, which saw another output."""
    look, edit = answer("I look.", ("call_1_0", "ls")), answer("I edit.", ("call_2_0", "patch"))
    opening = [SYSTEM, TASK, OWN, look, shown("call_1_0", "setup.py")]
    sub = answer("It is old.", ("call_3_0", "git log"))
    steps = [
        step(0, answer("A repair"), 0, "messages"),
        step(1, look, 1, outcome="tool_calls", tool_calls=[call("call_1_0", "ls", 1.75, 2.5, "setup.py")]),
        step(
            2, edit, 1, after=1, outcome="tool_calls", tool_calls=[call("call_2_0", "patch", 2.75, 4.5, "exit code 0")]
        ),
        step(3, sub, 2, after=1, outcome="tool_calls", tool_calls=[call("call_3_0", "git log", 3.75, 3.75, "")]),
        step(4, answer("Repaired."), 1, after=2, reasoning="It passes."),
    ]
    program = ProgramRecord(
        name="small-agent",
        exit_code=0,
        duration_s=5.5,
        stdout="begin of output\nend of output\n",
        stderr="a warning\n",
        stdout_dropped_bytes=3_000_000,
        refused=["messages[3]: pictures are not taken"],
        dropped={"tools[].cache_control": 5, "messages[].content[].image": 2},
        overruled=["temperature"],
        main=1,
        conversations=[
            ConversationRecord(trained=False, messages=[TITLE, answer("A repair")]),
            ConversationRecord(tools=["bash"]),
            ConversationRecord(
                behind=1,
                tools=["bash"],
                messages=[
                    *opening[:4],
                    shown("call_1_0", "README"),
                    {"role": "user", "content": "How old is it?"},
                    sub,
                ],
            ),
        ],
    )
    phases = [Phase(name="slot_wait", started_s=0.0, ended_s=0.25)]
    phases += [Phase(name="model", label=f"step {n + 1}", started_s=0.5 + n, ended_s=0.75 + n) for n in range(5)]
    phases += [
        Phase(name="tool", label="program", started_s=started_s, ended_s=ended_s)
        for started_s, ended_s in ((1.75, 2.5), (2.75, 4.5))
    ]
    return Transcript(
        trajectory="item-2-0a1b2c3d-0",
        item_id="item-2",
        began_unix_s=1_750_000_001.0,
        messages=[*opening, edit, shown("call_2_0", "exit code 0"), answer("Repaired.")],
        steps=steps,
        tools=["bash"],
        phases=phases,
        final_response="end of output",
        score=1.0,
        program=program,
        totals={"total_s": 6.0, "model_s": 1.25},
    )


def one(name: str, **more: Any) -> Transcript:
    """A rollout of one conversation, of one turn that calls a tool and is never asked about it again."""
    made = answer("", ("call_0_0", "make"))
    program = {"name": "small-agent", "duration_s": 1.0, "conversations": [ConversationRecord(tools=["bash"])]}
    turn = step(0, made, 0, outcome="tool_calls", tool_calls=[call("call_0_0", "make", 0.75, 0.75, "")])
    given: dict[str, Any] = {
        "trajectory": name,
        "item_id": "item-2",
        "began_unix_s": 1_750_000_001.0,
        "messages": [SYSTEM, TASK, made],
        "steps": [turn],
        "tools": ["bash"],
        "score": 0.0,
        "totals": {"total_s": 2.0},
        "program": ProgramRecord(**{**program, **more.pop("program", {})}),
    }
    return Transcript(**{**given, **more})


def failed() -> Transcript:
    program = {"exit_code": 7, "stderr": "Traceback\n"}
    return one("item-2-0a1b2c3d-1", finish_reason="program_failed", program=program)


def ended() -> Transcript:
    return one("item-2-0a1b2c3d-2", finish_reason="max_time")


def with_tokens() -> Transcript:
    """The first with the sequences of its trained conversations: the sub-agent's begins with the main one's tokens,
    which are not trained there."""
    played = several()
    main, sub = [1, 2, 3, 11, 12, 4, 21, 22, 5, 41, 42], [1, 2, 3, 11, 12, 6, 31, 32]
    played.token_sequences = [_sequence(1, main, {3, 4, 6, 7, 9, 10}), _sequence(3, sub, {6, 7})]
    return played


def _sequence(first_step: int, tokens: list[int], own: set[int]) -> TokenSequence:
    masks = [token if at in own else IGNORED for at, token in enumerate(tokens)]
    logprobs = [-0.5 if at in own else NO_LOGPROB for at in range(len(tokens))]
    return TokenSequence(tokens=tokens, masks=masks, logprobs=logprobs, first_step=first_step)


def group() -> GroupRecord:
    return GroupRecord(
        run=RUN,
        group="item-2-0a1b2c3d",
        item_id="item-2",
        item={"id": "item-2"},
        group_size=3,
        outcome="complete",
        trajectories=[several(), failed(), ended()],
    )
