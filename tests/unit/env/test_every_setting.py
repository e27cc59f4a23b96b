"""Every setting of containers, slots and the pool can be set in an environment, by a command, in a farm's file and in
Python."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from agentenv.api.farm_server.settings import FarmSettings
from agentenv.cli import up
from agentenv.cli.image_root import RootOptions
from agentenv.config import ContainerFields, ContainerSettings, PoolSettings
from agentenv.env.environment import AgentEnvConfig
from agentenv.env.farm_fields import CONTAINER, LIMITS
from agentenv.errors import ConfigError
from agentenv.slots.backends.registry import Backend
from agentenv.wire.spec import MIB, ContainerSpec, SlotLimits

TEXTS: dict[str, Any] = {
    "isolation": "user", "closed_networks": ["10.0.0.0/8", "attached"], "binds": ["/a:/b"], "env": {"A": "b"},
    "image_format": "tree", "allowed_capabilities": ["net_raw", "mknod"],
}  # fmt: skip
"""Other values than the defaults, of what is no number."""
CONTAINERS = [
    f"containers.{'slots_per_container' if one.name == 'slots' else one.name}"
    for one in dataclasses.fields(ContainerSpec)
    if one.name != "limits"
]
SETTINGS = [
    *CONTAINERS,
    *(f"containers.limits.{limit.name}" for limit in dataclasses.fields(SlotLimits)),
    *(f"pool.{name}" for name in PoolSettings.model_fields),
]
"""All of them, as they are named in a farm's file."""
HERE = {
    **{f"containers.{name}": here for here, name in CONTAINER.items()},
    **{f"containers.limits.{name}": here for here, name in LIMITS.items()},
}


def other_value(setting: str) -> Any:
    """Something else than the default, as it is written in a farm's file."""
    name = setting.rpartition(".")[2]
    if name in TEXTS:
        return TEXTS[name]
    default = attrgetter(setting)(FarmSettings())
    return not default if isinstance(default, bool) else default + (MIB if name.endswith("_bytes") else 1)


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(one)}" for name, one in value.items()) + "}"
    return json.dumps(value)


def in_environment(setting: str, value: Any, _: Path) -> FarmSettings:
    """With the text that a command line gives."""
    name = HERE.get(setting, setting.removeprefix("pool."))
    if name.endswith("_mib"):
        value //= MIB
    text = ",".join(value) if isinstance(value, list) else value if isinstance(value, str) else json.dumps(value)
    config = AgentEnvConfig(**{name: text})
    return FarmSettings(containers=config.container_settings(), pool=config.pool_settings())


def by_up(setting: str, value: Any, _: Path) -> FarmSettings:
    kept: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(up, "_keep", lambda _, containers, pool, *__: kept.extend([containers, pool]))
        patch.setattr(up, "run_to_end", lambda _: None)
        up.up(
            backend=Backend.fake, named=[f"{setting.removeprefix('containers.').removeprefix('pool.')}={toml(value)}"]
        )
    return FarmSettings(containers=kept[0], pool=kept[1])


def in_file(setting: str, value: Any, directory: Path) -> FarmSettings:
    (directory / "farm.toml").write_text(f"{setting} = {toml(value)}\n")
    return FarmSettings.from_file(directory / "farm.toml")


def in_python(setting: str, value: Any, _: Path) -> FarmSettings:
    section, name = setting.rsplit(".", 1)
    if section == "pool":
        return FarmSettings(pool=PoolSettings(**{name: value}))
    fields: Any = {"limits": {name: value}} if section == "containers.limits" else {name: value}
    assert fields.keys() <= ContainerFields.__annotations__.keys(), "type checkers refuse it in Sandbox(...)"
    return FarmSettings(containers=ContainerSettings.made(None, fields))


@pytest.mark.parametrize("way", [in_environment, by_up, in_file, in_python])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_can_be_set(setting: str, way: Callable[[str, Any, Path], FarmSettings], tmp_path: Path) -> None:
    value = other_value(setting)
    containers, section = ContainerSettings(), setting.rpartition(".")[0]
    if section == "pool":
        expected: Any = value
    else:
        expected = attrgetter(setting)(FarmSettings.model_validate(nested(setting, value)))
        assert expected != attrgetter(setting.removeprefix("containers."))(containers)
    assert attrgetter(setting)(way(setting, value, tmp_path)) == expected


def nested(setting: str, value: Any) -> dict[str, Any]:
    head, _, rest = setting.partition(".")
    return {head: nested(rest, value) if rest else value}


@pytest.mark.parametrize("setting", CONTAINERS)
def test_exec_and_shell_set_those_of_their_container(setting: str) -> None:
    name, value = setting.removeprefix("containers."), other_value(setting)
    found = RootOptions(settings=(f"{name}={toml(value)}",)).container()
    assert getattr(found, name) == getattr(ContainerSettings.model_validate({name: value}), name)


def test_what_they_cannot_set_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^gone_after_s: is not of a container"):
        RootOptions(settings=("gone_after_s=9",)).container()
    with pytest.raises(ConfigError, match=r"^opn_files: unknown setting \(did you mean limits\.open_files"):
        RootOptions(settings=("opn_files=9",)).container()
    with pytest.raises(ConfigError, match=r"^limits\.opn: unknown setting \(did you mean limits\.open_files\?\)$"):
        RootOptions(settings=("limits.opn=9",)).container()
    with pytest.raises(ConfigError, match=r"^limits\.other: unknown setting$"):  # not: did you mean limits?
        RootOptions(settings=("limits.other=9",)).container()
    with pytest.raises(ConfigError, match=r"^--set: got 'isolation'"):
        RootOptions(settings=("isolation",)).container()
    assert RootOptions(settings=("isolation=user",)).container().isolation == "user", "text needs no quotes"


def test_every_one_has_a_meaning() -> None:
    fields = [*AgentEnvConfig.model_fields.items(), *ContainerSettings.model_fields.items()]
    assert [name for name, field in fields if not field.description] == []
    assert [one.name for one in dataclasses.fields(SlotLimits) if not one.metadata["about"]] == []


def test_python_has_every_field_as_a_keyword() -> None:
    assert ContainerFields.__annotations__.keys() == ContainerSettings.model_fields.keys()
