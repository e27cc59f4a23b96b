from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agentenv.agent.assistant_messages import as_history, requested_calls
from agentenv.agent.loop import AgentLoop
from agentenv.agent.protocols import Completion, ContextOverflow
from agentenv.agent.settings import AgentSettings, default_system_prompt, opening
from agentenv.agent.timeline import Timeline
from agentenv.errors import CallLostError, ConfigError, ContainerLostError, LeaseLostError
from agentenv.wire.calls import CallResult
from tests.unit.agent.agent_stubs import TOOLS, StubModel, StubSession, calling, echo, ok, saying

START = opening("system", "task")


def loop(model: StubModel, session: StubSession, **settings: object) -> AgentLoop:
    return AgentLoop(model, session, TOOLS, AgentSettings(**settings))  # type: ignore[arg-type]


async def test_calls_run_in_order_and_the_model_sees_each_result() -> None:
    session = StubSession("t", echo)
    model = StubModel(calling(("bash", '{"command": "a"}'), ("read_file", '{"path": "b"}')), saying("fin"))
    result = await loop(model, session, tool_timeout_s=7.0).run(START)
    assert [call[0] for call in session.calls] == ["bash", "read_file"]
    assert session.calls[0] == ("bash", {"command": "a"}, 7.0)
    roles = [message["role"] for message in result.messages]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert result.messages[3]["tool_call_id"] == "id0"
    assert "stdout:\nbash {'command': 'a'}" in result.messages[3]["content"]
    assert (result.final_response, result.finish_reason, result.model_faults) == ("fin", "stop", 0)
    assert [phase.name for phase in result.phases] == ["model", "tool", "tool", "model"]
    record = result.steps[0].tool_calls[0]
    assert (record.batch_wait_s, record.arguments) == (0.5, {"command": "a"})
    assert record.result is not None
    assert record.result.duration_s == 0.25
    assert result.steps[0].usage == {"total_tokens": 3}


async def test_sampling_reaches_the_model_and_only_what_was_set() -> None:
    model = StubModel(saying("x"))
    await loop(model, StubSession("t", echo), temperature=0.0, max_tokens=9).run(START)
    assert model.params == [{"temperature": 0.0, "max_tokens": 9}]


async def test_an_unknown_tool_is_answered_with_the_tools_there_are_and_runs_nothing() -> None:
    session = StubSession("t", echo)
    result = await loop(StubModel(calling(("python", "{}")), saying("x")), session).run(START)
    assert session.calls == []
    assert result.model_faults == 1
    shown = result.messages[3]["content"]
    assert "error:" in shown
    assert "bash" in shown


async def test_an_argument_that_is_for_code_only_is_unknown_and_runs_nothing() -> None:
    session = StubSession("t", echo)
    result = await loop(StubModel(calling(("bash", '{"command": "id", "user": "root"}')), saying("x")), session).run(
        START
    )
    assert session.calls == []
    assert result.messages[3]["content"] == "error: bash: unknown argument 'user'"


async def test_a_tool_s_name_that_is_nearly_right_is_answered_with_the_closest_offered() -> None:
    model = StubModel(calling(("ReadFile", "{}")), calling(("bsh", "{}")), saying("x"))
    result = await loop(model, StubSession("t", echo), tools=("read_file",)).run(START)
    answers = [message["content"] for message in result.messages if message["role"] == "tool"]
    assert answers == [
        """error: unknown tool "ReadFile"; did you mean 'read_file'? available tools: read_file""",
        """error: unknown tool "bsh"; available tools: read_file""",
    ]


async def test_a_tool_outside_the_item_s_own_is_unknown() -> None:
    session = StubSession("t", echo)
    model = StubModel(calling(("bash", '{"command": "a"}')), saying("x"))
    result = await loop(model, session, tools=("read_file",)).run(START)
    assert model.tools == ["read_file"]
    assert session.calls == []
    assert result.model_faults == 1


async def test_unparsable_arguments_reach_the_session_as_sent_and_the_history_stays_valid_json() -> None:
    def refuse(_: str, tool: str, arguments: object) -> CallResult:
        assert arguments == '{"command": '
        return CallResult(id="c", fault="model", error="invalid_arguments", message="not valid JSON")

    result = await loop(StubModel(calling(("bash", '{"command": ')), saying("x")), StubSession("t", refuse)).run(START)
    assert result.model_faults == 1
    assert result.messages[3]["content"] == "error: not valid JSON"
    sent = result.messages[2]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(sent) == {"unparsable": '{"command": '}
    assert result.steps[0].message["tool_calls"][0]["function"]["arguments"] == '{"command": '
    assert result.steps[0].tool_calls[0].arguments == '{"command": '


@pytest.mark.parametrize(
    "raw",
    [
        [None],
        ["x"],
        [{}],
        [{"function": None}],
        [{"function": {"name": 3, "arguments": 4}}],
        {"function": {"name": "bash", "arguments": "[1]"}},
        [{"id": "a", "function": {"name": "b\ud800", "arguments": "[" * 100_000}}],
    ],
)
def test_no_malformed_call_breaks_reading(raw: object) -> None:
    calls = requested_calls({"role": "assistant", "tool_calls": raw}, 0)
    assert len(calls) == 1
    history = as_history({"content": None}, calls)
    assert history["content"] == ""
    for call in history["tool_calls"]:
        json.loads(call["function"]["arguments"])
        call["function"]["name"].encode()


@pytest.mark.parametrize("arguments", ['{"command": "ls", "command": "rm"}', '{"command": NaN}', '{"command": 1e999}'])
def test_arguments_that_python_would_change_are_handed_on_as_text_to_be_refused(arguments: str) -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "bash", "arguments": arguments}}]}
    assert requested_calls(message, 0)[0].arguments == arguments


async def test_max_steps_ends_it() -> None:
    model = StubModel(calling(("bash", "{}"), text="working"))
    result = await loop(model, StubSession("t", echo), max_steps=3).run(START)
    assert (result.finish_reason, len(result.steps), result.final_response) == ("max_steps", 3, "working")


async def test_a_cut_answer_says_length() -> None:
    result = await loop(StubModel(saying("cut", "length")), StubSession("t", echo)).run(START)
    assert result.finish_reason == "length"


async def test_a_conversation_too_long_ends_the_rollout_with_what_there_is() -> None:
    model = StubModel(calling(("bash", "{}")), ContextOverflow("too long"))
    result = await loop(model, StubSession("t", echo)).run(START)
    assert result.finish_reason == "context_overflow"
    assert result.messages[-1]["role"] == "tool"


async def test_no_turn_and_no_call_begins_after_its_time() -> None:
    now = [100.0]

    def slow(*_: Any) -> CallResult:
        now[0] += 6.0
        return ok("done")

    session, model = StubSession("t", slow), StubModel(calling(*[("bash", "{}")] * 3))
    made = AgentLoop(model, session, TOOLS, AgentSettings(max_s=10.0), Timeline(lambda: now[0]))
    result = await made.run(START)
    assert (result.finish_reason, len(result.steps), len(session.calls)) == ("max_time", 1, 2)
    assert "time limit of this task has been reached" in result.messages[-1]["content"], "every call has its answer"
    dawdling = AgentLoop(model, session, TOOLS, AgentSettings(max_s=1e-9), Timeline())
    assert len((await dawdling.run(START)).steps) == 1, "the first turn is had whatever happens"


async def test_a_first_prompt_that_does_not_fit_is_a_setting_gone_wrong_not_a_rollout() -> None:
    with pytest.raises(ConfigError, match=r"first prompt does not fit: too long.*max_token_length"):
        await loop(StubModel(ContextOverflow("too long")), StubSession("t", echo)).run(START)
    with pytest.raises(ConfigError, match=r"^agent_context_tokens: "):
        await loop(StubModel(ContextOverflow("too long")), StubSession("t", echo), context_tokens=5).run(START)


async def test_an_infra_failure_is_raised_never_shown_and_leaves_the_record_so_far() -> None:
    def die(*_: object) -> CallResult:
        raise ContainerLostError("gone")

    agent = loop(StubModel(calling(("bash", "{}"))), StubSession("t", die))
    with pytest.raises(ContainerLostError):
        await agent.run(START)
    assert [message["role"] for message in agent.result.messages] == ["system", "user", "assistant"]
    assert agent.result.steps[0].tool_calls[0].result is None


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (CallResult(id="c", fault="infra", error="container_lost", message="m"), ContainerLostError),
        (ok(cancelled=True), CallLostError),
    ],
)
async def test_an_infra_result_that_slipped_through_is_raised_too(result: CallResult, kind: type[Exception]) -> None:
    agent = loop(StubModel(calling(("bash", "{}"))), StubSession("t", lambda *_: result))
    with pytest.raises(kind):
        await agent.run(START)


def test_tools_chosen_for_an_item_must_exist() -> None:
    with pytest.raises(ConfigError, match="'python'"):
        loop(StubModel(saying("x")), StubSession("t", echo), tools=("bash", "python"))


async def test_a_flood_of_calls_in_one_message_is_cut() -> None:
    session = StubSession("t", echo)
    model = StubModel(calling(*[("bash", "{}")] * 5), saying("x"))
    result = await loop(model, session, max_calls_per_turn=2).run(START)
    assert len(session.calls) == 2
    assert result.model_faults == 3
    assert "only the first 2" in result.messages[-2]["content"]


async def test_content_in_parts_is_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    model = StubModel(Completion({"role": "assistant", "content": parts}))
    assert (await loop(model, StubSession("t", echo)).run(START)).final_response == "ab"


async def test_other_names_of_tools_are_accepted_where_the_settings_allow_it() -> None:
    session = StubSession("t", echo)
    model = StubModel(calling(("terminal_stateful", '{"command": "a"}')), calling(("other", "{}")), saying("x"))
    result = await loop(model, session, tool_aliases={"terminal_stateful": "bash", "other": "absent"}).run(START)
    assert [call[0] for call in session.calls] == ["bash"]
    assert [call.tool for step in result.steps for call in step.tool_calls] == ["bash", "absent"]
    assert result.model_faults == 1


async def test_a_slot_without_a_tool_call_is_given_up() -> None:
    class Slow(StubModel):
        async def complete(self, *args: Any, **params: Any) -> Completion:
            if len(self.params) == 1:
                await asyncio.Event().wait()
            return await super().complete(*args, **params)

    model = Slow(calling(("bash", '{"command": "a"}')), saying("late"))
    settings, standing = AgentSettings(max_idle_s=0.05), Timeline(lambda: 0.0)
    agent = AgentLoop(model, StubSession("t", echo), TOOLS, settings, standing)
    with pytest.raises(LeaseLostError, match=r"released after 0.05 s without a tool call"):
        await agent.run(START)
    assert len(agent.result.steps) == 1


@pytest.mark.parametrize(
    ("offered", "said", "unsaid"),
    [
        (("bash", "read_file"), "Each bash call starts a new shell", "terminal tool"),
        (("terminal", "process"), "The shell of the terminal tool persists", "Each bash call"),
        (("read_file",), "Your files are in /workspace", "by running it"),
        (("web_search",), "You solve tasks by calling tools. Work step by step, and when", "/workspace"),
    ],
)
def test_the_default_prompt_describes_the_tools_that_are_offered(
    offered: tuple[str, ...], said: str, unsaid: str
) -> None:
    prompt = default_system_prompt(offered)
    assert said in prompt
    assert unsaid not in prompt


def test_a_conversation_opens_with_the_prompt_of_its_settings() -> None:
    session = StubSession("t", echo)
    assert loop(StubModel(), session, system_prompt="").opening("do") == [{"role": "user", "content": "do"}]
    assert loop(StubModel(), session, system_prompt="be").opening("do")[0] == {"role": "system", "content": "be"}
    default = loop(StubModel(), session, tools=("bash",)).opening("do")[0]["content"]
    assert default == default_system_prompt(["bash"])
