"""What a tool server does with calls: faults, deadlines, budgets, remembered replies, secrets."""

from __future__ import annotations

import asyncio
import math
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from agentenv.api.tool_server.core import ToolServer
from agentenv.api.tool_server.settings import ToolLimits, ToolServerSettings
from agentenv.api.tool_server.tool import ExternalTool, ToolFailure, ToolRun, tool
from agentenv.errors import (
    AcquireTimeoutError,
    CallLostError,
    ConfigError,
    InvalidArgumentsError,
    PolicyRefusalError,
    PoolClosedError,
)
from agentenv.wire.calls import CallResult
from tests.unit.api.tool_server_box import Counted, ask, member, request
from tests.waiting import until


def raising(error: BaseException) -> ExternalTool:
    def act(_: str) -> Any:
        raise error

    return Counted(act).tool()


# -- what a tool is ------------------------------------------------------------------------------------


class Depth(BaseModel):
    levels: int = 1


@tool(timeout_s=5)
async def dig(
    where: Annotated[str, Field(min_length=2, description="The place.")],
    how: Literal["fast", "slow"] = "fast",
    depth: Depth | None = None,
    *,
    run: ToolRun,
) -> dict[str, Any]:
    """Dig
    somewhere.

    Not for the model.
    """
    return {"where": where, "how": how, "levels": depth.levels if depth else 0, "who": run.scope.trajectory}


async def test_the_schema_is_the_signature_and_arguments_arrive_typed() -> None:
    async with ToolServer([dig]) as server:
        (described,) = server.describe().tools
        assert (described.name, described.description, described.timeout_s) == ("dig", "Dig somewhere.", 5)
        parameters: Any = described.parameters
        assert parameters["required"] == ["where"]
        assert parameters["properties"]["where"] == {
            "type": "string",
            "minLength": 2,
            "description": "The place.",
        }
        assert parameters["properties"]["how"]["enum"] == ["fast", "slow"]
        assert "run" not in parameters["properties"]
        assert parameters["additionalProperties"] is False
        result = await ask(server, "dig", where="here", depth={"levels": 3})
    assert result.content == {"where": "here", "how": "fast", "levels": 3, "who": "t-0"}
    assert (result.fault, result.exit_code) == ("none", 0)


async def test_a_tool_is_still_its_function() -> None:
    told = await dig("here", run=ToolRun(member(0)))
    assert told["who"] == "g-0"


def test_what_cannot_be_a_tool_is_refused() -> None:
    async def untyped(word) -> None:  # type: ignore[no-untyped-def]
        """Say."""

    async def silent(word: str) -> None:
        pass

    async def greedy(*words: str) -> None:
        """Say."""

    def plain(word: str) -> None:
        """Say."""

    async def odd(word: ToolServer) -> None:
        """Say."""

    for function, said in (
        (untyped, "has no type"),
        (silent, "no description"),
        (greedy, "cannot be given by name"),
        (plain, "not an async function"),
        (odd, "does not translate to a schema"),
    ):
        with pytest.raises(ConfigError, match=said):
            tool()(function)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="concurrent is 0"):
        Counted().tool(concurrent=0)


def test_a_server_knows_its_tools_limits_and_secrets() -> None:
    with pytest.raises(ConfigError, match="two tools are named"):
        ToolServer([Counted().tool(), Counted().tool(name="other"), Counted().tool()])
    with pytest.raises(ConfigError, match="did you mean 'ask'"):
        ToolServer([Counted().tool()], ToolServerSettings(limits={"asks": ToolLimits(timeout_s=1)}))
    with pytest.raises(ConfigError, match="unknown secret 'vault'"):
        ToolServer([Counted().tool(secrets=("vault",))])


async def test_numbers_that_json_lacks_are_told_as_text() -> None:
    """Never as null, which is another value."""
    numbers = {"loss": math.nan, "bounds": [-math.inf, math.inf], "one": 1.5}
    async with ToolServer([Counted(lambda _: numbers).tool()]) as server:
        result = await ask(server)
    assert result.content == {"loss": "NaN", "bounds": ["-Infinity", "Infinity"], "one": 1.5}
    assert CallResult.model_validate_json(result.model_dump_json()) == result


# -- faults --------------------------------------------------------------------------------------------


async def test_wrong_calls_are_the_models_and_say_how_to_mend_them() -> None:
    async with ToolServer([dig]) as server:
        unknown = await ask(server, "digg")
        wrong = await ask(server, "dig", wher="here")
        short = await ask(server, "dig", where="x", how="soon")
    assert (unknown.fault, unknown.error) == ("model", "unknown_tool")
    assert "did you mean 'dig'?" in unknown.message
    assert (wrong.fault, wrong.error) == ("model", "invalid_arguments")
    assert "missing argument 'where'" in wrong.message
    assert "did you mean 'where'?" in wrong.message
    assert "'fast' or 'slow'" in short.message


@pytest.mark.parametrize(
    ("error", "fault", "code"),
    [
        (InvalidArgumentsError("no such place"), "model", "invalid_arguments"),
        (PolicyRefusalError("not there"), "policy", "refused"),
        (AcquireTimeoutError("all are taken"), "infra", "acquire_timeout"),
        (ValueError("a bug"), "infra", "infra"),
        (TimeoutError("its own"), "infra", "infra"),
    ],
)
async def test_what_a_tool_raises_is_whose_it_is(error: Exception, fault: str, code: str) -> None:
    async with ToolServer([raising(error)]) as server:
        result = await ask(server)
    assert (result.fault, result.error) == (fault, code)
    assert str(error) in result.message


async def test_a_failure_out_there_is_data() -> None:
    async with ToolServer([raising(ToolFailure("HTTP 404"))]) as server:
        result = await ask(server)
    assert (result.fault, result.exit_code, result.stderr) == ("none", 1, "HTTP 404")


async def test_what_cannot_be_json_is_a_broken_tool() -> None:
    async with ToolServer([Counted(lambda _: object()).tool()]) as server:
        assert (await ask(server)).fault == "infra"


async def test_a_hung_tool_is_ended_at_the_shorter_deadline() -> None:
    counted = Counted()
    counted.gate.clear()
    async with ToolServer([counted.tool(timeout_s=0.05)]) as server:
        result = await ask(server)
    assert (result.fault, result.timed_out, result.exit_code) == ("none", True, None)
    assert "after 0.05 s" in result.stderr
    assert counted.cancelled == 1


async def test_large_results_are_cut_and_say_so() -> None:
    huge = {"a": {"url": "u", "text": "ä" * 5_000}, "b": ["x" * 5_000], "c": "\ud800" + "y" * 10}
    async with ToolServer([Counted(huge.__getitem__).tool()], ToolServerSettings(max_result_bytes=1_024)) as server:
        text, other, odd = [await ask(server, word=word) for word in "abc"]
    assert text.truncated
    assert isinstance(text.content, dict)
    assert text.content["url"] == "u"
    assert text.content["truncated"] is True
    assert 400 < len(str(text.content["text"])) < 600
    assert isinstance(other.content, dict)
    assert len(str(other.content["text"])) <= 1_024
    assert odd.content == "\ufffd\ufffd\ufffd" + "y" * 10
    assert CallResult.model_validate_json(odd.model_dump_json()) == odd


# -- concurrency, budgets ------------------------------------------------------------------------------


async def test_no_more_run_at_once_than_a_tool_allows_and_waiting_is_counted() -> None:
    counted = Counted()
    counted.gate.clear()
    async with ToolServer([counted.tool(concurrent=2)]) as server:
        calls = [asyncio.create_task(ask(server, scope=member(n))) for n in range(5)]
        await until(lambda: len(counted.runs) == 2)
        await asyncio.sleep(0.4)
        assert len(counted.runs) == 2
        counted.gate.set()
        results = await asyncio.gather(*calls)
    assert len(counted.runs) == 5
    assert sorted(result.queue_s > 0.3 for result in results) == [False, False, True, True, True]


async def test_budgets_of_trajectory_and_group() -> None:
    counted = Counted()
    settings = ToolServerSettings(limits={"ask": ToolLimits(per_trajectory=2, per_group=5)})
    async with ToolServer([counted.tool()], settings) as server:
        own = [await ask(server, scope=member(0)) for _ in range(3)]
        assert [result.fault for result in own] == ["none", "none", "policy"]
        assert "may be called 2 times" in own[2].message
        assert [(await ask(server, scope=member(1))).fault for _ in range(2)] == ["none", "none"]
        group = [await ask(server, scope=member(2)) for _ in range(2)]
        assert [result.fault for result in group] == ["none", "policy"]
        assert "by the whole group" in group[1].message
        assert (await ask(server, scope=member(0, group="another"))).fault == "none"
    assert len(counted.runs) == 6


async def test_calls_that_were_wrong_or_failed_on_our_side_cost_nothing() -> None:
    failing = [True]

    def act(_: str) -> str:
        if failing[0]:
            raise RuntimeError("ours")
        return "fine"

    async with ToolServer([Counted(act).tool(per_trajectory=1)]) as server:
        assert (await ask(server, words="x")).fault == "model"
        assert (await ask(server)).fault == "infra"
        failing[0] = False
        assert (await ask(server)).content == "fine"
        assert (await ask(server)).fault == "policy"


# -- remembered replies --------------------------------------------------------------------------------


async def test_asking_again_is_told_what_became_of_the_call() -> None:
    counted = Counted()
    counted.gate.clear()
    async with ToolServer([counted.tool()]) as server:
        first = request(server, wait_s=0)
        assert (await server.call(first)).result is None
        twice = [asyncio.create_task(server.call(first.model_copy(update={"wait_s": 20.0}))) for _ in range(2)]
        await until(lambda: counted.runs)
        counted.gate.set()
        replies = [await task for task in twice]
        again = await server.call(first)
        assert replies[0].result == replies[1].result == again.result
        forgetting = request(server, forget=(first.id,))
        await server.call(forgetting)
        assert len(counted.runs) == 2
        await server.call(first)  # forgotten: a new call, as far as the server knows
    assert len(counted.runs) == 3


async def test_a_cut_request_does_not_end_the_call() -> None:
    counted = Counted()
    counted.gate.clear()
    async with ToolServer([counted.tool()]) as server:
        first = request(server)
        asking = asyncio.create_task(server.call(first))
        await until(lambda: counted.runs)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        counted.gate.set()
        reply = await server.call(first)
    assert reply.result is not None
    assert reply.result.fault == "none"
    assert (counted.runs, counted.cancelled) == (["hello"], 0)


async def test_cancelling_ends_it_and_the_trajectorys_end_ends_all() -> None:
    counted = Counted()
    counted.gate.clear()
    async with ToolServer([counted.tool()]) as server:
        first, second = request(server), request(server)
        asking = [asyncio.create_task(server.call(each)) for each in (first, second)]
        await until(lambda: len(counted.runs) == 2)
        await server.cancel("t-0", (first.id, "unknown"))
        reply = await asking[0]
        assert reply.result is not None
        assert reply.result.cancelled
        await server.ended("t-0")
        await server.ended("t-0")
        ended = await asking[1]
        assert ended.result is not None
        assert ended.result.cancelled
    assert counted.cancelled == 2


async def test_what_an_earlier_server_may_have_run_is_lost_unless_twice_does_no_harm() -> None:
    counted = Counted()
    tools = [counted.tool(), counted.tool(name="look", repeatable=True), counted.tool(name="page", stateful=True)]
    async with ToolServer(tools) as server:
        with pytest.raises(CallLostError, match="may already have run"):
            await server.call(request(server, boot="earlier"))
        assert (await server.call(request(server, "look", boot="earlier"))).result is not None
        first = await server.call(request(server, "page"))
        assert first.stateful
        assert (await server.call(request(server, "page", state_boot=server.boot))).result is not None
        other = member(5)
        with pytest.raises(CallLostError, match="is lost"):
            await server.call(request(server, "page", scope=other, state_boot="earlier"))
    with pytest.raises(PoolClosedError):
        await server.call(request(server))


async def test_nothing_is_kept_of_trajectories_that_ended() -> None:
    counted = Counted()
    async with ToolServer([counted.tool(stateful=True, per_trajectory=1)]) as server:
        for n in range(300):
            assert (await ask(server, scope=member(n))).fault == "none"
            await server.ended(f"g-{n}")
        assert repr(server) == "<ToolServer 1 tools, 0 trajectories>"
        assert (await ask(server, scope=member(0))).fault == "none"  # a new one by that name has a budget of its own


async def test_trajectories_not_heard_of_are_closed() -> None:
    closed: list[str] = []

    class Holding:
        async def __aenter__(self) -> None:
            pass

        async def __aexit__(self, *_: object) -> None:
            closed.append("all")

        async def ended(self, trajectory: str) -> None:
            closed.append(trajectory)

    counted = Counted()
    counted.gate.clear()
    settings = ToolServerSettings(trajectory_idle_s=0.1)
    async with ToolServer([counted.tool(stateful=True)], settings, resources=[Holding()]) as server:
        first = request(server, wait_s=0)
        await server.call(first)
        await asyncio.sleep(0.3)
        assert closed == []  # its call still runs
        counted.gate.set()
        await until(lambda: closed == ["t-0"])
        with pytest.raises(CallLostError):
            await server.call(request(server, state_boot=server.boot))
    assert closed == ["t-0", "t-0", "all"]
