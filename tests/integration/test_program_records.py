"""What is recorded of agent programs that play on fake slots: which conversation a turn is of, whose time it was, and
that every reader of records takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentenv.agent.conversations import conversations_of
from agentenv.agent.program import AgentProgram
from agentenv.agent.transcript import GroupRecord, Transcript
from agentenv.runs import load, load_calls, load_messages
from agentenv.runs.atif import trajectory
from agentenv.runs.records import read_records
from agentenv.runs.spans import GroupSpans, Served
from agentenv.testing import Call, Reply
from tests.unit.env.env_stubs import AnswerEnv
from tests.unit.env.managed_stubs import managed

PROGRAM = """\
import json, os, subprocess, sys, urllib.error, urllib.request

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}


def ask(messages, tools=(TOOL,)):
    body = {"model": "any", "messages": messages, **({"tools": list(tools)} if tools else {})}
    request = urllib.request.Request(
        os.environ["URL"] + "/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        return json.load(reply)["choices"][0]["message"]


def results(answer):
    for call in answer.get("tool_calls") or []:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        yield {"role": "tool", "tool_call_id": call["id"], "content": done.stdout or "nothing"}


begun = [{"role": "user", "content": sys.argv[1]}]
answer = ask(begun)
first = [*begun, answer, *results(answer)]
try:
    ask([{"role": "user", "content": "a word " * 20_000}], ())
except urllib.error.HTTPError as refused:
    print("refused", refused.code)
ask([{"role": "user", "content": "A title, please."}], ())
sub = ask([*first, {"role": "user", "content": "a sub-agent's question"}])
answer = ask(first)
ask([*first, answer, *results(answer)])
"""
LOOK, WRITE = (Reply("I look.", (Call("bash", {"command": c}),)) for c in ("sleep 0.05; echo seen", "echo 42 > answer"))


class ProgramEnv(AnswerEnv):
    def agent_program(self, item: Any) -> AgentProgram:
        return AgentProgram(
            ["python3", "it.py", "{task}"],
            env={"URL": "{url}"},
            files={"/workspace/it.py": PROGRAM},
            name="it",
        )


async def played(tmp_path: Path) -> tuple[Path, GroupRecord]:
    records = tmp_path / "rollouts.jsonl"
    script = {"*": [[LOOK, WRITE, Reply("done")]]}
    changed: dict[str, Any] = {
        "group_size": 1,
        "rollouts_path": str(records),
        "agent_context_tokens": 8000,
        "agent_max_tokens": 500,
    }
    async with managed(ProgramEnv, tmp_path, script, **changed) as (env, _):
        await env.collect_trajectories(await env.get_next_item())
    (group,) = read_records(records)
    return records, group


async def test_turns_name_the_conversations_that_are_recorded_and_their_times(tmp_path: Path) -> None:
    records, group = await played(tmp_path)
    (transcript,) = group.trajectories
    program = transcript.program
    assert program is not None, transcript.error
    assert (program.exit_code, program.stdout) == (0, "refused 400\n"), program.stderr
    main, title, behind = conversations_of(transcript)
    assert len(program.conversations) == 3, "the one that did not fit had no answer"
    assert [message.get("content") for message, step in title.said if step is None] == ["A title, please."]
    assert [one.record.behind for one in (main, title, behind)] == [None, None, 0]
    for one in conversations_of(transcript):
        answers = [message for message, _ in one.said if message.get("role") == "assistant"]
        turns = [step for _, step in one.said if step is not None]
        assert len(answers) == len(turns), "every answer in it is a turn's"
        assert {step.conversation for step in one.steps} == {one.number}
    assert sum(len(one.steps) for one in conversations_of(transcript)) == len(transcript.steps) == 5
    check_times(transcript)
    check_readers(records, group)


def check_times(transcript: Transcript) -> None:
    asked = {phase.started_s for phase in transcript.phases if phase.name == "model"}
    assert {step.model_started_s for step in transcript.steps} < asked, "and the one that did not fit"
    between = [phase for phase in transcript.phases if phase.name == "tool"]
    assert len(between) == 2, "once per answer with calls, however often it is continued"
    assert {phase.started_s for phase in between} < {step.model_ended_s for step in transcript.steps}
    first = transcript.steps[0].tool_calls[0]
    assert first.shown == "seen\n"
    assert first.ended_s - first.started_s >= 0.05


def check_readers(records: Path, group: GroupRecord) -> None:
    (row,) = load(records)
    assert (row["program"], row["conversations"], row["dialects"], row["steps"]) == ("it", 3, "chat", 5)
    assert {call["fault"] for call in load_calls(records)} == {"none"}
    assert {message["conversation"] for message in load_messages(records)} == {0, 1, 2}
    assert group.run is not None
    spans = [*GroupSpans(group.run, Served("vllm")).of("g", "i", "train", 1.0, group.trajectories)]
    assert [span.error for span in spans if span.error] == ["it had no answer"], "the one that did not fit"
    document = trajectory(group.trajectories[0], group)
    assert len(document["subagent_trajectories"]) == 2
