"""A rollout as a trajectory of ATIF, Harbor's Agent Trajectory Interchange Format, for what reads that.

The format is version 1.7 of Harbor's ``rfcs/0001-trajectory-format.md`` and ``harbor.models.trajectories``. What it has
no field for is in ``extra`` of the object it belongs to, under the names of :mod:`agentenv.agent.transcript`: nothing
of a record is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from agentenv.agent.jsonable import jsonable
from agentenv.agent.token_sequences import IGNORED, TokenSequence
from agentenv.agent.transcript import GroupRecord, Step, ToolRecord, Transcript, text_of
from agentenv.runs.spans import attempt_name

__all__ = ["trajectory", "write_trajectories"]

VERSION: Final = "ATIF-v1.7"
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]")
_LONGEST_NAME: Final = 200

_TOKENS: Final = ("prompt_tokens", "completion_tokens")
_OF_STEPS: Final = {"trajectory", "messages", "steps", "tools", "token_sequences"}
"""Fields of a Transcript that have a place of their own."""


def trajectory(member: Transcript, group: GroupRecord | None = None) -> dict[str, Any]:
    """The rollout as an ATIF trajectory, ready for ``json.dump``. ``group``: the record it is in, for the names of run
    and item. Token ids and logprobs are those of ``member.token_sequences``, which no file has."""
    run = group.run if group is not None else None
    steps = list(_opening(member))
    tokens = _tokens_of_steps(member)
    steps += [_agent_step(member, step, tokens.get(step.index, {})) for step in member.steps]
    if not steps:  # the format has no trajectory without a step
        steps = [{"source": "system", "message": member.error, "timestamp": _time(member, 0.0)}]
    about = group.model_dump(exclude={"trajectories", "run"}) if group is not None else {}
    extra = {
        **member.model_dump(exclude=_OF_STEPS),
        **({"messages": other} if (other := _other_messages(member)) else {}),
        **({"run": run.model_dump()} if run is not None else {}),
        **({"group": about} if about else {}),
    }
    if member.token_sequences and not tokens:
        extra["token_sequences"] = [vars(sequence) for sequence in member.token_sequences]
    agent = {
        "name": run.environment if run is not None else "agentenv",
        "version": run.agentenv if run is not None else "unknown",
        **({"model_name": run.model} if run is not None and run.model else {}),
        "extra": {"harness": "agentenv", "tools": member.tools},
    }
    found: dict[str, Any] = {
        "schema_version": VERSION,
        "session_id": member.trajectory,
        "trajectory_id": attempt_name(member),
        "agent": agent,
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
        "final_metrics": _totals(member, len(steps)),
        "extra": extra,
    }
    return jsonable(found)  # type: ignore[no-any-return]


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


def _time(member: Transcript, at_s: float) -> str:
    return datetime.fromtimestamp(member.began_unix_s + at_s, UTC).isoformat(timespec="milliseconds")


def _before_the_model(member: Transcript) -> list[dict[str, Any]]:
    """The messages that a conversation begins with."""
    first = next((n for n, message in enumerate(member.messages) if message.get("role") == "assistant"), None)
    return [message for message in member.messages[:first] if message.get("role") in ("system", "user")]


def _opening(member: Transcript) -> Iterator[dict[str, Any]]:
    for message in _before_the_model(member):
        step = {"source": message["role"], "message": text_of(message.get("content")), "timestamp": _time(member, 0.0)}
        more = _beside_text(message)
        yield {**step, **({"extra": {"message": more}} if more else {})}


def _beside_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a message but its role and its text."""
    known = {"role", "content"} if isinstance(message.get("content"), str | None) else {"role"}
    return {name: value for name, value in message.items() if name not in known}


def _other_messages(member: Transcript) -> list[dict[str, Any]]:
    """Messages that are neither the opening, nor a turn, nor the answer to a call. The loop adds none."""
    opening = _before_the_model(member)
    answered = {call.call_id for step in member.steps for call in step.tool_calls}
    problems = {f"error: {step.problem}" for step in member.steps if step.problem}
    turns = len(member.steps)
    found = []
    for message in member.messages:
        role = message.get("role")
        if role == "assistant" and turns:
            turns -= 1
        elif not (
            any(message is one for one in opening)
            or (role == "tool" and message.get("tool_call_id") in answered)
            or (role == "user" and message.get("content") in problems)
        ):
            found.append(message)
    return found


def _agent_step(member: Transcript, step: Step, tokens: dict[str, Any]) -> dict[str, Any]:
    calls = [_call(call) for call in step.tool_calls if call.tool]
    results = [_result(call) for call in step.tool_calls]
    more = _beside_text(step.message)
    extra = {
        **step.model_dump(include={"index", "model_started_s", "model_ended_s", "outcome"}),
        **({"problem": step.problem} if step.problem else {}),
        **({"raw": step.raw} if step.raw is not None else {}),
        **({"message": more} if more else {}),
    }
    if cuts := [cut.model_dump() for cut in member.shortenings if cut.step == step.index]:
        extra["shortenings"] = cuts
    found = {
        "source": "agent",
        "timestamp": _time(member, step.model_started_s),
        "message": text_of(step.message.get("content")),
        "llm_call_count": 1,
        "extra": extra,
    }
    if step.reasoning:
        found["reasoning_content"] = step.reasoning
    if calls:
        found["tool_calls"] = calls
    if results:
        found["observation"] = {"results": results}
    if metrics := {**_metrics(step.usage), **tokens}:
        found["metrics"] = metrics
    return found


def _call(call: ToolRecord) -> dict[str, Any]:
    """Arguments that are no object are in ``extra.arguments``, as they were sent."""
    extra = {"started_s": call.started_s, "ended_s": call.ended_s, "batch_wait_s": call.batch_wait_s}
    readable = isinstance(call.arguments, dict)
    return {
        "tool_call_id": call.call_id,
        "function_name": call.tool,
        "arguments": call.arguments if readable else {},
        "extra": extra if readable else {**extra, "arguments": call.arguments},
    }


def _result(call: ToolRecord) -> dict[str, Any]:
    """What the model was shown of a call. The complaint about what could not be read as a call is of no call."""
    extra: dict[str, Any] = {"result": call.result.model_dump(exclude_defaults=True) if call.result else None}
    if call.tool:
        return {"source_call_id": call.call_id, "content": call.shown, "extra": extra}
    return {"content": call.shown, "extra": {**extra, "unreadable": call.arguments}}


def _cached(usage: Mapping[str, Any]) -> int | None:
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else None


def _metrics(usage: Mapping[str, Any] | None) -> dict[str, Any]:
    if not usage:
        return {}
    found: dict[str, Any] = {name: usage[name] for name in _TOKENS if isinstance(usage.get(name), int)}
    if (cached := _cached(usage)) is not None:
        found["cached_tokens"] = cached
    if more := {name: value for name, value in usage.items() if name not in found}:
        found["extra"] = more
    return found


def _totals(member: Transcript, steps: int) -> dict[str, Any]:
    """Sums of what any turn has; a turn without a number adds nothing."""
    usages = [_metrics(step.usage) for step in member.steps]
    found: dict[str, Any] = {"total_steps": steps}
    for name in (*_TOKENS, "cached_tokens"):
        numbers = [usage[name] for usage in usages if name in usage]
        if numbers:
            found[f"total_{name}"] = sum(numbers)
    return found


def _tokens_of_steps(member: Transcript) -> dict[int, dict[str, Any]]:
    """By step: its prompt's and its answer's token ids, and the answer's logprobs. Empty if the sequences do not give
    exactly one answer for each step."""
    found: dict[int, dict[str, Any]] = {}
    for sequence in member.token_sequences:
        for number, (begin, end) in enumerate(_answers(sequence)):
            found[sequence.first_step + number] = {
                "prompt_token_ids": sequence.tokens[:begin],
                "completion_token_ids": sequence.tokens[begin:end],
                "logprobs": sequence.logprobs[begin:end],
            }
    fits = found.keys() == {step.index for step in member.steps} and all(
        (step.usage or {}).get("completion_tokens") == len(found[step.index]["completion_token_ids"])
        for step in member.steps
    )
    return found if fits else {}


def _answers(sequence: TokenSequence) -> Sequence[tuple[int, int]]:
    """Where the policy's own tokens begin and end."""
    found: list[tuple[int, int]] = []
    begin: int | None = None
    for at, mask in enumerate([*sequence.masks, IGNORED]):
        if mask != IGNORED and begin is None:
            begin = at
        elif mask == IGNORED and begin is not None:
            found.append((begin, at))
            begin = None
    return found
