"""The agent loop: query the model, run its tool calls, show it the results, until it answers.

Independent of trainer and pool: it takes a model, a session and settings, and produces an :class:`AgentResult`. A
failing command is data; InfraError is never caught here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from agentenv.agent.assistant_messages import RequestedCall, as_history, requested_calls
from agentenv.agent.context_budget import ContextBudget
from agentenv.agent.jsonable import clean_text
from agentenv.agent.observations import cut_middle, shown
from agentenv.agent.protocols import (
    REASONING_FIELDS,
    Completion,
    ContextOverflow,
    Message,
    Model,
    Session,
    ToolDefinition,
)
from agentenv.agent.result import AgentResult
from agentenv.agent.settings import AgentSettings, default_system_prompt, opening
from agentenv.agent.timeline import Timeline
from agentenv.agent.transcript import Shortening, Step, StepOutcome, ToolRecord
from agentenv.errors import ConfigError, LeaseLostError, SlotDestroyedError
from agentenv.tools.schema import explain_unknown
from agentenv.wire.calls import CallResult
from agentenv.wire.sessions import FOR_CODE

UNREADABLE_BYTES = 4096
"""Size of an unreadable call in its record; ``Step.raw`` has all of it."""

MODEL_READ_BYTES = 1024 * 1024
"""How much of a file a model may read in one call."""


def mark_truncated_call(calls: list[RequestedCall], completion: Completion) -> list[RequestedCall]:
    """Mark the last call as possibly truncated when the message was cut and does not show whether inside that call
    (servers that parse messages may close what was left open)."""
    if calls and completion.finish_reason == "length" and completion.raw is None:
        return [*calls[:-1], replace(calls[-1], cut=True)]
    return calls


def with_reasoning(history: Message, sent: Message) -> Message:
    """``history`` with the reasoning fields of its original message, for servers that require them."""
    kept = {name: clean_text(sent[name]) for name in REASONING_FIELDS if isinstance(sent.get(name), str)}
    return {**history, **kept}


def outcome_of_turn(completion: Completion, calls: Sequence[RequestedCall]) -> StepOutcome:
    """The outcome of a model turn."""
    if completion.finish_reason == "length":
        return "truncated"
    if completion.problem:
        return "malformed"
    return "tool_calls" if calls else "answer"


def step_of(completion: Completion, index: int, started_s: float, ended_s: float) -> Step:
    """The record of a model turn, before its calls are run."""
    return Step(
        index=index,
        model_started_s=started_s,
        model_ended_s=ended_s,
        message=completion.message,
        usage=completion.usage,
        reasoning=clean_text(completion.reasoning),
        raw=None if completion.raw is None else clean_text(completion.raw),
    )


def too_small(overflow: ContextOverflow, settings: AgentSettings) -> ConfigError:
    """The error when not even the first prompt fits: nothing was generated, so there is no rollout to score."""
    return ConfigError(
        "agent_context_tokens" if settings.context_tokens is not None else "context length",
        f"the first prompt does not fit: {overflow}",
        next_step="raise its limit (agent_context_tokens, the model server's own limit, the trainer's "
        "max_token_length), or shorten the task, the system prompt or the list of tools",
    )


class AgentLoop:
    """Runs one agent. ``result`` is always up to date, also when :meth:`run` raises."""

    def __init__(
        self,
        model: Model,
        session: Session,
        tools: Sequence[ToolDefinition],
        settings: AgentSettings,
        timeline: Timeline | None = None,
        turn_headers: Callable[[int], dict[str, str]] | None = None,
    ) -> None:
        """``turn_headers``: HTTP headers of the request for a turn (0 first), passed to the model as
        ``extra_headers``."""
        self._model = model
        self._session = session
        self._settings = settings
        self._timeline = timeline or Timeline()
        self._turn_headers = turn_headers
        chosen, known = settings.tools, [tool["function"]["name"] for tool in tools]
        if unknown := sorted(set(chosen or ()) - set(known)):
            raise ConfigError("tools", f"unknown tool {unknown[0]!r}", next_step=f"known: {', '.join(known)}")
        self._tools = [tool for tool in tools if chosen is None or tool["function"]["name"] in chosen]
        self._names = [tool["function"]["name"] for tool in self._tools]
        self._calls_made = 0
        self._began_s = 0.0
        self._last_call_s = 0.0
        self._budget = ContextBudget(settings)
        self.result = AgentResult(messages=[], phases=self._timeline.phases, tools=self._names)

    def opening(self, task: str) -> list[Message]:
        """The first messages of a conversation about ``task``."""
        prompt = self._settings.system_prompt
        return opening(default_system_prompt(self._names) if prompt is None else prompt, task)

    async def run(self, messages: Sequence[Message]) -> AgentResult:
        """Continue ``messages`` until the model answers without a tool call or a limit is met.

        Raises: InfraError when a slot or the model's server failed; SlotDestroyedError when the model's commands
        destroyed its slot; ConfigError when not even the first prompt fits the model. What happened until then
        is in ``result``.
        """
        result = self.result
        result.messages = list(messages)
        self._began_s = self._last_call_s = self._timeline.now()
        begun = len(result.steps)
        for index in range(begun, begun + self._settings.max_steps):
            if index > begun and self._out_of_time():
                result.finish_reason = "max_time"
                return result
            try:
                step, completion = await self._fitting_turn(index)
            except ContextOverflow as overflow:
                if index == 0:
                    raise too_small(overflow, self._settings) from overflow
                result.finish_reason = "context_overflow"
                return result
            calls = mark_truncated_call(requested_calls(step.message, index), completion)
            step.outcome = outcome_of_turn(completion, calls)
            self._remember(step, calls)
            if not calls and not completion.problem:
                result.finish_reason = "length" if step.outcome == "truncated" else "stop"
                return result
            for number, call in enumerate(calls):
                await self._run_call(step, call, number)
            if completion.problem:
                self._answer_problem(step, clean_text(completion.problem))
        result.finish_reason = "max_steps"
        return result

    async def go_on(self, task: str, settings: AgentSettings | None = None) -> AgentResult:
        """Continue the conversation with a further task. Turns and seconds are counted anew, within the same limits or
        those of ``settings`` (whose tools and context tokens are those of the first task). Raises: as :meth:`run`."""
        self._settings = settings or self._settings
        return await self.run([*self.result.messages, {"role": "user", "content": task}])

    def _out_of_time(self) -> bool:
        limit_s = self._settings.max_s
        return limit_s is not None and self._timeline.now() - self._began_s >= limit_s

    async def _fitting_turn(self, index: int) -> tuple[Step, Completion]:
        """A model turn; old outputs are shortened if it would not fit, or did not. Raises: ContextOverflow."""
        self._shortened(self._budget.fit(self.result.messages, index))
        try:
            return await self._turn(index)
        except ContextOverflow:
            if not self._shortened(self._budget.shrink(self.result.messages, index)):
                raise
        return await self._turn(index)

    def _shortened(self, fitted: tuple[list[Message], Shortening | None]) -> bool:
        messages, shortening = fitted
        if shortening is not None:
            self.result.messages = messages
            self.result.shortenings.append(shortening)
        return shortening is not None

    def _remember(self, step: Step, calls: Sequence[RequestedCall]) -> None:
        history = as_history(step.message, calls)
        self.result.messages.append(with_reasoning(history, step.message) if self._settings.send_reasoning else history)
        self.result.final_response = history["content"]

    def _answer_problem(self, step: Step, problem: str) -> None:
        """Report unreadable calls to the model, and count them."""
        now, call_id = self._timeline.now(), f"call_{step.index}_unreadable"
        step.problem = problem
        step.tool_calls.append(
            ToolRecord(
                call_id=call_id,
                tool="",
                arguments=cut_middle(clean_text(step.raw or self.result.final_response), UNREADABLE_BYTES),
                started_s=now,
                ended_s=now,
                result=CallResult(id=call_id, fault="model", error="malformed_call", message=problem),
                shown=f"error: {problem}",
            )
        )
        self.result.model_faults += 1
        self.result.messages.append({"role": "user", "content": f"error: {problem}"})

    async def _turn(self, index: int) -> tuple[Step, Completion]:
        params = self._settings.sampling()
        if self._turn_headers is not None:
            params["extra_headers"] = self._turn_headers(index)
        with self._timeline.phase("model", f"step {index + 1}") as started_s:
            completion: Completion = await self._within_idle_limit(
                self._model.complete(self.result.messages, self._tools, **params)
            )
        step = step_of(completion, index, started_s, self._timeline.now())
        self._budget.learn(self.result.messages, completion.usage)
        self.result.steps.append(step)
        return step, completion

    async def _within_idle_limit(self, turn: Awaitable[Completion]) -> Completion:
        limit_s = self._settings.max_idle_s
        left_s = None if limit_s is None else self._last_call_s + limit_s - self._timeline.now()
        try:
            async with asyncio.timeout(left_s) as within:
                return await turn
        except TimeoutError as error:
            if not within.expired():
                raise
            raise LeaseLostError(f"the slot was released after {limit_s:g} s without a tool call") from error

    async def _run_call(self, step: Step, call: RequestedCall, number: int) -> None:
        if self._calls_made and self._settings.tool_delay_s:
            await asyncio.sleep(self._settings.tool_delay_s)
        self._calls_made += 1
        if call.tool not in self._names:
            call = replace(call, tool=self._settings.tool_aliases.get(call.tool, call.tool))
        now = self._timeline.now()
        record = ToolRecord(call_id=call.call_id, tool=call.tool, arguments=call.arguments, started_s=now, ended_s=now)
        step.tool_calls.append(record)
        try:
            with self._timeline.phase("tool", call.tool or "invalid"):
                record.result = await self._result_of(call, record, number)
        except SlotDestroyedError as error:
            record.result = CallResult(id=call.call_id, fault=error.fault, error=error.code, message=error.message)
            raise
        finally:
            record.ended_s = self._last_call_s = self._timeline.now()
        self.result.model_faults += record.result.fault in ("model", "policy")
        record.shown = clean_text(shown(call.tool, record.result, self._settings.shown_bytes))
        self.result.messages.append({"role": "tool", "tool_call_id": call.call_id, "content": record.shown})

    async def _result_of(self, call: RequestedCall, record: ToolRecord, number: int) -> CallResult:
        if number >= (limit := self._settings.max_calls_per_turn):
            return _refused(
                call, "invalid_arguments", f"not run: only the first {limit} tool calls of a message are executed"
            )
        if call.cut:
            return _refused(
                call, "invalid_arguments", "not run: your message reached its length limit inside this call"
            )
        if self._out_of_time():
            return _refused(call, "invalid_arguments", "not run: the time limit of this task has been reached")
        if call.problem:
            return _refused(call, "invalid_arguments", call.problem)
        if call.tool not in self._names:
            return _refused(call, "unknown_tool", explain_unknown(call.tool, self._names))
        if isinstance(call.arguments, dict) and (
            hidden := FOR_CODE.get(call.tool, frozenset()).intersection(call.arguments)
        ):
            return _refused(call, "invalid_arguments", f"{call.tool}: unknown argument '{min(hidden)}'")
        arguments = bounded(call.tool, call.arguments)
        result = await self._session.call(call.tool, arguments, timeout_s=self._settings.tool_timeout_s)
        record.batch_wait_s = self._session.last_batch_wait_s
        result.raise_failure()
        return result


def bounded(tool: str, arguments: dict[str, Any] | str) -> dict[str, Any] | str:
    """The arguments as executed: a model gets a large file in parts, with a hint how to continue. Code that calls
    the session directly gets whole files."""
    if tool != "read_file" or not isinstance(arguments, dict):
        return arguments
    limit = arguments.get("limit")
    if limit is not None and not (isinstance(limit, int) and limit > MODEL_READ_BYTES):
        return arguments  # small enough, or not a number: reported to the model as such
    return {**arguments, "limit": MODEL_READ_BYTES}


def _refused(call: RequestedCall, error: str, message: str) -> CallResult:
    return CallResult(id=call.call_id, fault="model", error=error, message=message)
