"""Group records of every sort, without a run: good, partial, faulty, hostile, and many."""

from __future__ import annotations

import random
from typing import Any

from agentenv.agent.transcript import GroupRecord, Phase, Step, ToolRecord, Transcript
from agentenv.wire.calls import CallResult

HOSTILE = (
    "</script><script>window.harmed = 1</script><img src=x onerror='window.harmed = 2'>"
    "<!-- <svg onload=window.harmed=3> \u2028 ]]> ' \" & &lt; \x1b[31mred\x1b[0m \x00\x07 \u202eevil {{ 7 * 7 }}"
)
DIFF = (
    "--- a/boltons/mathutils.py\n+++ b/boltons/mathutils.py\n@@ -184,5 +184,5 @@\n"
    "         if x:\n-            return a and b\n+            return a or b\n"
)


def call(number: int, command: str, started_s: float, run_s: float, **result: Any) -> ToolRecord:
    """A bash call that waited 2 ms for its batch and took ``run_s`` in the slot."""
    fields = {"stdout": f"output of {command}\n", "exit_code": 0, "duration_s": run_s, **result}
    return ToolRecord(
        call_id=f"call-{number}",
        tool="bash",
        arguments={"command": command},
        started_s=started_s,
        ended_s=started_s + run_s + 0.004,
        batch_wait_s=0.002,
        result=CallResult(id=f"call-{number}", **fields),
        shown="exit code: 0",
    )


def transcript(name: str, *, score: float | None, commands: list[str], seed: int = 0, **fields: Any) -> Transcript:
    """A trajectory of one step a command; ``fields`` replace anything of the Transcript."""
    random_source = random.Random(f"{name}{seed}")
    now = 0.02 + random_source.random() * 0.2
    phases = [
        Phase(name="slot_wait", started_s=0, ended_s=now),
        Phase(name="prepare", started_s=now, ended_s=now + 0.09),
    ]
    now += 0.09
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a careful programmer."},
        {"role": "user", "content": "The tests of boltons fail. Repair the package."},
    ]
    steps = []
    for index, command in enumerate(commands):
        thinking, running = 0.05 + random_source.random() * 0.3, 0.002 + random_source.random() * 0.4
        made = call(index, command, now + thinking, running)
        message = {"role": "assistant", "content": f"I run `{command}`.", "tool_calls": [{"id": made.call_id}]}
        steps.append(
            Step(index=index, model_started_s=now, model_ended_s=now + thinking, message=message, tool_calls=[made])
        )
        phases += [
            Phase(name="model", label=f"step {index + 1}", started_s=now, ended_s=now + thinking),
            Phase(name="tool", label="bash", started_s=made.started_s, ended_s=made.ended_s),
        ]
        messages += [message, {"role": "tool", "tool_call_id": made.call_id, "content": "exit code: 0"}]
        now = made.ended_s + 0.001
    phases.append(Phase(name="verify", started_s=now, ended_s=now + 0.4))
    messages.append({"role": "assistant", "content": "It is repaired."})
    base: dict[str, Any] = {
        "trajectory": name,
        "item_id": "item",
        "began_unix_s": 1_750_000_000.0 + seed,
        "messages": messages,
        "steps": steps,
        "phases": phases,
        "score": score,
        "final_response": "It is repaired.",
        "verification": {"repaired": 3, "broken": 4, "changed": DIFF},
        "totals": {"total_s": now + 0.4},
    }
    return Transcript(**{**base, **fields})


def group(name: str, members: list[Transcript], **fields: Any) -> GroupRecord:
    """A complete group, unless ``fields`` say otherwise."""
    base: dict[str, Any] = {
        "group": name,
        "item_id": f"boltons-{name}",
        "item": {"package": "boltons 26.2.0", "diff": DIFF},
        "group_size": len(members),
        "outcome": "complete",
        "trajectories": members,
    }
    return GroupRecord(**{**base, **fields})


def few() -> list[GroupRecord]:
    """A handful of groups with a bit of everything in them."""
    commands = ["ls", "python3 -m pytest -q", "sed -n 1,40p boltons/mathutils.py", "patch -p1 < fix.diff"]
    slow = transcript("g2-b", score=0.0, commands=["sleep 100000"])
    flood = transcript("g2-c", score=0.0, commands=["yes"])
    stuck = call(0, "sleep 100000", 0.5, 5.0, timed_out=True, exit_code=137, stdout="")
    slow.steps[0].tool_calls[0] = stuck
    flooded = "y\n" * 200_000
    flood.steps[0].tool_calls[0] = call(
        0,
        "yes",
        0.5,
        0.8,
        stdout=flooded,
        stdout_dropped_bytes=9_000_000_000,
        truncated=True,
        exit_code=137,
        timed_out=True,
    )
    wrong = transcript("g3-a", score=0.4, commands=["ls"])
    wrong.steps[0].tool_calls[0] = ToolRecord(
        call_id="call-0",
        tool="bsh",
        arguments="{not json",
        started_s=0.5,
        ended_s=0.501,
        result=CallResult(id="call-0", fault="model", error="unknown_tool", message="no tool is called 'bsh'"),
    )
    lost = transcript(
        "g3-b",
        score=None,
        commands=["ls"],
        fault="infra",
        finish_reason="fault",
        error="ContainerLostError: it died",
        attempt=3,
        earlier_attempts=["ConnectionLostError: no answer for 15 s", "ContainerLostError: it died"],
    )
    scores = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.0}
    good = [
        transcript(f"g1-{name}", score=score, commands=commands[: 2 + number], seed=number)
        for number, (name, score) in enumerate(scores.items())
    ]
    return [
        group("g1", good),
        group("g2", [transcript("g2-a", score=1.0, commands=commands), slow, flood]),
        group("g3", [wrong, lost], outcome="partial"),
        group("g4", [lost.model_copy(update={"trajectory": "g4-a"})], outcome="retry"),
        group("g5", [hostile()], item={HOSTILE: HOSTILE}, item_id=HOSTILE),
    ]


def hostile() -> Transcript:
    """Everything a policy can put into a record, meant to break out of the page."""
    found = transcript(
        f"g5-{HOSTILE}",
        score=0.5,
        commands=[HOSTILE.replace("\x00", "")],
        error=HOSTILE,
        fault="task",
        earlier_attempts=[HOSTILE],
        final_response=HOSTILE,
        workspace_meta={HOSTILE: HOSTILE},
        verification={HOSTILE: HOSTILE},
    )
    found.messages.insert(1, {"role": HOSTILE, "content": HOSTILE + "\ud800"})
    found.steps[0].tool_calls[0] = call(
        0, "true", 0.5, 0.1, stdout=HOSTILE, stderr=HOSTILE, message=HOSTILE, content={HOSTILE: HOSTILE}
    )
    found.steps[0].tool_calls[0].tool = HOSTILE
    return found


def many(trajectories: int) -> list[GroupRecord]:
    """As many trajectories as asked, four a group, of up to eight calls."""
    random_source = random.Random(1)
    groups = []
    for number in range(trajectories // 4):
        members = [
            transcript(
                f"many{number}-{name}",
                score=random_source.choice([0.0, 0.25, 0.5, 1.0]),
                commands=["pytest -q"] * random_source.randint(1, 8),
                seed=number,
            )
            for name in "abcd"
        ]
        groups.append(group(f"many{number}", members))
    return groups
