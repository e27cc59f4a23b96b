"""What a model turn can come to besides calls and answers: unreadable, cut, too long; reasoning; the budget."""

from __future__ import annotations

from typing import Any

import pytest

from agentenv.agent.context_budget import HEAD_BYTES, ContextBudget, shorten
from agentenv.agent.loop import AgentLoop
from agentenv.agent.models.openai import completion_of
from agentenv.agent.protocols import Completion, ContextOverflow, opened
from agentenv.agent.settings import AgentSettings, opening
from tests.unit.agent.agent_stubs import TOOLS, StubModel, StubSession, calling, echo, ok, saying

START = opening("system", "task")
BROKEN = Completion(
    {"role": "assistant", "content": "<tool_call>{"}, problem="not JSON. Write it so: ...", raw="<tool_call>{"
)


def loop(model: StubModel, session: StubSession | None = None, **settings: Any) -> AgentLoop:
    return AgentLoop(model, session or StubSession("t", echo), TOOLS, AgentSettings(**settings))


async def test_an_unreadable_call_is_answered_counted_and_the_rollout_goes_on() -> None:
    result = await loop(StubModel(BROKEN, saying("fin"))).run(START)
    assert [message["role"] for message in result.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert result.messages[2]["content"] == "<tool_call>{"
    assert result.messages[3]["content"] == "error: not JSON. Write it so: ..."
    assert (result.model_faults, result.finish_reason, result.final_response) == (1, "stop", "fin")
    first, last = result.steps
    assert (first.outcome, first.problem, first.raw) == ("malformed", "not JSON. Write it so: ...", "<tool_call>{")
    (record,) = first.tool_calls
    assert record.result is not None
    assert (record.tool, record.arguments, record.result.fault) == ("", "<tool_call>{", "model")
    assert last.outcome == "answer"


async def test_calls_beside_an_unreadable_one_are_run_first() -> None:
    good = calling(("bash", '{"command": "ls"}'))
    both = Completion(good.message, "tool_calls", problem="call 2 is not closed")
    session = StubSession("t", echo)
    result = await loop(StubModel(both, saying("fin")), session).run(START)
    assert len(session.calls) == 1
    assert [message["role"] for message in result.messages[2:]] == ["assistant", "tool", "user", "assistant"]
    assert [step.outcome for step in result.steps] == ["malformed", "answer"]


async def test_a_model_that_never_writes_a_readable_call_ends_at_its_steps() -> None:
    result = await loop(StubModel(BROKEN), max_steps=3).run(START)
    assert (result.finish_reason, result.model_faults, len(result.steps)) == ("max_steps", 3, 3)


async def test_a_cut_message_is_a_turn_of_its_own_kind() -> None:
    cut_call = Completion(BROKEN.message, "length", problem="cut off")
    result = await loop(StubModel(cut_call, saying("fi", "length"))).run(START)
    assert [step.outcome for step in result.steps] == ["truncated", "truncated"]
    assert result.finish_reason == "length"


async def test_the_last_call_of_a_cut_message_is_not_run_unless_its_text_shows_that_it_is_whole() -> None:
    both = calling(("bash", '{"command": "a"}'), ("bash", '{"command": "rm -rf /tmp/x"}')).message
    for raw, ran in ((None, 1), ("as written", 2)):
        session = StubSession("t", echo)
        result = await loop(StubModel(Completion(both, "length", raw=raw), saying("fin")), session).run(START)
        assert len(session.calls) == ran
        assert result.model_faults == 2 - ran
        assert ("reached its length limit" in result.messages[4]["content"]) is (raw is None)
        assert result.steps[0].outcome == "truncated"


@pytest.mark.parametrize("send", [False, True])
async def test_reasoning_is_kept_and_sent_back_only_when_asked_for(send: bool) -> None:
    message = {**calling(("bash", "{}")).message, "reasoning_content": "I think"}
    model = StubModel(Completion(message, reasoning="I think"), saying("fin"))
    result = await loop(model, send_reasoning=send).run(START)
    assert result.steps[0].reasoning == "I think"
    assert ("reasoning_content" in model.asked[1][2]) is send


def test_a_server_s_reasoning_field_is_read() -> None:
    class Message:
        def model_dump(self, **_: Any) -> dict[str, Any]:
            return {"content": "a", "reasoning": "because"}

    class Choice:
        message = Message()
        finish_reason = "stop"

    class Reply:
        choices = (Choice(),)

    assert completion_of(Reply()).reasoning == "because"


# -- the budget -----------------------------------------------------------------------------------


def conversation(*outputs: str) -> list[dict[str, Any]]:
    turns = [
        [{"role": "assistant", "content": ""}, {"role": "tool", "tool_call_id": "x", "content": o}] for o in outputs
    ]
    return [*START, *(message for turn in turns for message in turn)]


def test_all_but_the_last_outputs_are_shortened_once_and_say_so() -> None:
    given = conversation("ü" * 1000, "b" * 1000, "small", "d" * 1000)
    fitted, told = shorten(given, 1, 7)
    assert told is not None
    assert (told.step, told.outputs, told.bytes_removed) == (7, 2, 3000 - 2 * HEAD_BYTES)
    assert fitted[3]["content"].startswith("ü" * 128 + "\n[... 1744 more bytes of this old output were removed")
    assert [fitted[at]["content"] for at in (7, 9)] == ["small", "d" * 1000]
    assert given[3]["content"] == "ü" * 1000, "the given messages are left alone"
    assert shorten(fitted, 1, 8) == (fitted, None)
    assert shorten(given, 0, 0)[1].outputs == 3  # type: ignore[union-attr]
    assert shorten(given, 9, 0)[1] is None


def test_the_budget_learns_from_the_server_s_counts() -> None:
    budget = ContextBudget(AgentSettings(context_tokens=5000, keep_tool_outputs=1, max_tokens=100))
    small = conversation("a" * 3000)
    budget.learn(small, {"prompt_tokens": 1500})
    assert budget.fit(small, 1)[1] is None
    larger = conversation("a" * 3000, "b" * 3000)
    budget.learn(larger, {"prompt_tokens": 4500})
    grown = conversation("a" * 3000, "b" * 3000, "c" * 600)
    told = budget.fit(grown, 2)[1]
    assert told is not None, "4500 tokens, 600 bytes at one byte a token, and 100 for the answer"
    assert ContextBudget(AgentSettings(context_tokens=10)).fit(grown, 0) == (grown, None)
    budget.learn(grown, {"prompt_tokens": None})
    budget.learn(grown, None)


async def test_what_does_not_fit_is_shortened_and_asked_again_before_the_rollout_ends() -> None:
    flood = StubSession("t", lambda *_: ok("x" * 5000))
    model = StubModel(
        calling(("bash", "{}")), calling(("bash", "{}")), ContextOverflow("too long"), ContextOverflow("too long")
    )
    result = await loop(model, flood, context_tokens=100_000, keep_tool_outputs=1).run(START)
    assert result.finish_reason == "context_overflow"
    assert [(one.step, one.outputs) for one in result.shortenings] == [(2, 1)]
    assert len(model.asked) == 4
    assert "removed to save context" in model.asked[3][3]["content"]
    assert "removed" not in result.steps[0].tool_calls[0].shown, "the transcript still has it"
    without = await loop(StubModel(calling(("bash", "{}")), ContextOverflow("too long")), flood).run(START)
    assert (without.finish_reason, without.shortenings) == ("context_overflow", [])


async def test_a_model_is_entered_and_left_where_it_can_be() -> None:
    class Opening(StubModel):
        states: list[str] = []  # noqa: RUF012

        async def __aenter__(self) -> Opening:
            self.states.append("in")
            return self

        async def __aexit__(self, *_: object) -> None:
            self.states.append("out")

    model, plain = Opening(saying("x")), StubModel(saying("x"))
    async with opened(model) as entered, opened(plain) as same:
        assert (entered is model, same is plain, model.states) == (True, True, ["in"])
    assert model.states == ["in", "out"]
