from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from atroposlib.utils.cli import get_prefixed_pydantic_model
from pydantic_cli import pydantic_class_to_parser

from agentenv.env.command_line import check_arguments, joined_negatives
from agentenv.env.config import TOOL_CALL_PARSERS
from agentenv.env.environment import AgentEnvConfig
from agentenv.env.invocation import invocation_of
from agentenv.env.older_names import ALIASES, REFUSED, with_flags_of_here
from agentenv.errors import ConfigError
from agentenv.tools.catalog import ToolCatalog
from agentenv.tools.toolsets import choose
from agentenv.wire.spec import Bind

# fmt: off
KNOWN = (
    "tool_pool_mode", "allow_network", "require_sandbox", "require_stateful_sandbox", "tool_batch_window_ms",
    "tool_max_batch_size", "nomad_address", "sandbox_job_id", "sandbox_image", "slots_per_container",
    "min_containers", "max_containers", "driver", "acquire_timeout_s", "purge_job_on_start",
    "purge_job_on_shutdown", "agent_max_steps", "agent_temperature", "agent_max_tokens", "agent_tool_delay_s",
    "enabled_toolsets", "disabled_toolsets", "distribution", "system_prompt", "tool_call_parser", "extra_body",
    "tool_server_url", "tool_server_token", "max_agent_turns", "terminal_timeout", "terminal_lifetime",
    "dataset_name", "dataset_split", "prompt_field",
)
# fmt: on


def test_every_name_users_know_is_there_with_the_documented_defaults() -> None:
    config = AgentEnvConfig()
    for name in KNOWN:
        assert name in AgentEnvConfig.model_fields, name
    assert (config.tool_batch_window_ms, config.tool_max_batch_size) == (20, 200)
    assert (config.slots_per_container, config.min_containers, config.max_containers) == (10, 1, 10)
    assert (config.acquire_timeout_s, config.agent_max_steps) == (30, 50)


def test_it_becomes_the_settings_below() -> None:
    config = AgentEnvConfig(
        slots_per_container=3, allow_network=True, slot_memory_mib=512, slot_workspace_mib=64,
        sandbox_binds="/opt/x:/opt/x", min_containers=2, max_containers=4, target_idle_slots=3, scale_cooldown_s=8,
        acquire_timeout_s=5, tool_batch_window_ms=1, tool_timeout_s=9,
        agent_temperature=0.5, agent_max_steps=7,
    )  # fmt: skip
    container = config.container_settings()
    assert (container.slots_per_container, container.allow_network) == (3, True)
    assert container.limits.memory_bytes == 512 * 1024 * 1024
    assert container.binds[0].target == "/opt/x"
    pool = config.pool_settings()
    assert (pool.min_containers, pool.max_containers, pool.acquire_timeout_s) == (2, 4, 5)
    assert (pool.target_idle_slots, pool.scale_cooldown_s) == (3, 8)
    executor = config.executor_settings()
    assert (executor.tool_batch_window_ms, executor.default_timeout_s) == (1, 9)
    agent = config.agent_settings()
    assert (agent.temperature, agent.max_steps) == (0.5, 7)


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_names_of_other_harnesses_mean_the_same_and_can_be_read(alias: str, name: str) -> None:
    config = AgentEnvConfig(**{alias: 7})
    assert getattr(config, name) == getattr(config, alias) == 7
    assert AgentEnvConfig(**config.model_dump()) == config
    assert config.model_dump(exclude_unset=True) == {alias: 7}
    assert getattr(AgentEnvConfig(**{name: 8}), alias) == 8
    assert getattr(AgentEnvConfig(), alias) == getattr(AgentEnvConfig(), name)
    AgentEnvConfig(**{alias: 7, name: 7})
    with pytest.raises(ConfigError, match=rf"{alias}=7.* and {name}=8.* disagree"):
        AgentEnvConfig(**{alias: 7, name: 8})


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
@pytest.mark.parametrize("given", [None, "alias", "name"])
def test_both_names_of_a_setting_change_together(alias: str, name: str, given: str | None) -> None:
    first = AgentEnvConfig(**({{"alias": alias, "name": name}[given]: 7} if given else {}))
    for changed in (alias, name):
        assigned = first.model_copy()
        setattr(assigned, changed, 3)
        for config in (assigned, first.model_copy(update={changed: 3}), first.model_copy(update={alias: 3, name: 3})):
            assert getattr(config, alias) == getattr(config, name) == 3
            for unset in (False, True):
                again = AgentEnvConfig(**config.model_dump(exclude_unset=unset))
                assert getattr(again, alias) == getattr(again, name) == 3
    before = getattr(first, name)
    setattr(first, alias, None)
    assert getattr(first.model_copy(update={alias: None}), alias) == getattr(first, alias) == before
    with pytest.raises(ConfigError, match=rf"{alias}=3 and {name}=4 disagree"):
        first.model_copy(update={alias: 3, name: 4})


def test_what_is_not_set_is_not_in_a_dump_of_what_is() -> None:
    assert AgentEnvConfig().model_dump(exclude_unset=True) == {}


def merged(base: dict[str, Any], **added: Any) -> AgentEnvConfig:
    """What atropos makes of an environment's own settings, its file and its command line."""
    return AgentEnvConfig(**{**AgentEnvConfig(**base).model_dump(), **added})


@pytest.mark.parametrize("name", ["agent_max_steps", "max_agent_turns"])
def test_a_command_line_overrides_what_an_environment_set_by_the_same_name(name: str) -> None:
    for base in ({}, {name: 9}):
        config = merged(base, **{name: "20"})
        assert (config.agent_max_steps, config.max_agent_turns) == (20, 20)
    assert merged({}, max_agent_turns="20").agent_max_steps == 20


@pytest.mark.parametrize(
    ("base", "added"),
    [
        ({}, {"agent_max_steps": "4", "max_agent_turns": "3"}),
        ({"agent_max_steps": 9}, {"max_agent_turns": "3"}),
        ({"max_agent_turns": 9}, {"agent_max_steps": "3"}),
    ],
)
def test_two_names_with_two_values_are_refused_wherever_they_come_from(
    base: dict[str, Any], added: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="disagree"):
        merged(base, **added)


@pytest.mark.parametrize("name", REFUSED)
def test_what_other_harnesses_have_is_ignored_where_it_changes_nothing_and_refused_otherwise(name: str) -> None:
    harmless, instead = REFUSED[name]
    for value in harmless[:3]:
        assert AgentEnvConfig(**{name: value}).model_dump() == AgentEnvConfig().model_dump()
    with pytest.raises(ConfigError) as caught:
        AgentEnvConfig(**{name: "something"})
    assert (caught.value.field, caught.value.next_step) == (name, instead)


def test_flags_of_other_harnesses_are_treated_like_settings() -> None:
    given = ["process", "--env.tool_pool_size", "128", "--env.privileged=false", "--env.driver", "singularity"]
    assert with_flags_of_here([*given, "--env.group_size", "4", "--slurm"]) == [
        *("process", "--env.driver", "apptainer", "--env.group_size", "4", "--slurm"),
    ]
    for refused in (["--env.terminal_backend", "modal"], ["--env.modal_image=x"], ["--env.privileged"]):
        with pytest.raises(ConfigError) as caught:
            with_flags_of_here(refused)
        assert caught.value.next_step


def test_a_lifetime_is_not_the_ttl_of_a_lease() -> None:
    config = AgentEnvConfig(terminal_lifetime=3600)
    assert (config.lease_ttl_s, config.agent_settings().max_idle_s) == (30, 3600)


def test_the_former_name_of_a_driver() -> None:
    assert AgentEnvConfig(driver="singularity").driver == "apptainer"


def test_no_system_prompt_is_not_an_empty_one() -> None:
    assert AgentEnvConfig(system_prompt=None).agent_settings().system_prompt is None
    assert AgentEnvConfig(system_prompt="").agent_settings().system_prompt == ""


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        ({"driver": "raw_exec", "sandbox_image": "mine:1"}, "sandbox_image", "runs no image"),
        ({"sandbox_job_id": "a b"}, "sandbox_job_id", "pattern"),
        ({"tool_pool_mode": "modal"}, "tool_pool_mode", "'local'"),
        ({"tool_server_url": "ftp://x"}, "tool_server_url", "http(s)://host:port, or inprocess"),
        ({"tool_server_url": "http://x"}, "tool_server_token", "file:PATH"),
        ({"tool_server_url": "inprocess", "tool_server_token": "t"}, "tool_server_token", "without tool_server_url"),
        ({"tool_server_token": "t"}, "tool_server_token", "without tool_server_url"),
        ({"tool_server_config": "x.toml"}, "tool_server_config", "inprocess"),
        ({"require_stateful_sandbox": True, "tool_pool_mode": "fake"}, "require_stateful_sandbox", "has no isolation"),
        ({"require_sandbox": True, "tool_pool_mode": "fake"}, "require_sandbox", "local or nomad"),
        ({"modal_image": "x"}, "modal_image", "local or nomad"),
        ({"enabled_toolsets": ["file", "vision"]}, "enabled_toolsets", "unknown toolset 'vision'"),
        ({"distribution": "reserch"}, "distribution", "did you mean 'research'?"),
        ({"distribution": '{"terminal": 2}'}, "distribution", "0 to 1"),
        (
            {"distribution": "research", "enabled_toolsets": "web"},
            "distribution",
            "cannot be combined with enabled_toolsets",
        ),
        ({"min_containers": 5, "max_containers": 4}, "min_containers", "max_containers=4"),
        ({"max_containers": 1, "slots_per_container": 4, "hook_slots": 4}, "hook_slots", "leaves none for rollouts"),
        ({"require_sandbox": False, "isolation": "full"}, "require_sandbox", "auto or user"),
        ({"enabled_toolsets": "files,bash", "disabled_toolsets": "bash"}, "disabled_toolsets", "'bash'"),
        ({"tool_call_parser": "guess"}, "tool_call_parser", "hermes"),
        ({"tool_call_parser": "qwen3coder"}, "tool_call_parser", "did you mean 'qwen3_coder'?"),
        ({"agent_keep_tool_outputs": 2}, "agent_keep_tool_outputs", "without agent_context_tokens"),
        ({"nomad_address": "127.0.0.1:4646"}, "nomad_address", "http(s)://host:port"),
        ({"driver": "podman"}, "driver", "docker"),
        ({"slot_memory_mib": 512}, "slot_memory_mib", "lower slot_workspace_mib"),
        ({"slots_per_container": 0}, "slots_per_container", "greater than"),
        ({"acquire_timeout_s": -1}, "acquire_timeout_s", "greater than 0"),
        ({"terminal_timeout": -1}, "terminal_timeout", "greater than 0"),
        ({"tool_timeout_s": float("nan")}, "tool_timeout_s", "nan"),
        ({"verification": "none"}, "verification", "'sealed'"),
        ({"extra_body": "{oops"}, "extra_body", "JSON object"),
        ({"sandbox_binds": "relative:x"}, "sandbox_binds", "/source:/target"),
        ({"agent_max_step": 3}, "agent_max_step", "did you mean agent_max_steps?"),
        ({"group_size": "four"}, "group_size", "integer"),
    ],
)
def test_what_contradicts_or_is_out_of_range_is_named(given: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AgentEnvConfig(**given)
    assert caught.value.field == field
    assert said in str(caught.value)


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
def test_known_parsers_are_accepted(parser: str) -> None:
    assert AgentEnvConfig(tool_call_parser=parser).tool_call_parser == parser


def test_the_token_is_not_in_the_repr() -> None:
    assert "repr=False" in repr(AgentEnvConfig.model_fields["tool_server_token"])


def test_toolsets_and_tool_names_choose_tools() -> None:
    builtin = ToolCatalog.builtin()
    assert choose(builtin, None, None).names == builtin.names
    assert choose(builtin, ["terminal"], None).names == ("bash", "terminal", "process")
    assert "bash" not in choose(builtin, None, ["terminal"])
    assert choose(builtin, ["files"], ["artifacts", "search", "patch"]).names == (
        "read_file",
        "write_file",
        "list_files",
    )
    with pytest.raises(ConfigError, match=r"enabled_toolsets.*'browser'.*set tool_server_url"):
        choose(builtin, ["browser"], None)
    with pytest.raises(ConfigError, match="no tool is left"):
        choose(builtin, ["bash"], ["terminal"])


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["--env.batch_size", "-1", "--x", "y"], ["--env.batch_size=-1", "--x", "y"]),
        (["process", "--a", "-.5", "-1"], ["process", "--a=-.5", "-1"]),
        (["--flag", "--other", "-o", "--k=v", "-3"], ["--flag", "--other", "-o", "--k=v", "-3"]),
    ],
)
def test_negative_numbers_are_not_taken_for_flags(given: list[str], read: list[str]) -> None:
    assert joined_negatives(given) == read


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["process", "--env.group_sise", "3"],
            "--env.group_sise: unknown setting (did you mean",
        ),
        (
            ["process", "--env.group_sise=3"],
            "--env.group_sise: unknown setting (did you mean",
        ),
        (["process", "--config", "no.yaml"], "--config: no such file: 'no.yaml'"),
        (["process", "--config"], "--config: has no value"),
        (["process", "--config", ""], "--config: no such file: ''"),
        (["process", "--env.group_size", "--env.total_steps", "2"], "--env.group_size: has no value (give one; true"),
        (["process", "--openai.model_name"], "--openai.model_name: has no value"),
    ],
)
def test_a_command_line_that_cannot_be_meant_is_refused_by_name(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_arguments(arguments, AgentEnvConfig.model_fields)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("enw:\n  group_size: 2\n", "has a section 'enw', which nothing reads (did you mean 'env'?)"),
        ("groups: 2\n", "has a section 'groups', which nothing reads (sections: env, openai, slurm, testing)"),
        ("env: [\n", "cannot be read"),
        ("- env\n", "has no sections"),
    ],
)
def test_a_settings_file_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (file := tmp_path / "settings.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        check_arguments(["process", "--config", str(file)], AgentEnvConfig.model_fields)
    assert str(caught.value).startswith(f"--config: {file} ")
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["", "env:\nopenai:\n  model_name: x\nslurm: false\n"])
def test_a_command_line_that_can_be_meant_is_left_alone(tmp_path: Path, text: str) -> None:
    (file := tmp_path / "settings.yaml").write_text(text)
    words = [
        "process",
        "--env.group_size",
        "-1",
        f"--config={file}",
        "--env.runs_dir",
        "",
        "--slurm",
        "false",
        "--help",
    ]
    check_arguments(words, AgentEnvConfig.model_fields)


def test_binds_are_given_as_text_or_as_they_are() -> None:
    config = AgentEnvConfig(sandbox_binds=(Bind("/a", "/b"), "/c:/d"))
    assert config.sandbox_binds == ["/a:/b", "/c:/d"]
    assert config.container_settings().binds == (Bind("/a", "/b"), Bind("/c", "/d"))


def test_lists_and_objects_are_words_of_a_command_line() -> None:
    of_atropos = get_prefixed_pydantic_model(AgentEnvConfig, "env.")
    words = ["--env.sandbox_binds", "/a:/b,/c:/d", "--env.sandbox_env", '{"A": "b"}', "--env.enabled_toolsets", "files"]
    parsed = vars(pydantic_class_to_parser(of_atropos, default_value_override={}).parse_args(words))
    given = of_atropos(**{name: value for name, value in parsed.items() if f"--{name}" in words}).model_dump()
    assert given["env.sandbox_binds"] == ["/a:/b", "/c:/d"]
    assert given["env.sandbox_env"] == {"A": "b"}
    assert given["env.enabled_toolsets"] == ["files"]


def test_secrets_in_objects_are_not_written_down() -> None:
    given = '{"GITHUB_TOKEN": "ghp_secret", "PATH": "/bin"}'
    assert AgentEnvConfig(sandbox_env=given).compared()["sandbox_env"] == {"PATH": "/bin"}
    words = ["process", "--env.sandbox_env", given, "--env.group_size", "2"]
    found = invocation_of(["my_env.py"], words, AgentEnvConfig.secrets(), None)
    assert found.words == ["my_env.py", "process", "--env.group_size", "2"]
    assert found.omitted == ["--env.sandbox_env"]
    assert "ghp_secret" in found.secrets


def test_addresses_are_compared_without_their_passwords() -> None:
    given = AgentEnvConfig(tool_pool_mode="farm", farm_url="http://me:pass-word@farm:80/x").compared()
    assert given["farm_url"] == "http://farm:80/x"


def test_secrets_in_objects_of_a_settings_file_are_known(tmp_path: Path) -> None:
    (file := tmp_path / "settings.yaml").write_text(
        "env:\n"
        "  sandbox_env: {GITHUB_TOKEN: ghp_secret, PATH: /bin}\n"
        '  tool_server_config: \'{"search": [{"api_key": "sk-nested"}]}\'\n'
        "  farm_url: http://user:pass-word@farm:80\n"
        "openai:\n"
        "- {api_key: sk-first}\n"
        "- {api_key: sk-second, model_name: m}\n"
    )
    found = invocation_of(["my_env.py"], ["process", "--config", str(file)], AgentEnvConfig.secrets(), None)
    assert {"ghp_secret", "sk-nested", "http://user:pass-word@farm:80", "sk-first", "sk-second"} <= set(found.secrets)
    assert "/bin" not in found.secrets
    assert found.words == ["my_env.py", "process", "--config", str(file)]
