"""Records as the page's data: short keys, outputs cut to a cap, calls joined with their turns. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from agentenv.agent.conversations import Conversation, conversations_of
from agentenv.agent.observations import RENDERERS, SESSION_TOOL_NAMES, content_shown, session_standing
from agentenv.agent.program_totals import by_dialect
from agentenv.agent.rollout_metrics import is_timeout, observed_calls
from agentenv.agent.tmux_recordings import recordings_of
from agentenv.agent.transcript import GroupRecord, Phase, ProgramRecord, Step, ToolRecord, Transcript, text_of

PAGE_BUDGET_BYTES = 48 * 1024 * 1024
"""Total size of all outputs: browsers open pages of this size without trouble."""
LONGEST_TEXT = 64 * 1024
SHORTEST_TEXT = 1024
LABEL_LENGTH = 48
LABEL_WORDS = 8
LABEL_ARGUMENTS = ("action", "process", "text", "keys", "input", "pattern", "url", "query")
"""Arguments shown in the waterfall for a call with neither command nor path."""
BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
LONGEST_RECORDING = 1024 * 1024
"""Characters of one recording of a screen that the page carries."""


def text_cap(groups: Iterable[GroupRecord]) -> int:
    """Maximum number of characters per text, so that all texts fit the page's budget."""
    texts = sum(_texts(transcript) for group in groups for transcript in group.trajectories)
    return max(SHORTEST_TEXT, min(LONGEST_TEXT, PAGE_BUDGET_BYTES // max(1, texts)))


def _texts(transcript: Transcript) -> int:
    conversations = transcript.program.conversations if transcript.program is not None else []
    return sum(2 * len(step.tool_calls) + 2 for step in transcript.steps) + sum(len(c.messages) for c in conversations)


def group_row(group: GroupRecord, first: int, cap: int) -> dict[str, Any]:
    """A group's row in the list; ``first`` is the number of its first trajectory's body. ``start`` of a member and
    ``span`` are seconds on one axis that begins with the group's first member."""
    began = min((t.began_unix_s for t in group.trajectories), default=0.0)
    starts = [round(t.began_unix_s - began, 4) for t in group.trajectories]
    ends = [start + duration_s(t) for start, t in zip(starts, group.trajectories, strict=True)]
    return {
        "id": group.group,
        "item": group.item_id,
        "size": group.group_size,
        "outcome": group.outcome,
        "details": [[key, _plain(value, cap)] for key, value in group.item.items()],
        "span": round(max(ends, default=0.0), 4),
        "members": [
            {**_member_row(t, first + index), "start": start}
            for index, (start, t) in enumerate(zip(starts, group.trajectories, strict=True))
        ],
    }


def _member_row(transcript: Transcript, body: int) -> dict[str, Any]:
    calls = [call for step in transcript.steps for call in step.tool_calls]
    return {
        "id": transcript.trajectory,
        "body": body,
        "score": transcript.score,
        "fault": transcript.fault,
        "callFaults": sum(call.result is not None and call.result.fault != "none" for call in calls),
        "finish": transcript.finish_reason,
        "attempt": transcript.attempt,
        "steps": len(transcript.steps),
        "calls": len(calls),
        "total": round(duration_s(transcript), 4),
        "bars": [[kind, round(start, 4), round(end, 4)] for kind, _, start, end in bars(transcript)],
        "timedOut": sum(map(is_timeout, calls)),
        **_program_marks(transcript.program),
    }


def _program_marks(program: ProgramRecord | None) -> dict[str, Any]:
    return {} if program is None else {"exit": program.exit_code, "conversations": len(program.conversations)}


def trajectory_body(transcript: Transcript, cap: int) -> dict[str, Any]:
    """Everything shown when a trajectory is unfolded."""
    return {
        "id": transcript.trajectory,
        "began": transcript.began_unix_s,
        "error": _plain(transcript.error, cap),
        "earlier": [_plain(error, cap) for error in transcript.earlier_attempts],
        "final": _plain(transcript.final_response, cap),
        "turns": _turns(transcript, cap) if transcript.program is None else [],
        **_of_program(transcript, cap),
        "recordings": {
            name: cast for name, cast in recordings_of(transcript).items() if len(cast) <= LONGEST_RECORDING
        },
        "bars": [[kind, label, round(start, 5), round(end, 5)] for kind, label, start, end in bars(transcript)],
        "total": round(duration_s(transcript), 5),
        "totals": {name: round(value, 4) for name, value in transcript.totals.items()},
        "verification": [[key, _plain(value, cap)] for key, value in transcript.verification.items()],
        "workspace": [[key, _plain(value, cap)] for key, value in transcript.workspace_meta.items()],
    }


def duration_s(transcript: Transcript) -> float:
    """Seconds from the trajectory's start to the last recorded moment."""
    ends = [phase.ended_s for phase in transcript.phases] + [step.model_ended_s for step in transcript.steps]
    return max([*ends, transcript.totals.get("total_s", 0.0), 0.0])


def bars(transcript: Transcript) -> list[tuple[str, str, float, float]]:
    """(kind, label, start, end) of every phase; a tool call is shown as batch wait, queue, run and transport. What an
    agent program did between two turns is one bar, whatever it called there."""
    found = [part for phase in transcript.phases if phase.name != "tool" for part in _phase_bar(phase)]
    if transcript.program is not None:
        found += [_program_bar(phase, transcript) for phase in transcript.phases if phase.name == "tool"]
    for call in observed_calls(transcript):
        found.extend(_call_bars(call))
    return sorted(found, key=lambda bar: (bar[2], bar[3]))


def _program_bar(phase: Phase, transcript: Transcript) -> tuple[str, str, float, float]:
    steps = [step for step in transcript.steps if step.model_ended_s == phase.started_s]
    label = ", ".join(_call_label(call) for step in steps for call in step.tool_calls)[:LABEL_LENGTH]
    return "program", label or phase.label, phase.started_s, max(phase.started_s, phase.ended_s)


def _phase_bar(phase: Phase) -> list[tuple[str, str, float, float]]:
    return [(phase.name, phase.label, phase.started_s, max(phase.started_s, phase.ended_s))]


def _call_bars(call: ToolRecord) -> list[tuple[str, str, float, float]]:
    result = call.result
    stretches = [("batch_wait", call.batch_wait_s)]
    if result is not None:
        stretches += [("queue", result.queue_s), ("run", result.duration_s)]
    label = _call_label(call)
    found, at = [], call.started_s
    for kind, length in stretches:
        end = min(call.ended_s, at + max(0.0, length))
        if end > at:
            found.append((kind, label, at, end))
        at = max(at, end)
    if call.ended_s > at:
        found.append(("transport" if result is not None else "lost", label, at, call.ended_s))
    return found


def _call_label(call: ToolRecord) -> str:
    """The tool and the beginning of its command or similar, as a label in the waterfall."""
    arguments = call.arguments if isinstance(call.arguments, dict) else {}
    named = [arguments[key] for key in ("command", "path") if isinstance(arguments.get(key), str) and arguments[key]]
    rest = [
        " ".join(map(str, value)) if isinstance(value, list) else str(value)
        for value in map(arguments.get, LABEL_ARGUMENTS)
        if value
    ]
    about = named[0] if named else " ".join(rest)
    return " ".join([call.tool, *about.split(maxsplit=LABEL_WORDS)])[:LABEL_LENGTH]


def _turns(transcript: Transcript, cap: int) -> list[dict[str, Any]]:
    """The conversation in order; a tool message is omitted if its call's record contains everything."""
    recorded = {call.call_id for step in transcript.steps for call in step.tool_calls}
    (only,) = conversations_of(transcript)
    return [
        _turn(message, step, cap)
        for message, step in only.said
        if not (message.get("role") == "tool" and message.get("tool_call_id") in recorded)
    ]


def _of_program(transcript: Transcript, cap: int) -> dict[str, Any]:
    """What an agent program did, and its conversations; empty for the built-in loop."""
    program = transcript.program
    if program is None:
        return {}
    facts = {
        "exit code": "none: it was ended" if program.exit_code is None else str(program.exit_code),
        "settings overruled": ", ".join(program.overruled),
        "dropped from requests": "\n".join(f"{count} × {path}" for path, count in program.dropped.items()),
        "refused requests": "\n".join(program.refused),
        "asked in": ", ".join(f"{name} × {counted['turns']}" for name, counted in by_dialect(transcript).items()),
    }
    about = {
        "name": program.name,
        "took": round(program.duration_s, 4),
        "facts": [[name, _plain(text, cap)] for name, text in facts.items() if text],
        "out": _stream(program.stdout, program.stdout_dropped_bytes, cap),
        "err": _stream(program.stderr, program.stderr_dropped_bytes, cap),
    }
    return {
        "program": about,
        "conversations": [_conversation(each, transcript, cap) for each in conversations_of(transcript)],
    }


def _conversation(one: Conversation, transcript: Transcript, cap: int) -> dict[str, Any]:
    behind = one.record.behind
    row: dict[str, Any] = {
        "number": one.number,
        "main": one.is_main,
        "trained": one.record.trained,
        "tools": one.record.tools,
        "steps": len(one.steps),
    }
    if behind is not None and behind < len(transcript.steps):
        row |= {"behind": behind, "of": transcript.steps[behind].conversation}
    turns = _program_turns(one, cap)
    before = [turn for at, turn in turns if at < one.shared]
    return row | {"before": before, "turns": [turn for _, turn in turns[len(before) :]]}


def _program_turns(one: Conversation, cap: int) -> list[tuple[int, dict[str, Any]]]:
    """Its messages with their places. The outputs of a turn's calls are with the calls: what this conversation was
    shown of them, since another that goes on behind the same answer may have been shown something else."""
    found: list[tuple[int, dict[str, Any]]] = []
    calls: dict[str, tuple[ToolRecord, dict[str, Any]]] = {}
    for at, (message, step) in enumerate(one.said):
        if message.get("role") == "tool" and (called := calls.get(str(message.get("tool_call_id")))):
            call, shown = called
            output = text_of(message.get("content"))
            shown |= {"back": True, "shown": _plain(output, cap)}
            if output == call.shown:
                shown["within"] = round(call.ended_s - call.started_s, 5)
            continue
        turn = _turn(message, step, cap)
        calls = {}
        if step is not None:
            turn |= {"calls": [_unobserved(call, cap) for call in step.tool_calls], "dialect": step.dialect}
            calls = {call.call_id: (call, row) for call, row in zip(step.tool_calls, turn["calls"], strict=True)}
        elif message.get("role") == "assistant":
            turn["own"] = True
        found.append((at, turn))
    return found


def _unobserved(call: ToolRecord, cap: int) -> dict[str, Any]:
    """A call that an agent program ran. Nothing is known of how it ended but what came back."""
    row = {name: value for name, value in _call(call, cap).items() if name not in ("lost", "took")}
    return row | {"back": False, "shown": ""}


def _turn(message: Mapping[str, Any], step: Step | None, cap: int) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": str(message.get("role", "?")), "text": _plain(message.get("content"), cap)}
    parsed = step.reasoning if step is not None else ""  # a managed server's message has no field for it
    if thought := message.get("reasoning_content") or message.get("reasoning") or parsed:
        turn["thought"] = _plain(thought, cap)
    if step is not None:
        turn |= {
            "index": step.index,
            "model": round(step.model_ended_s - step.model_started_s, 4),
            "usage": step.usage,
            "calls": [_call(call, cap) for call in step.tool_calls],
        }
    return turn


def _call(call: ToolRecord, cap: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "tool": call.tool,
        "arguments": _arguments(call.arguments, cap),
        "took": round(call.ended_s - call.started_s, 5),
        "batchWait": round(call.batch_wait_s, 5),
    }
    result = call.result
    if result is None:
        return row | {"lost": True, "shown": _plain(call.shown, cap)}
    image = _image(call.tool, result.content, cap)
    flags = [flag for flag in ("oom_killed", "cancelled") if getattr(result, flag)]
    return row | {
        "exit": result.exit_code,
        "fault": result.fault,
        "error": result.error,
        "message": _plain(result.message, cap),
        "out": _stream(result.stdout, result.stdout_dropped_bytes, cap),
        "err": _stream(result.stderr, result.stderr_dropped_bytes, cap),
        "content": None if result.content is None else _plain(_content(call.tool, result.content, cap), cap),
        "flags": ["timed_out", *flags] if is_timeout(call) else flags,
        "goesOn": result.timed_out and call.tool in SESSION_TOOL_NAMES,
        "queue": round(result.queue_s, 5),
        "run": round(result.duration_s, 5),
        "image": image,
        "cpu": result.cpu_s,
        "memory": result.peak_memory_bytes,
    }


def _content(tool: str, content: Any, cap: int) -> Any:
    """Content as the model reads it, if that is shorter than JSON. A recording is offered once, complete."""
    if isinstance(content, dict) and tool in SESSION_TOOL_NAMES:
        return session_standing(content)
    return content_shown(tool, content, cap) if isinstance(content, dict) and tool in RENDERERS else content


def _image(tool: str, content: Any, cap: int) -> str | None:
    """A screenshot as a data URI, empty if it exceeds the page's budget; None without one."""
    data = content.get("image") if tool == "browser_screenshot" and isinstance(content, dict) else None
    if not isinstance(data, str) or not BASE64.fullmatch(data):
        return None
    return f"data:image/jpeg;base64,{data}" if len(data) <= 4 * cap else ""


def _arguments(arguments: Any, cap: int) -> Any:
    if isinstance(arguments, dict):
        return {str(key): _argument(value, cap) for key, value in arguments.items()}
    return _plain(arguments, cap)


def _argument(value: Any, cap: int) -> str:
    """A short list on one line."""
    line = json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list) else ""
    return line if 0 < len(line) <= LABEL_LENGTH else _plain(value, cap)


def _stream(text: str, dropped_bytes: int, cap: int) -> dict[str, Any] | None:
    if not text and not dropped_bytes:
        return None
    return {"text": _plain(text, cap), "dropped": dropped_bytes, "length": len(text)}


def _plain(value: Any, cap: int) -> str:
    """Any value as text of at most about ``cap`` characters; a cut is marked in place."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1, default=str)
    if len(text) <= cap:
        return text
    note = f"[… {len(text) - cap:,} characters are left out of this page; the records have them …]"
    return f"{text[: cap // 2]}\n{note}\n{text[-(cap // 2) :]}"
