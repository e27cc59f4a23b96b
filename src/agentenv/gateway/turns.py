"""The turns that an agent program asks for in one rollout: their limits, what is recorded, and when it is over.

Whether a rollout is over is decided here and not by the program, whose exit code says little: some programs end with 0
after a request that was refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from agentenv.agent.assistant_messages import RequestedCall, as_history, requested_calls
from agentenv.agent.jsonable import clean_text
from agentenv.agent.loop import outcome_of_turn, step_of, too_small, with_reasoning
from agentenv.agent.models.managed import ManagedModel
from agentenv.agent.models.openai import FIRST_ANSWER_TOKENS, ServedModel, check_first
from agentenv.agent.protocols import Completion, ContextOverflow, Message
from agentenv.agent.result import AgentResult
from agentenv.agent.settings import AgentSettings
from agentenv.agent.timeline import Timeline
from agentenv.agent.transcript import FinishReason, Step, ToolRecord
from agentenv.errors import ConfigError
from agentenv.gateway.canonical import ModelRequest, RefusalError, Shown, shown
from agentenv.gateway.conversations import Conversations, Place, TooManyConversationsError

MOST_OVERFLOWS: Final = 3
"""A program may shorten its conversation and go on. One whose context is too small for it does so for ever."""
MOST_REFUSALS_KEPT: Final = 20
_BYTES_PER_TOKEN: Final = 4
"""For the estimate that is all a program needs when it counts tokens."""


class ProgramTurns:
    """The turns of one rollout. ``result`` is always up to date. ``over`` is set when the program has nothing more to
    do: ``reason`` is why, and ``failure`` what ended it, if it was a failure."""

    def __init__(
        self,
        conversations: Conversations,
        settings: AgentSettings,
        timeline: Timeline,
        *,
        reasoning: bool = False,
        turn_headers: Callable[[int], dict[str, str]] | None = None,
    ) -> None:
        """``reasoning``: the program is shown the model's. ``turn_headers``: as for the built-in loop."""
        self._conversations = conversations
        self._settings = settings
        self._timeline = timeline
        self._reasoning = reasoning
        self._turn_headers = turn_headers
        self._begun = 0
        self._overflows = 0
        self.out_of_room = False
        """Whether the last turn did not fit the context."""
        self.result = AgentResult(messages=[], phases=timeline.phases)
        self.over = asyncio.Event()
        self.reason: FinishReason | None = None
        self.failure: Exception | None = None
        self.refused: list[str] = []
        """Why requests were refused; the first MOST_REFUSALS_KEPT."""
        self.dropped: Counter[str] = Counter()
        self.overruled: dict[str, None] = {}

    def end(self, reason: FinishReason, failure: Exception | None = None) -> None:
        """The rollout is over; only the first reason counts."""
        if not self.over.is_set():
            self.reason, self.failure = reason, failure
            self.over.set()

    async def generate(self, request: ModelRequest, number: int) -> Shown:
        """The next turn, the ``number``-th that was begun. Raises: RefusalError, ContextOverflow, InfraError, each of
        which a program is answered; anything else is a defect."""
        try:
            return await self._next(request, number)
        except RefusalError as refusal:
            self._note(refusal)
            raise
        except ContextOverflow as overflow:
            self._overflown(overflow)
            raise
        except TooManyConversationsError as error:
            self.end("max_conversations")
            over = RefusalError(f"this rollout is over: {error}", status=403)
            self._note(over)
            raise over from error
        except ConfigError as error:
            if not self.result.steps:  # the settings are wrong, whatever is requested
                self.end("fault", error)
                raise
            unusable = RefusalError(f"no prompt can be made of this request: {error}")
            self._note(unusable)
            raise unusable from error
        except Exception as error:
            self.end("fault", error)
            raise

    def refuse(self, refusal: RefusalError) -> None:
        """A request was refused before it became a turn. It counts as one: a program could send such for ever."""
        self._note(refusal)
        self._begun += 1
        if self._begun >= self._settings.max_steps:
            self.end("max_steps")

    def _note(self, refusal: RefusalError) -> None:
        if len(self.refused) < MOST_REFUSALS_KEPT:
            self.refused.append(clean_text(refusal.message))

    def count(self, request: ModelRequest) -> int:
        """An estimate of the tokens of a prompt, for programs that ask before they send it."""
        counted = sum(len(str(message).encode("utf-8", "replace")) for message in [*request.messages, *request.tools])
        return counted // _BYTES_PER_TOKEN

    async def _next(self, request: ModelRequest, number: int) -> Shown:
        if self.over.is_set():
            raise RefusalError(f"this rollout is over: {self.reason}", status=403)
        if self._begun >= self._settings.max_steps:
            self.end("max_steps")
            raise RefusalError(f"this rollout is over: it has had its {self._begun} turns", status=403)
        self._begun += 1
        self.dropped.update(request.dropped)
        self.overruled.update(dict.fromkeys(request.overruled))
        async with self._conversations.place_of(request) as place:
            self._results(place)
            done, started_s = await self._completed(request, place)
            self.out_of_room = False
            step = self._step(place, done, started_s, request.dialect)
            seen = shown(request, done, number, reasoning=self._reasoning)
            calls = requested_calls(done.message, number)
            place.answered(step.index, self._kept(done, calls), seen.message)
            self._record_calls(step, done, calls)
            return seen

    async def _completed(self, request: ModelRequest, place: Place) -> tuple[Completion, float]:
        """The model's answer, and when it was asked."""
        params = self._settings.sampling()
        limits = [limit for limit in (params.get("max_tokens"), request.max_tokens) if limit is not None]
        if limits:
            params["max_tokens"] = min(limits)
        if self._turn_headers is not None:
            params["extra_headers"] = self._turn_headers(len(self.result.steps))
        model = place.conversation.model
        if isinstance(model, ManagedModel | ServedModel):
            model.turns_before = len(self.result.steps)
        if isinstance(model, ManagedModel):
            model.least_tokens = FIRST_ANSWER_TOKENS
        with self._timeline.phase("model", f"step {len(self.result.steps) + 1}") as started_s:
            done = await model.complete(place.messages, request.tools, **params)
        if not isinstance(model, ManagedModel):
            check_first(done, params.get("max_tokens"))
        return done, started_s

    def _step(self, place: Place, done: Completion, started_s: float, dialect: str) -> Step:
        step = step_of(done, len(self.result.steps), started_s, self._timeline.now())
        step.problem, step.dialect = clean_text(done.problem), dialect
        step.conversation, step.after = place.conversation.index, place.after
        self.result.steps.append(step)
        self.result.model_faults += bool(done.problem)
        return step

    def _kept(self, done: Completion, calls: Sequence[RequestedCall]) -> Message:
        """The answer as it is sent back to the model."""
        history = as_history(done.message, calls)
        return with_reasoning(history, done.message) if self._settings.send_reasoning else history

    def _record_calls(self, step: Step, done: Completion, calls: Sequence[RequestedCall]) -> None:
        step.outcome = outcome_of_turn(done, calls)
        step.tool_calls = [
            ToolRecord(
                call_id=call.call_id,
                tool=call.tool,
                arguments=call.arguments,
                started_s=step.model_ended_s,
                ended_s=step.model_ended_s,
            )
            for call in calls
        ]

    def _results(self, place: Place) -> None:
        """Record what the program shows the model of the calls in the answer that it continues, the first time."""
        if place.after is None:
            return
        step = self.result.steps[place.after]
        results = {one["tool_call_id"]: one["content"] for one in place.new if one["role"] == "tool"}
        ended = [call for call in step.tool_calls if call.call_id in results and call.ended_s == call.started_s]
        for call in ended:
            call.shown, call.ended_s = results[call.call_id], self._timeline.now()
        if ended:
            self._timeline.record("tool", step.model_ended_s, "program")

    def _overflown(self, overflow: ContextOverflow) -> None:
        self._overflows += 1
        self.out_of_room = True
        if not self.result.steps:  # nothing was generated, so there is no rollout to score
            self.end("fault", too_small(overflow, self._settings))
        elif self._overflows >= MOST_OVERFLOWS:
            self.end("context_overflow")
