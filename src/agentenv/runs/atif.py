"""A rollout as a trajectory of ATIF, Harbor's Agent Trajectory Interchange Format, for what reads that.

The format is version 1.7 of Harbor's ``rfcs/0001-trajectory-format.md`` and ``harbor.models.trajectories``. What it has
no field for is in ``extra`` of the object it belongs to, under the names of :mod:`agentenv.agent.transcript`: nothing
of a record is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agentenv.agent.conversations import Conversation, conversations_of
from agentenv.agent.jsonable import jsonable
from agentenv.agent.transcript import GroupRecord, RunRecord, Step, Transcript
from agentenv.runs.atif_steps import (
    TOKENS,
    AtifStep,
    metrics_of,
    other_messages,
    steps_of_conversation,
    steps_of_loop,
    time_of,
    tokens_of_steps,
)
from agentenv.runs.spans import attempt_name

__all__ = ["trajectory", "write_trajectories"]

VERSION: Final = "ATIF-v1.7"
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]")
_LONGEST_NAME: Final = 200

_OF_STEPS: Final = {"trajectory", "messages", "steps", "tools", "token_sequences", "program"}
"""Fields of a Transcript that have a place of their own."""


def trajectory(member: Transcript, group: GroupRecord | None = None) -> dict[str, Any]:
    """The rollout as an ATIF trajectory, ready for ``json.dump``. Of an agent program's conversations the main one is
    the trajectory, and the others are its ``subagent_trajectories``. ``group``: the record it is in, for the names of
    run and item. Token ids and logprobs are those of ``member.token_sequences``, which no file has."""
    run = group.run if group is not None else None
    tokens, other_sequences = tokens_of_steps(member)
    if member.program is None:
        steps, others = steps_of_loop(member, tokens), []
    else:
        conversations = conversations_of(member)
        steps = [s for one in conversations if one.is_main for s in steps_of_conversation(member, one, tokens)]
        others = [_subagent(member, one, run, tokens) for one in conversations if not one.is_main]
    if not steps:  # the format has no trajectory without a step
        steps = [{"source": "system", "message": member.error, "timestamp": time_of(member, 0.0)}]
    about = group.model_dump(exclude={"trajectories", "run"}) if group is not None else {}
    extra = {
        **member.model_dump(exclude=_OF_STEPS),
        **({"messages": other} if member.program is None and (other := other_messages(member)) else {}),
        **({"run": run.model_dump()} if run is not None else {}),
        **({"group": about} if about else {}),
    }
    if member.program is not None:  # the messages are those of the trajectories
        extra["program"] = member.program.model_dump(exclude={"conversations": {"__all__": {"messages"}}})
    if other_sequences:
        extra["token_sequences"] = [vars(sequence) for sequence in other_sequences]
    found: dict[str, Any] = {
        "schema_version": VERSION,
        "session_id": member.trajectory,
        "trajectory_id": attempt_name(member),
        "agent": _agent(member, run, member.tools),
        "steps": _numbered(steps),
        "final_metrics": _totals(member.steps, len(steps)),
        "extra": extra,
        **({"subagent_trajectories": others} if others else {}),
    }
    return jsonable(found)  # type: ignore[no-any-return]


def _subagent(
    member: Transcript, conversation: Conversation, run: RunRecord | None, tokens: Mapping[int, dict[str, Any]]
) -> dict[str, Any]:
    steps = steps_of_conversation(member, conversation, tokens)
    record = conversation.record
    return {
        "schema_version": VERSION,
        "session_id": member.trajectory,
        "trajectory_id": f"{attempt_name(member)}/conversation-{conversation.number}",
        "agent": _agent(member, run, record.tools),
        "steps": _numbered(steps),
        "final_metrics": _totals(conversation.steps, len(steps)),
        "extra": {"conversation": conversation.number, **record.model_dump(include={"behind", "trained"})},
    }


def _agent(member: Transcript, run: RunRecord | None, tools: list[str]) -> dict[str, Any]:
    """The built-in loop is known by its environment. The version of a program is not known."""
    name, version = (run.environment, run.agentenv) if run is not None else ("agentenv", "unknown")
    extra: dict[str, Any] = {"harness": "agentenv", "tools": tools}
    if member.program is not None:
        extra |= {"environment": name, "agentenv": version}
        name, version = member.program.name, "unknown"
    model = {"model_name": run.model} if run is not None and run.model else {}
    return {"name": name, "version": version, **model, "extra": extra}


def _numbered(steps: Sequence[AtifStep]) -> list[dict[str, Any]]:
    return [{"step_id": number, **step} for number, step in enumerate(steps, 1)]


def write_trajectories(groups: Iterable[GroupRecord], directory: Path) -> int:
    """Write every rollout as ``directory/TRAJECTORY.json``, over a file of that name. Returns how many. Raises:
    OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    written: set[str] = set()
    for group in groups:
        for member in group.trajectories:
            base = name = _UNSAFE.sub("_", member.trajectory)[:_LONGEST_NAME].lstrip(".") or "rollout"
            number = 1
            while name in written:
                number += 1
                name = f"{base}.{number}"
            written.add(name)
            unfinished = directory / f".{name}.json"
            unfinished.write_text(json.dumps(trajectory(member, group), ensure_ascii=False, indent=1) + "\n", "utf-8")
            unfinished.replace(directory / f"{name}.json")
    return len(written)


def _totals(turns: Sequence[Step], steps: int) -> dict[str, Any]:
    """Sums of what any turn has; a turn without a number adds nothing. Those of the whole trajectory are of its
    sub-agents too, as in the trajectories of Harbor's own agents."""
    usages = [metrics_of(step.usage) for step in turns]
    found: dict[str, Any] = {"total_steps": steps}
    for name in (*TOKENS, "cached_tokens"):
        numbers = [usage[name] for usage in usages if name in usage]
        if numbers:
            found[f"total_{name}"] = sum(numbers)
    return found
