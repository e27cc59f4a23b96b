"""Settings of an environment whose slots belong to a farm service."""

from __future__ import annotations

from typing import Any

import pytest

from agentenv.env.environment import AgentEnvConfig
from agentenv.env.farm_fields import OF_THE_FARM
from agentenv.errors import ConfigError

OTHERS: dict[str, Any] = {
    "isolation": "user", "sandbox_binds": ["/a:/b"], "sandbox_env": {"A": "b"}, "closed_networks": ["10.0.0.0/8"],
    "image_format": "tree", "spare_shells": False, "allowed_capabilities": ["net_raw"], "allow_nested_namespaces": True,
    "nomad_address": "http://nomad:4646", "sandbox_job_id": "another", "sandbox_image": "another", "driver": "raw_exec",
}  # fmt: skip
"""Other values than the default; of a number it is one more."""


def test_settings_that_are_given_as_they_are_by_default_contradict_nothing() -> None:
    """atropos' command line gives every setting, and a --config file may give some."""
    defaults = AgentEnvConfig().model_dump()
    assert AgentEnvConfig(**{**defaults, "tool_pool_mode": "farm"}).tool_pool_mode == "farm"


@pytest.mark.parametrize("field", OF_THE_FARM)
def test_what_is_the_farm_s_to_say_is_refused(field: str) -> None:
    other = OTHERS[field] if field in OTHERS else AgentEnvConfig.model_fields[field].get_default() + 1
    with pytest.raises(ConfigError, match=f"{field}: is set by the farm service"):
        AgentEnvConfig(**{"tool_pool_mode": "farm", field: other})


@pytest.mark.parametrize("field", ["farm_url", "farm_token", "farm_run"])
def test_settings_of_a_farm_are_refused_without_one(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}: is set without tool_pool_mode='farm'"):
        AgentEnvConfig(**{field: "x"})
