"""The steps of a trajectory of ATIF (:mod:`agentenv.runs.atif`): of the built-in loop, of a program's conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from agentenv.agent.assistant_messages import requested_calls
from agentenv.agent.conversations import Conversation
from agentenv.agent.token_sequences import IGNORED, TokenSequence
from agentenv.agent.transcript import Step, ToolRecord, Transcript, text_of

AtifStep = dict[str, Any]
"""Without its number."""
TOKENS: Final = ("prompt_tokens", "completion_tokens")
_OF_STEP: Final = {"index", "model_started_s", "model_ended_s", "outcome", "conversation", "after", "dialect"}


def steps_of_loop(member: Transcript, tokens: Mapping[int, dict[str, Any]]) -> list[AtifStep]:
    """The opening, and a step for each turn of the built-in loop."""
    return [*_opening(member), *(_agent_step(member, step, tokens.get(step.index, {})) for step in member.steps)]


def steps_of_conversation(
    member: Transcript, conversation: Conversation, tokens: Mapping[int, dict[str, Any]]
) -> list[AtifStep]:
    """A step for each message of an agent program's conversation but the outputs of calls, which are observations of
    the step that called. What it has of the conversation behind whose answer it began is copied context, without
    metrics."""
    found: list[AtifStep] = []
    for at, (message, step) in enumerate(conversation.said):
        if message.get("role") == "tool" and found and found[-1]["source"] == "agent":
            results = found[-1].setdefault("observation", {"results": []})["results"]
            results.append(_output(message, found[-1]))
            continue
        if step is None:
            made = _said(message, time_of(member, _sent_s(conversation, at)))
        else:
            made = _turn(member, step, tokens.get(step.index, {}))
        if at < conversation.shared:
            made = {name: value for name, value in made.items() if name not in ("metrics", "llm_call_count")}
            made["is_copied_context"] = True
        found.append(made)
    return found


def _sent_s(conversation: Conversation, at: int) -> float:
    """When a message that the program wrote was sent: with the request of the next turn."""
    return next((step.model_started_s for _, step in conversation.said[at:] if step is not None), 0.0)


def _said(message: Mapping[str, Any], timestamp: str) -> AtifStep:
    """A message that no turn wrote. Answers that the program wrote itself are an agent's, without a model."""
    role = message.get("role")
    found: AtifStep = {
        "source": role if role in ("system", "user") else "user",
        "message": text_of(message.get("content")),
    }
    more = {**_beside_text(message), **({} if role in ("system", "user", "assistant") else {"role": role})}
    if role == "assistant":
        more.pop("tool_calls", None)
        calls = requested_calls(dict(message), 0)
        found |= {"source": "agent", "llm_call_count": 0}
        if calls:
            found["tool_calls"] = [_made(call.call_id, call.tool, call.arguments) for call in calls]
    return {**found, "timestamp": timestamp, **({"extra": {"message": more}} if more else {})}


def _output(message: Mapping[str, Any], step: AtifStep) -> dict[str, Any]:
    """The output of a call as this conversation was shown it."""
    name, more = message.get("tool_call_id"), _beside_text(message)
    more.pop("tool_call_id", None)
    found = {"content": text_of(message.get("content")), **({"extra": {"message": more}} if more else {})}
    if name in {call["tool_call_id"] for call in step.get("tool_calls", ())}:
        return {"source_call_id": name, **found}
    return {**found, "extra": {"message": {**more, "tool_call_id": name}}}


def _turn(member: Transcript, step: Step, tokens: Mapping[str, Any]) -> AtifStep:
    """A turn of an agent program, without what it was shown of its calls. They were run out of sight: the times in
    their ``extra`` are bounds."""
    found = _agent_step(member, step, tokens)
    found.pop("observation", None)
    for call in found.get("tool_calls", ()):
        del call["extra"]["batch_wait_s"]
    return found


def time_of(member: Transcript, at_s: float) -> str:
    """As the format writes it."""
    return datetime.fromtimestamp(member.began_unix_s + at_s, UTC).isoformat(timespec="milliseconds")


def _before_the_model(member: Transcript) -> list[dict[str, Any]]:
    """The messages that a conversation begins with."""
    first = next((n for n, message in enumerate(member.messages) if message.get("role") == "assistant"), None)
    return [message for message in member.messages[:first] if message.get("role") in ("system", "user")]


def _opening(member: Transcript) -> Iterator[dict[str, Any]]:
    for message in _before_the_model(member):
        step = {
            "source": message["role"],
            "message": text_of(message.get("content")),
            "timestamp": time_of(member, 0.0),
        }
        more = _beside_text(message)
        yield {**step, **({"extra": {"message": more}} if more else {})}


def _beside_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a message but its role and its text."""
    known = {"role", "content"} if isinstance(message.get("content"), str | None) else {"role"}
    return {name: value for name, value in message.items() if name not in known}


def other_messages(member: Transcript) -> list[dict[str, Any]]:
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


def _agent_step(member: Transcript, step: Step, tokens: Mapping[str, Any]) -> AtifStep:
    calls = [_call(call) for call in step.tool_calls if call.tool]
    results = [_result(call) for call in step.tool_calls]
    more = _beside_text(step.message)
    extra = {
        **step.model_dump(include=_OF_STEP),
        **({"problem": step.problem} if step.problem else {}),
        **({"raw": step.raw} if step.raw is not None else {}),
        **({"message": more} if more else {}),
    }
    if cuts := [cut.model_dump() for cut in member.shortenings if cut.step == step.index]:
        extra["shortenings"] = cuts
    found = {
        "source": "agent",
        "timestamp": time_of(member, step.model_started_s),
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
    if metrics := {**metrics_of(step.usage), **tokens}:
        found["metrics"] = metrics
    return found


def _call(call: ToolRecord) -> dict[str, Any]:
    """Arguments that are no object are in ``extra.arguments``, as they were sent."""
    extra = {"started_s": call.started_s, "ended_s": call.ended_s, "batch_wait_s": call.batch_wait_s}
    made = _made(call.call_id, call.tool, call.arguments)
    return {**made, "extra": {**extra, **made.get("extra", {})}}


def _made(name: str, tool: str, arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, dict):
        return {"tool_call_id": name, "function_name": tool, "arguments": arguments}
    return {"tool_call_id": name, "function_name": tool, "arguments": {}, "extra": {"arguments": arguments}}


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


def metrics_of(usage: Mapping[str, Any] | None) -> dict[str, Any]:
    """A turn's tokens, as its server counted them."""
    if not usage:
        return {}
    found: dict[str, Any] = {name: usage[name] for name in TOKENS if isinstance(usage.get(name), int)}
    if (cached := _cached(usage)) is not None:
        found["cached_tokens"] = cached
    if more := {name: value for name, value in usage.items() if name not in found}:
        found["extra"] = more
    return found


def tokens_of_steps(member: Transcript) -> tuple[dict[int, dict[str, Any]], list[TokenSequence]]:
    """By step: its prompt's and its answer's token ids, and the answer's logprobs; and the sequences of conversations
    in which they do not give exactly one answer for each step."""
    found: dict[int, dict[str, Any]] = {}
    rest: list[TokenSequence] = []
    for conversation in sorted({step.conversation for step in member.steps}):
        steps = [step for step in member.steps if step.conversation == conversation]
        places = {step.index: place for place, step in enumerate(steps)}
        sequences = [one for one in member.token_sequences if one.first_step in places]
        answers: dict[int, dict[str, Any]] = {
            places[sequence.first_step] + number: {
                "prompt_token_ids": sequence.tokens[:begin],
                "completion_token_ids": sequence.tokens[begin:end],
                "logprobs": sequence.logprobs[begin:end],
            }
            for sequence in sequences
            for number, (begin, end) in enumerate(_answers(sequence))
        }
        if answers.keys() == set(range(len(steps))) and all(
            (step.usage or {}).get("completion_tokens") == len(answers[place]["completion_token_ids"])
            for place, step in enumerate(steps)
        ):
            found |= {step.index: answers[place] for place, step in enumerate(steps)}
        else:
            rest += sequences
    return found, rest


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
