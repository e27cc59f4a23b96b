"""Environments with external tools: in process and by URL, groups, faults, toolsets, distributions, the example."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.transcript import GroupRecord, Transcript
from agentenv.api.assembly import tool_server
from agentenv.api.tool_server.app import served
from agentenv.api.tool_server.core import ToolServer
from agentenv.api.tool_server.settings import ToolServerSettings
from agentenv.api.tool_server.tool import ExternalTool
from agentenv.errors import ConfigError, ConnectionLostError
from agentenv.testing import Call, Reply, Turn
from examples.toolserver_smoke.__main__ import play
from tests.integration.web_of_tests import Web, allowing
from tests.unit.api.tool_server_box import Counted, lines
from tests.unit.env.env_stubs import AnswerEnv, environment

TOKEN = "a-token-for-these-tests"
DOCUMENT = Path(__file__).parents[2] / "docs" / "tool-server.md"


def records(directory: Path) -> list[GroupRecord]:
    return [GroupRecord.model_validate_json(line) for line in (directory / "rollouts.jsonl").read_text().splitlines()]


def asking(*words: str) -> Callable[[Turn], Reply]:
    def player(turn: Turn) -> Reply:
        if turn.step < len(words):
            return Reply("", (Call("ask", {"word": words[turn.step]}),))
        if turn.step == len(words):
            return Reply("", (Call("bash", {"command": "echo 42 > answer"}),))
        return Reply("done")

    return player


class AskEnv(AnswerEnv):
    """Its tool server is what a test puts here."""

    serve: Callable[[], ToolServer]

    def build_tool_server(self) -> ToolServer:
        return type(self).serve()


def env_with(*tools: ExternalTool, **settings: Any) -> type[AskEnv]:
    class Env(AskEnv):
        serve = staticmethod(lambda: tool_server(ToolServerSettings.model_validate(settings), tools))

    return Env


def shown(transcript: Transcript) -> list[str]:
    return [call.shown for step in transcript.steps for call in step.tool_calls]


async def test_a_group_calls_a_tool_in_process_and_everything_is_written_down(tmp_path: Path) -> None:
    counted = Counted()
    kind = env_with(
        counted.tool(),
        cassettes={"mode": "record", "directory": str(tmp_path / "tapes")},
        audit_log=str(tmp_path / "audit.jsonl"),
    )
    async with environment(kind, tmp_path, {"*": [asking("w")]}, tool_server_url="inprocess") as env:
        for _ in range(2):  # two groups of one item: the second asks nothing
            group, _ = await env.collect_trajectories({"id": "item one"})
            assert group is not None
            assert group["scores"] == [1.0] * 4
    assert counted.runs == ["w"]
    audit = lines(tmp_path / "audit.jsonl")
    assert [entry["source"] for entry in audit].count("cassette") == 7
    assert {entry["item"] for entry in audit} == {"item one"}
    assert len({entry["group"] for entry in audit}) == 2
    assert len({entry["trajectory"] for entry in audit}) == 8
    first = records(tmp_path)[0].trajectories[0]
    assert "ask" in first.tools
    assert "bash" in first.tools
    assert shown(first)[0] == '{"said": "w", "run": 1}'
    assert first.totals["run_s"] > 0


async def test_by_url_it_is_the_same(tmp_path: Path) -> None:
    counted = Counted()
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN + "\n")
    async with ToolServer([counted.tool(per_group=3)]) as server, served(server, TOKEN) as url:
        chosen = {"tool_server_url": url, "tool_server_token": f"file:{token_file}"}
        async with environment(AnswerEnv, tmp_path, {"*": [asking("w")]}, **chosen) as env:
            group, _ = await env.collect_trajectories({"id": "x"})
    assert group is not None
    assert group["scores"] == [1.0] * 4
    told = sorted(shown(transcript)[0] for transcript in records(tmp_path)[0].trajectories)
    assert sum("said" in text for text in told) == 3
    assert sum("by the whole group" in text for text in told) == 1
    assert TOKEN not in (tmp_path / "rollouts.jsonl").read_text()


async def test_a_tool_that_breaks_is_never_shown_or_scored_nor_a_free_retry(tmp_path: Path) -> None:
    def act(word: str) -> str:
        raise RuntimeError("the provider is down")

    kind = env_with(Counted(act).tool())
    script = {"*": [asking("w")]}
    async with environment(kind, tmp_path, script, group_size=1, tool_server_url="inprocess") as env:
        group, _ = await env.collect_trajectories({"id": "x"})
    assert group is None
    (transcript,) = records(tmp_path)[0].trajectories
    assert (transcript.attempt, transcript.fault, transcript.score) == (1, "infra", None)
    assert "the tool ask failed" in transcript.error
    assert "provider is down" not in json.dumps(transcript.messages)


async def test_a_hook_may_call_what_the_model_is_not_given_and_pages_are_closed_when_sealed(tmp_path: Path) -> None:
    seen: list[Any] = []
    ended: list[str] = []

    class Holding:
        async def __aenter__(self) -> None: ...
        async def __aexit__(self, *_: object) -> None: ...
        async def ended(self, trajectory: str) -> None:
            ended.append(trajectory)

    class Env(AskEnv):
        serve = staticmethod(lambda: ToolServer([Counted().tool(stateful=True)], resources=[Holding()]))

        async def setup_trajectory_workspace(self, item: Any, *, trajectory_id: str, exec_tool: Any) -> Any:
            seen.append((await exec_tool.call_tool("ask", {"word": "before"})).content)

        async def verify_and_score_trajectory(self, item: Any, final_response: str, *, exec_tool: Any, **_: Any) -> Any:
            seen.append((list(ended), (await exec_tool.call_tool("ask", {"word": "after"})).content["said"]))
            return 1.0, {}

    chosen = {"disabled_toolsets": ["ask"], "verification": "sealed", "tool_server_url": "inprocess", "group_size": 1}
    async with environment(Env, tmp_path, {"*": [asking("w")]}, **chosen) as env:
        await env.collect_trajectories({"id": "x"})
    (transcript,) = records(tmp_path)[0].trajectories
    assert "ask" not in transcript.tools
    assert 'unknown tool "ask"' in shown(transcript)[0]
    assert seen == [{"said": "before", "run": 1}, ([transcript.trajectory], "after")]
    assert ended == [transcript.trajectory] * 2


async def test_a_text_is_shown_as_text(tmp_path: Path) -> None:
    look = [Reply("", (Call("web_extract", {"url": "URL"}),)), Reply("done")]
    async with Web() as site:
        site.pages["/"] = "<title>T</title><main><p>one</p><p>two &lt; three</p></main>"
        look[0] = Reply("", (Call("web_extract", {"url": site.url(), "limit": 8}),))

        class Env(AskEnv):
            serve = staticmethod(lambda: tool_server(allowing(site, browser={"enabled": False})))

        chosen = {"tool_server_url": "inprocess", "group_size": 1, "enabled_toolsets": ["web", "terminal"]}
        async with environment(Env, tmp_path, {"*": [look]}, **chosen) as env:
            await env.collect_trajectories({"id": "x"})
        (transcript,) = records(tmp_path)[0].trajectories
        assert transcript.tools[-2:] == ["web_extract", "http_fetch"]  # web_search has no provider here
        (text,) = shown(transcript)
        above, _, below = text.partition("\n\n")
        assert above.splitlines() == [
            f"url: {site.url()}", "status: 200", "content_type: text/html", "title: T", "total_chars: 16",
        ]  # fmt: skip
        assert below == "one\n\ntwo\n[more: offset=8]"


@pytest.mark.parametrize(
    ("chosen", "error", "said"),
    [
        ({"enabled_toolsets": ["web_search"]}, ConfigError, "no search provider"),
        ({"enabled_toolsets": ["browser"]}, ConfigError, "allow list is empty"),
        ({"enabled_toolsets": ["brwser"]}, ConfigError, "did you mean 'browser'?"),
        ({"distribution": "research"}, ConfigError, "allow list is empty|no search provider"),
        ({"tool_server_config": "/none.toml"}, ConfigError, r"/none\.toml cannot be read"),
    ],
)
async def test_what_cannot_be_had_is_refused_at_setup(
    tmp_path: Path, chosen: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        async with environment(AnswerEnv, tmp_path, tool_server_url="inprocess", **chosen):
            pass


async def test_a_tool_server_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ToolServer([]) as server, served(server, TOKEN) as url:
        with pytest.raises(ConfigError, match="tool_server_token"):
            async with environment(AnswerEnv, tmp_path, tool_server_url=url, tool_server_token="x" * 20):
                pass
    for pause in ("_FIRST_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(f"agentenv.executor.toolserver_client.{pause}", 40.0)
    with pytest.raises(ConnectionLostError, match="unreachable"):
        async with environment(AnswerEnv, tmp_path, tool_server_url=url, tool_server_token=TOKEN):
            pass


async def test_a_distribution_gives_each_group_its_own_tools_the_same_for_all_its_members(tmp_path: Path) -> None:
    chosen = {"distribution": '{"terminal": 1, "file": 0.5}', "distribution_seed": 5, "group_size": 3}
    drawn: list[list[tuple[str, ...]]] = []
    for run in ("first", "second"):
        directory = tmp_path / run
        async with environment(AnswerEnv, directory, {"*": [asking()]}, **chosen) as env:
            for n in range(6):
                await env.collect_trajectories({"id": f"item-{n}"})
        groups = [[tuple(each.tools) for each in record.trajectories] for record in records(directory)]
        assert all(len(set(members)) == 1 for members in groups)
        drawn.append([members[0] for members in groups])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 2


async def test_the_example_scores_the_honest_policy_and_hides_the_key(tmp_path: Path) -> None:
    assert await play(tmp_path, tool_pool_mode="fake") == [1.0, 0.0]
    honest, curious = records(tmp_path)[0].trajectories
    assert shown(honest)[0].startswith('{"name": "alder", "code": "AL-')
    assert "no record nobody" in shown(curious)[1]


async def test_in_a_real_slot_the_key_is_nowhere_to_be_seen(tmp_path: Path) -> None:
    isolation = "full" if os.geteuid() == 0 else "user"
    assert await play(tmp_path, tool_pool_mode="local", isolation=isolation) == [1.0, 0.0]
    _, curious = records(tmp_path)[0].trajectories
    assert "HOME=/workspace" in shown(curious)[0]  # the hunt did look into environments


async def test_the_documented_tool_works(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(from typing.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (tmp_path / "my_tools.py").write_text(block)
    (tmp_path / "key").write_text("value-of-key")
    (tmp_path / "tools.toml").write_text(
        'modules = ["my_tools.py"]\nbuiltin_tools = false\n[secrets]\nrecords_key = { file = "key" }\n'
    )
    script = {
        "*": [[Reply("", (Call("record_lookup", {"number": 1}), Call("record_lookup", {"number": 2}))), Reply("x")]]
    }
    chosen = {"tool_server_url": "inprocess", "tool_server_config": str(tmp_path / "tools.toml"), "group_size": 1}
    async with environment(AnswerEnv, tmp_path, script, **chosen) as env:
        await env.collect_trajectories({"id": "x"})
    assert shown(records(tmp_path)[0].trajectories[0]) == [
        '{"record": "first"}',
        "exit code: 1\nstderr:\nthere is no record 2",
    ]
