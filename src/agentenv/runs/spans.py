"""The spans of a group, made from the records of its rollouts. Pure; needs no package of OpenTelemetry.

Names and attributes are those of the GenAI semantic conventions (github.com/open-telemetry/semantic-conventions-genai,
0.1.0); what those have no name for begins with ``agentenv.``. docs/tracing.md lists them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from agentenv.agent.conversations import main_steps
from agentenv.agent.group import outcome_of
from agentenv.agent.jsonable import jsonable
from agentenv.agent.transcript import Phase, ProgramRecord, RunRecord, Step, ToolRecord, Transcript, text_of
from agentenv.wire.leases import RunKind

Attributes = dict[str, str | bool | int | float | Sequence[str]]

_CHILD_PHASES: Final = ("slot_wait", "prepare", "verify", "release")


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One span. ``key`` names it: its id is made from that (:func:`span_id`). ``parent`` is another's key, empty for
    the first of a trace. ``error`` describes why it failed; None: it did not."""

    name: str
    key: str
    parent: str
    began_unix_s: float
    ended_unix_s: float
    attributes: Attributes
    client: bool = False
    """Whether it is a request to another process (kind CLIENT; INTERNAL otherwise)."""
    error: str | None = None
    events: list[tuple[str, float, Attributes]] = field(default_factory=list)
    """(name, unix time, attributes) each."""


@dataclass(frozen=True)
class Served:
    """The model of a run, as its spans name it. ``provider``: the format of its server's API."""

    provider: str
    url: str = ""

    def attributes(self, model: str) -> Attributes:
        """Of every span that is about the model."""
        found: Attributes = {"gen_ai.provider.name": self.provider or "agentenv"}
        if model:
            found["gen_ai.request.model"] = model
        return found

    def address(self) -> Attributes:
        """``server.address`` and ``server.port``; none for a URL without a host."""
        try:
            parts = urlsplit(self.url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            return {}
        return {"server.address": parts.hostname, "server.port": port} if parts.hostname else {}


def trace_id(name: str) -> int:
    """The id of the trace of a run or group, by its name."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=16).digest())


def span_id(key: str) -> int:
    """The id of the span with this key."""
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=8).digest())


def turn_key(attempt: str, index: int) -> str:
    """The key of the request to the model in a turn (0 first) of an attempt, which is named by its slot's name."""
    return f"{attempt}/{index}/chat"


def attempt_name(transcript: Transcript) -> str:
    """The name of the recorded attempt, as its slot and model knew it."""
    return transcript.trajectory + (f"-try{transcript.attempt}" if transcript.attempt > 1 else "")


@dataclass(frozen=True)
class GroupSpans:
    """What makes the spans of a run's groups. ``content``: with the texts of messages, arguments and results."""

    run: RunRecord
    served: Served
    content: bool = False

    def of(
        self, group: str, item: str, kind: RunKind, began_unix_s: float, members: Sequence[Transcript]
    ) -> Iterator[SpanRecord]:
        """Every span of a group, parents first."""
        ends = [began_unix_s, *(t.began_unix_s + _duration_s(t) for t in members)]
        scores = [t.score for t in members if t.score is not None]
        outcome = outcome_of(members)
        attributes: Attributes = {
            **self._of_run(),
            "agentenv.group": group,
            "agentenv.group.kind": kind,
            "agentenv.group.size": len(members),
            "agentenv.group.scored": len(scores),
            "agentenv.group.outcome": outcome,
            "agentenv.item.id": item,
        }
        if scores:
            attributes["agentenv.score.mean"] = sum(scores) / len(scores)
        error = "no member has a score" if outcome == "retry" else None
        yield SpanRecord("group", group, "", began_unix_s, max(ends), attributes, error=error)
        for member in members:
            yield from self._rollout(member, group)

    def _of_run(self) -> Attributes:
        return {"agentenv.run.id": self.run.id, "agentenv.environment": self.run.environment}

    def _model(self) -> Attributes:
        return self.served.attributes(self.run.model)

    def _rollout(self, member: Transcript, group: str) -> Iterator[SpanRecord]:
        began, name = member.began_unix_s, attempt_name(member)
        attributes: Attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": self.run.environment,
            "gen_ai.conversation.id": member.trajectory,
            **self._model(),
            **_usage_of(member),
            **self._of_run(),
            "agentenv.item.id": member.item_id,
            "agentenv.attempt": member.attempt,
            "agentenv.finish_reason": member.finish_reason,
            "agentenv.fault": member.fault,
            "agentenv.model_faults": member.model_faults,
            "agentenv.turns": len(member.steps),
        }
        if member.program is not None:
            attributes |= _of_program(member.program)
        if member.score is not None:
            attributes["agentenv.score"] = member.score
        if member.earlier_attempts:
            attributes["agentenv.earlier_attempts"] = list(member.earlier_attempts)
        if member.fault != "none":
            attributes["error.type"] = _error_type(member.error, member.fault)
        if self.content:
            attributes |= _conversation(member)
        ended = began + _duration_s(member)
        error = (member.error or member.fault) if member.fault != "none" else None
        yield SpanRecord(
            f"invoke_agent {self.run.environment}", member.trajectory, group, began, ended, attributes, error=error
        )
        for number, phase in enumerate(member.phases):
            if phase.name in _CHILD_PHASES:
                yield _phase(member, phase, f"{name}/{phase.name}{number}")
        for step in member.steps:
            yield from self._turn(member, step, name)
        yield from self._failed_turns(member, name)

    def _turn(self, member: Transcript, step: Step, name: str) -> Iterator[SpanRecord]:
        began, key = member.began_unix_s, f"{name}/{step.index}"
        ended_s = max([step.model_ended_s, *(call.ended_s for call in step.tool_calls)])
        attributes: Attributes = {"agentenv.turn": step.index + 1, "agentenv.turn.outcome": step.outcome}
        if member.program is not None:
            attributes |= {"agentenv.conversation": step.conversation, "agentenv.dialect": step.dialect}
        span = SpanRecord("turn", key, member.trajectory, began + step.model_started_s, began + ended_s, attributes)
        for cut in member.shortenings:
            if cut.step == step.index:
                removed: Attributes = {"agentenv.outputs": cut.outputs, "agentenv.bytes_removed": cut.bytes_removed}
                span.events.append(("agentenv.shortening", began + step.model_started_s, removed))
        if step.problem:
            problem: Attributes = {"error.type": "malformed_call", "agentenv.fault": "model"}
            if self.content:
                problem["agentenv.message"] = step.problem
            span.events.append(("agentenv.malformed_call", began + step.model_ended_s, problem))
        yield span
        yield self._chat(member, step, name)
        for number, call in enumerate(step.tool_calls):
            if call.tool:  # else it could not be read as a call, and nothing was executed
                yield self._call(member, call, f"{key}/{number}", key)

    def _chat(self, member: Transcript, step: Step, name: str) -> SpanRecord:
        attributes = self._of_chat(member) | _usage(step.usage)
        if step.outcome == "truncated":
            attributes["gen_ai.response.finish_reasons"] = ["length"]
        if self.content:
            attributes["gen_ai.output.messages"] = _json([_written(step)])
        return self._request(
            member,
            turn_key(name, step.index),
            f"{name}/{step.index}",
            step.model_started_s,
            step.model_ended_s,
            attributes,
        )

    def _of_chat(self, member: Transcript) -> Attributes:
        return {
            "gen_ai.operation.name": "chat",
            **self._model(),
            **self.served.address(),
            "gen_ai.conversation.id": member.trajectory,
        }

    def _request(
        self,
        member: Transcript,
        key: str,
        parent: str,
        started_s: float,
        ended_s: float,
        attributes: Attributes,
        error: str | None = None,
    ) -> SpanRecord:
        began = member.began_unix_s
        name = f"chat {self.run.model}".rstrip()
        return SpanRecord(name, key, parent, began + started_s, began + ended_s, attributes, client=True, error=error)

    def _failed_turns(self, member: Transcript, name: str) -> Iterator[SpanRecord]:
        """Requests that gave no message: that of the error which ended the rollout, and those that did not fit the
        context; of an agent program also those that it did not wait for."""
        other = ("context_overflow", "the conversation does not fit the model's context")
        if member.program is not None:
            other = ("_OTHER", "it had no answer")
        answered = {step.model_started_s for step in member.steps}
        phases = [phase for phase in member.phases if phase.name == "model"]
        failed = [phase for phase in phases if phase.started_s not in answered]
        for number, phase in enumerate(failed):
            ended_it = phase is phases[-1] and member.fault == "infra"
            kind, error = (_error_type(member.error), member.error) if ended_it else other
            attributes = self._of_chat(member) | {"error.type": kind}
            # The request that ended it bore the id of the turn that it would have been.
            key = turn_key(name, len(member.steps)) if ended_it else f"{name}/failed{number}"
            yield self._request(member, key, member.trajectory, phase.started_s, phase.ended_s, attributes, error)

    def _call(self, member: Transcript, call: ToolRecord, key: str, parent: str) -> SpanRecord:
        began, result = member.began_unix_s, call.result
        attributes: Attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": call.tool,
            "gen_ai.tool.call.id": call.call_id,
            "gen_ai.tool.type": "function",
            "agentenv.call.batch_wait_s": call.batch_wait_s,
        }
        error: str | None = None
        if result is not None:
            error = (result.message or result.error or result.fault) if result.fault != "none" else None
            attributes |= {"agentenv.call.queue_s": result.queue_s, "agentenv.call.run_s": result.duration_s}
            attributes |= {"agentenv.fault": result.fault}
            if result.exit_code is not None:
                attributes["process.exit.code"] = result.exit_code
            attributes |= {
                f"agentenv.call.{flag}": True
                for flag in ("timed_out", "oom_killed", "truncated", "cancelled")
                if getattr(result, flag)
            }
            if result.fault != "none":
                attributes["error.type"] = result.error or result.fault
        elif member.program is None:  # a program runs its calls out of sight
            error, attributes["error.type"] = "it has no result", "call_lost"
        if self.content:
            attributes["gen_ai.tool.call.arguments"] = _json(call.arguments)
            attributes["gen_ai.tool.call.result"] = call.shown
        times = began + call.started_s, began + call.ended_s
        return SpanRecord(f"execute_tool {call.tool}", key, parent, *times, attributes, error=error)


def _of_program(program: ProgramRecord) -> Attributes:
    found: Attributes = {
        "agentenv.program.name": program.name,
        "agentenv.program.conversations": len(program.conversations),
        "agentenv.program.dropped": sum(program.dropped.values()),
        "agentenv.program.refused": len(program.refused),
    }
    return found if program.exit_code is None else {**found, "process.exit.code": program.exit_code}


def _phase(member: Transcript, phase: Phase, key: str) -> SpanRecord:
    began = member.began_unix_s
    attributes: Attributes = {"agentenv.label": phase.label} if phase.label else {}
    times = began + phase.started_s, began + phase.ended_s
    return SpanRecord(phase.name, key, member.trajectory, *times, attributes)


def _duration_s(member: Transcript) -> float:
    ends = [phase.ended_s for phase in member.phases]
    return max([0.0, member.totals.get("total_s", 0.0), *ends])


def _error_type(error: str, otherwise: str = "_OTHER") -> str:
    """The class that an error's text begins with."""
    kind, colon, _ = error.partition(":")
    return kind if colon and kind.isidentifier() else otherwise


def _usage(usage: dict[str, Any] | None) -> Attributes:
    found = usage or {}
    prompt, answer = found.get("prompt_tokens_details") or {}, found.get("completion_tokens_details") or {}
    numbers = {
        "gen_ai.usage.input_tokens": found.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": found.get("completion_tokens"),
        "gen_ai.usage.cache_read.input_tokens": prompt.get("cached_tokens") if isinstance(prompt, dict) else None,
        "gen_ai.usage.reasoning.output_tokens": answer.get("reasoning_tokens") if isinstance(answer, dict) else None,
    }
    return {name: number for name, number in numbers.items() if isinstance(number, int) and 0 <= number < 2**63}


def _usage_of(member: Transcript) -> Attributes:
    """The sums over its turns, of what any turn has."""
    sums: dict[str, int] = {}
    for step in member.steps:
        for name, number in _usage(step.usage).items():
            assert isinstance(number, int)
            sums[name] = sums.get(name, 0) + number
    return {**sums}


def _conversation(member: Transcript) -> Attributes:
    """What the agent was given, and its last answer. The turns have the rest."""
    given = []
    for message in member.messages:
        if message.get("role") == "assistant":
            break
        given.append({"role": str(message.get("role")), "parts": [_text(text_of(message.get("content")))]})
    found: Attributes = {"gen_ai.input.messages": _json(given)}
    if steps := main_steps(member):
        found["gen_ai.output.messages"] = _json([_written(steps[-1])])
    return found


def _written(step: Step) -> dict[str, Any]:
    """What the model wrote in a turn, by the conventions' schema of output messages."""
    parts = [{"type": "reasoning", "content": step.reasoning}] if step.reasoning else []
    if (text := text_of(step.message.get("content"))) or not step.tool_calls:
        parts.append(_text(text))
    calls = [
        {"type": "tool_call", "id": call.call_id, "name": call.tool, "arguments": call.arguments}
        for call in step.tool_calls
        if call.tool
    ]
    ended = {"truncated": "length", "tool_calls": "tool_call"}.get(step.outcome, "stop")
    return {"role": "assistant", "parts": [*parts, *calls], "finish_reason": ended}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "content": text}


def _json(value: Any) -> str:
    return json.dumps(jsonable(value), ensure_ascii=False)
