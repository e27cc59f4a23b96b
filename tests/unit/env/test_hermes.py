"""The base class of hermes-agent's environments: its signatures, and its tools, which answer with dicts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentenv import AgentSettings
from agentenv.env.blocking import run_with_waits
from agentenv.env.hermes import BlockingToolContext, HermesAgentBaseEnv, HermesAgentEnvConfig
from agentenv.errors import ConnectionLostError, InvalidArgumentsError
from agentenv.sdk.tool_context import ToolContext
from agentenv.testing import Call, Reply, ScriptedPolicy
from agentenv.wire.calls import CallResult
from tests.unit.agent.agent_stubs import StubSession, ok
from tests.unit.env.env_stubs import IDLE, AnswerEnv, environment, server_of, settings


class CallsEnv(HermesAgentBaseEnv):
    """Its reward hook keeps what ``use`` makes of the tools."""

    use: Callable[[BlockingToolContext], list[Any]]
    answers: list[Any]

    async def setup(self) -> None:
        self.answers = []

    async def get_next_item(self) -> Any:
        return {"id": "item"}

    def format_prompt(self, item: Any) -> str:
        return "nothing"

    async def compute_reward(self, item: Any, result: Any, ctx: BlockingToolContext) -> float:
        self.answers = self.use(ctx)
        return 1.0


async def answers(directory: Path, *calls: tuple[str, dict[str, Any]]) -> list[Any]:
    return await used(directory, lambda ctx: [json.loads(ctx.call_tool(tool, given)) for tool, given in calls])


async def used(directory: Path, use: Callable[[BlockingToolContext], list[Any]]) -> list[Any]:
    chosen = settings(directory).model_dump(exclude_unset=True) | {"group_size": 1}
    async with ScriptedPolicy({"*": [IDLE]}) as policy:
        env = CallsEnv(HermesAgentEnvConfig(**chosen), server_of(policy))
        env.use = use
        async with env:
            await env.collect_trajectories(await env.get_next_item())
        return env.answers


async def test_commands_called_by_name_answer_with_output_and_exit_code(tmp_path: Path) -> None:
    said, failed, late, kept, silent = await answers(
        tmp_path,
        ("terminal", {"command": "echo hi"}),
        ("bash", {"command": "echo no >&2; exit 3"}),
        ("terminal", {"command": "echo so far; sleep 600", "timeout": 15}),
        ("terminal", {"command": "x=1; echo kept", "session": "s"}),
        ("terminal", {"command": "cd /", "session": "s"}),
    )
    assert said == {"output": "hi\n", "exit_code": 0}
    assert failed == {"output": "no\n", "exit_code": 3}
    assert late == {"output": "so far\n", "exit_code": 124}
    assert (kept["output"], kept["exit_code"], kept["state"]) == ("kept\n", 0, "idle")
    assert (silent["output"], silent["exit_code"]) == ("", 0)


async def test_files_called_by_name_answer_with_content_or_an_error(tmp_path: Path) -> None:
    missing, written, read = await answers(
        tmp_path,
        ("read_file", {"path": "nope"}),
        ("write_file", {"path": "a", "content": "text", "timeout": 9}),
        ("read_file", {"path": "a"}),
    )
    assert list(missing) == ["error"]
    assert "nope" in missing["error"]
    assert "error" not in written
    assert read["text"] == "text"


async def test_files_are_copied_there_and_back(tmp_path: Path) -> None:
    here = tmp_path / "made" / "down"
    there, unread, back, missing = await used(
        tmp_path,
        lambda ctx: [
            ctx.upload_file(__file__, "up/a.py"),
            ctx.upload_file("/no/such", "b"),
            ctx.download_file("up/a.py", str(here)),
            ctx.download_file("nope", str(here)),
        ],
    )
    assert (there["exit_code"], there["output"]) == (0, "")
    assert (unread["exit_code"], "/no/such" in unread["output"]) == (1, True)
    assert (back["success"], back["bytes"]) == (True, len(here.read_bytes()))
    assert here.read_text() == Path(__file__).read_text()
    assert (missing["success"], "nope" in missing["error"]) == (False, True)


class FreshSettingsEnv(AnswerEnv):
    """Its hook makes settings of its own, as environments of other harnesses do."""

    def build_agent_config(self, item: Any) -> AgentSettings:
        return AgentSettings(max_steps=3, temperature=0.2)


async def test_what_a_hook_leaves_open_is_as_the_config_has_it(tmp_path: Path) -> None:
    player = [Reply("writing", (Call("terminal_stateful", {"command": "echo 42 > answer"}),)), Reply("done")]
    changed: dict[str, Any] = {"accept_tool_aliases": True, "system_prompt": "Be brief.", "agent_max_steps": 1}
    async with environment(FreshSettingsEnv, tmp_path, {"*": [player]}, group_size=1, **changed) as env:
        await env.collect_trajectories(await env.get_next_item())
    [group] = map(json.loads, (tmp_path / "rollouts.jsonl").read_text().splitlines())
    [member] = group["trajectories"]
    assert (member["score"], member["model_faults"]) == (1.0, 0)
    assert member["messages"][0]["content"] == "Be brief."


def test_settings_are_completed_where_they_are_open() -> None:
    config = AgentSettings(max_steps=9, temperature=0.7, system_prompt="p", send_reasoning=True, extra_body={"a": 1})
    hook = AgentSettings(max_steps=3, temperature=0.0, system_prompt="", extra_body={}, send_reasoning=False)
    done = hook.completed(config)
    assert (done.max_steps, done.temperature, done.system_prompt, done.send_reasoning) == (3, 0.0, "", False)
    assert done.extra_body == {"a": 1}
    assert AgentSettings(max_steps=3).completed(config).send_reasoning is True


class Fine(HermesAgentBaseEnv):
    async def setup(self) -> None:
        pass

    async def get_next_item(self) -> Any:
        return None

    def format_prompt(self, item: Any) -> str:
        return ""

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return 0.0


class OnlyItem(Fine):
    async def compute_reward(self, item: Any) -> float:  # type: ignore[override]
        return 0.0


class NoItem(Fine):
    def format_prompt(self) -> str:  # type: ignore[override]
        return ""


class NeedsPath(Fine):
    async def setup(self, path: str) -> None:  # type: ignore[override]
        pass


class NeedsIndex(Fine):
    async def get_next_item(self, index: int) -> Any:  # type: ignore[override]
        return index


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            OnlyItem,
            r"OnlyItem.compute_reward: cannot be called: too many .*compute_reward.self, item, result, ctx",
        ),
        (NoItem, "NoItem.format_prompt: cannot be called: too many positional arguments"),
        (NeedsPath, "NeedsPath.setup: cannot be called: missing a required argument: 'path'"),
        (NeedsIndex, "NeedsIndex.get_next_item: cannot be called: missing a required argument: 'index'"),
    ],
)
def test_a_hook_that_could_not_be_called_is_refused_at_construction(kind: type[Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        kind(None, [])


async def asked(outcome: CallResult | Exception, ask: Callable[[BlockingToolContext], Any]) -> Any:
    """What a reward hook gets of a context whose calls all end in ``outcome``."""

    def behave(*_: Any) -> CallResult:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return await run_with_waits(ask, BlockingToolContext(ToolContext(StubSession("t", behave))))


async def test_a_command() -> None:
    assert await asked(ok("out", 3), lambda ctx: ctx.terminal("ls")) == {"exit_code": 3, "output": "out"}
    killed = CallResult(id="c", timed_out=True, stdout="so far")
    assert await asked(killed, lambda ctx: ctx.terminal("ls")) == {"exit_code": 124, "output": "so far"}


async def test_a_command_that_is_refused_is_a_dict_too() -> None:
    refused = InvalidArgumentsError("timeout_s is 100000", next_step="at most 86400")
    assert await asked(refused, lambda ctx: ctx.terminal("true", 100_000)) == {
        "exit_code": -1,
        "output": "",
        "error": "timeout_s is 100000 (at most 86400)",
    }
    with pytest.raises(ConnectionLostError):
        await asked(ConnectionLostError("cut"), lambda ctx: ctx.terminal("true"))


@pytest.mark.parametrize(
    "ask",
    [
        lambda ctx: ctx.web_search("x"),
        lambda ctx: ctx.web_extract(["http://x"])["results"][0],
        lambda ctx: ctx.browser_navigate("http://x"),
        lambda ctx: ctx.browser_snapshot(),
        lambda ctx: json.loads(ctx.call_tool("web_search", {"query": "x"})),
    ],
)
async def test_without_a_tool_server_the_error_names_the_setting(ask: Callable[[BlockingToolContext], Any]) -> None:
    unknown = CallResult(id="c", fault="model", error="unknown_tool", message="unknown tool; did you mean 'search'?")
    reply = await asked(unknown, ask)
    assert list(reply) == ["error"]
    assert "set tool_server_url" in reply["error"]
    assert "did you mean" not in reply["error"]
