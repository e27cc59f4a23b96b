"""What the construction of an environment says and refuses, before anything is started."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
from atroposlib.envs.server_handling.server_baseline import APIServerConfig

from agentenv.agent.failure_log import authors_traceback
from agentenv.agent.result import AgentResult
from agentenv.agent.settings import AgentSettings
from agentenv.env.environment import AgentEnv, AgentEnvConfig
from agentenv.env.hermes import BlockingToolContext, HermesAgentBaseEnv, HermesAgentEnvConfig
from agentenv.errors import ConfigError, HookError, TaskError
from agentenv.testing import build_tokenizer
from agentenv.tools.catalog import ToolCatalog

C = TypeVar("C", bound=AgentEnvConfig)


class Config(AgentEnvConfig):
    """Of an environment that was written for another harness."""


class Plain(AgentEnv):
    def score_trajectory(self, item: Any, final_response: str) -> float:
        return 0.0


class Typed(AgentEnv[Config]):
    def score_trajectory(self, item: Any, final_response: str) -> float:
        return 0.0


class Base(AgentEnv[C], Generic[C]):
    def score_trajectory(self, item: Any, final_response: str) -> float:
        return 0.0


class Leaf(Base[Config]):
    pass


class Sampling(Typed):
    def build_agent_config(self, item: Any) -> AgentSettings:
        return AgentSettings(max_steps=3)


class Hermes(HermesAgentBaseEnv):
    async def setup(self) -> None:
        pass

    def format_prompt(self, item: Any) -> str:
        return str(item)

    async def compute_reward(self, item: Any, result: AgentResult, ctx: BlockingToolContext) -> float:
        return 0.0


async def constructed(kind: type[Any], directory: Path, **changed: Any) -> Any:
    """An environment with these settings, given as atropos' command line gives them: all of them."""
    config = HermesAgentEnvConfig if issubclass(kind, HermesAgentBaseEnv) else Config
    chosen = {"tokenizer_name": str(build_tokenizer(directory / "tokenizer")), "use_wandb": False, **changed}
    server = APIServerConfig(base_url="http://127.0.0.1:9/v1", model_name="none", api_key="unused")
    env = kind(config(**config(**chosen).model_dump()), [server])
    await env.close()
    return env


NETWORK = "slots have no network here (allow_network)"
SERVERS = "the temperature is the model's server's (agent_temperature, there 0.7)"
LEFT_OUT = "the default temperature of build_agent_config is "
LAST_TURN = "a rollout that reaches agent_max_steps is verified and scored"


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (Plain, {}, []),
        (Typed, {}, [NETWORK, SERVERS, LAST_TURN]),
        (Typed, {"allow_network": False, "agent_temperature": 0.9}, [NETWORK, LAST_TURN]),
        (Typed, {"allow_network": True}, [SERVERS, LAST_TURN]),
        (Typed, {"allow_network": True, "agent_temperature": 0.9}, [LAST_TURN]),
        (Typed, {"tool_pool_mode": "fake"}, [SERVERS, LAST_TURN]),
        (Leaf, {}, [NETWORK, SERVERS, LAST_TURN]),
        (Sampling, {}, [NETWORK, f"{LEFT_OUT}the model's server's (agent_temperature, there 0.7)", LAST_TURN]),
        (Sampling, {"agent_temperature": 0.9}, [NETWORK, f"{LEFT_OUT}0.9 (agent_temperature, there 0.7)", LAST_TURN]),
        (Sampling, {"agent_temperature": 0.7}, [NETWORK, LAST_TURN]),
        (Hermes, {}, [NETWORK]),
        (Hermes, {"agent_temperature": 0.3, "allow_network": True}, []),
        (Hermes, {"agent_temperature": None}, [NETWORK, SERVERS.replace("0.7", "1.0")]),
    ],
)
async def test_what_may_change_a_score_is_said_however_it_was_set(
    kind: type[Any], given: dict[str, Any], said: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await constructed(kind, tmp_path, **given)
    warnings = [record.getMessage() for record in caplog.records if record.name == "agentenv.env.environment"]
    warnings = [text for text in warnings if "num_max_requests_at_once" not in text]
    assert len(warnings) == bool(said), warnings
    parts = warnings[0].partition(": ")[2].split("; ") if said else []
    assert len(parts) == len(said), parts
    assert all(part.startswith(start) for part, start in zip(parts, said, strict=True)), parts


class Collecting(Plain):
    async def collect_trajectory(self, item: Any) -> Any:
        return None, []


class Deciding(Hermes):
    def _use_managed_server(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Collecting, r"Collecting\.collect_trajectory: would never be called \(write .* collect_trajectories instead"),
        (Deciding, r"Deciding\._use_managed_server: would never be called \(.*--openai\.server_type"),
    ],
)
async def test_what_would_never_be_called_is_refused(kind: type[Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=said):
        await constructed(kind, tmp_path)


class NoScore(AgentEnv):
    def build_task(self, item: Any) -> str:
        return ""


class Misspelt(NoScore):
    def score_trajectroy(self, item: Any, final_response: str) -> float:
        return 0.0


class OnlyItem(AgentEnv):
    def score_trajectory(self, item: Any) -> float:  # type: ignore[override]
        return 0.0


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (NoScore, "NoScore: has neither score_trajectory nor verify_and_score_trajectory (write one of them)"),
        (Misspelt, "Misspelt: has neither .* (did you mean score_trajectory by score_trajectroy?)"),
        (OnlyItem, "OnlyItem.score_trajectory: cannot be called: too many positional arguments (write def "),
    ],
)
async def test_a_hook_that_is_missing_or_wrong_is_one_line_with_what_to_write(
    kind: type[Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(HookError, match=f"^{re.escape(said).replace(re.escape('.*'), '.*')}") as found:
        await constructed(kind, tmp_path)
    assert isinstance(found.value, TypeError)
    assert "\n" not in str(found.value)


async def test_a_misspelt_hook_that_may_be_left_out_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Setting(Plain):
        def setup_trajectory_workspce(self, item: Any) -> None:
            pass

    await constructed(Setting, tmp_path)
    assert "Setting.setup_trajectory_workspce is no hook, so nothing calls it: did you mean " in caplog.text


async def test_an_environment_that_is_refused_leaves_no_empty_file(tmp_path: Path) -> None:
    groups = tmp_path / "groups.jsonl"
    tokenizer = build_tokenizer(tmp_path / "bare", chat_template="{{ nothing.there }}")
    config = Config(
        tokenizer_name=str(tokenizer), data_path_to_save_groups=str(groups), tool_call_parser="hermes", use_wandb=False
    )
    server = APIServerConfig(base_url="http://127.0.0.1:9/v1", model_name="m", server_type="vllm", api_key="unused")
    with pytest.raises(ConfigError, match="tokenizer_name"):
        Plain(config, [server])
    assert not groups.exists()


UNKNOWN = [
    ({"enabled_toolsets": ["nonsense"]}, "enabled_toolsets: no toolset or tool is named 'nonsense'"),
    ({"enabled_toolsets": ["terminal", "web"]}, "enabled_toolsets: toolset 'web' is not available"),
    ({"disabled_toolsets": ["filse"]}, "disabled_toolsets: no toolset or tool is named 'filse'"),
    ({"distribution": '{"terminal": 1, "nonsense": 0.5}'}, "distribution: no toolset or tool is named 'nonsense'"),
    ({"distribution": "research"}, "distribution: toolset 'web' is not available"),
    ({"distribution": "terminal_and_files", "disabled_toolsets": ["all"]}, "enabled_toolsets: no tool is left"),
]


class OwnTools(Plain):
    def build_tools(self) -> ToolCatalog:
        raise AssertionError("called by setup, once a tool server is connected")


@pytest.mark.parametrize(("given", "said"), UNKNOWN)
async def test_unknown_toolsets_are_refused_where_all_are_known(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        await constructed(Plain, tmp_path, **given)
    await constructed(OwnTools, tmp_path, **given)
    await constructed(Plain, tmp_path, tool_server_url="inprocess", **given)


@pytest.mark.parametrize("hook", ["build_tools", "build_backend", "setup_agent_env", "get_next_item"])
async def test_a_bug_in_a_hook_that_no_rollout_calls_names_the_hook(
    hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def buggy(self: Any) -> Any:
        raise KeyError("no such key")

    monkeypatch.setattr(Plain, hook, buggy)
    with pytest.raises(TaskError, match=f"{hook} raised KeyError: 'no such key'") as caught:
        async with await constructed(Plain, tmp_path, tool_pool_mode="fake") as env:
            await env.get_next_item()
    assert "buggy" in authors_traceback(caught.value.__cause__ or caught.value)


FARM: dict[str, Any] = {"tool_pool_mode": "farm", "farm_url": "http://127.0.0.1:9", "farm_token": "a-secret"}


async def test_secrets_are_not_given_to_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("agentenv.env.tracking.wandb.init", given.update)
    (await constructed(Plain, tmp_path, **FARM, use_wandb=True)).start_wandb()
    assert given["config"]["farm_url"] == FARM["farm_url"]
    assert "a-secret" not in str(given)


def test_the_digest_of_settings_is_of_what_decides_results() -> None:
    digest = Config(**FARM).digest()
    assert digest == Config(**{**FARM, "farm_token": "another"}, rollouts_path="r.jsonl").digest()
    assert digest == Config(**{**FARM, "data_path_to_save_groups": "groups_1.jsonl"}).digest()
    assert digest != Config(**FARM, agent_max_steps=3).digest()
    assert "a-secret" not in digest
