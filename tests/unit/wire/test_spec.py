"""What a container is: stated once, and the same for users, for jobs and for the supervisor."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentenv.config import ContainerSettings
from agentenv.errors import ConfigError
from agentenv.wire.spec import Bind, ContainerSpec, SandboxSpec, SlotLimits

GIVEN = {
    "isolation": "user",
    "closed_networks": ("10.0.0.0/8", "attached"),
    "limits": SlotLimits(processes=7),
    "binds": (Bind("/a", "/b"),),
    "env": {"A": "b"},
    "image_format": "tree",
    "allowed_capabilities": ("net_raw",),
}


def other(name: str, default: object) -> Any:
    """Something else than the default of a setting."""
    if isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, int) else GIVEN[name]


OTHERS = ContainerSpec(**{name: other(name, default) for name, default in vars(ContainerSpec()).items()})


def as_settings(spec: ContainerSpec) -> dict[str, Any]:
    fields = dict(vars(spec))
    return {"slots_per_container": fields.pop("slots"), **fields}


def test_users_set_each_of_them_with_the_same_default() -> None:
    stated = as_settings(ContainerSpec())
    assert set(ContainerSettings.model_fields) - {"require_sandbox"} == set(stated)
    assert ContainerSettings().spec() == ContainerSpec()
    assert [name for name, value in as_settings(OTHERS).items() if value == stated[name]] == []
    assert ContainerSettings(**as_settings(OTHERS)).spec() == OTHERS


def test_its_json_is_read_back_by_whoever_gets_it(tmp_path: Path) -> None:
    assert ContainerSpec.parse(json.loads(OTHERS.to_json())) == OTHERS
    assert ContainerSpec.parse({}) == ContainerSpec()
    launched = SandboxSpec.launch(OTHERS, container="c", token_file=tmp_path / "token", data_dir=tmp_path)
    (tmp_path / "spec.json").write_text(launched.to_json())
    assert SandboxSpec.load(tmp_path / "spec.json") == launched
    told = dataclasses.asdict(launched)
    assert {name: told[name] for name in dataclasses.asdict(OTHERS)} == dataclasses.asdict(OTHERS)


@pytest.mark.parametrize("least_most", [("slots", 0, 1001), ("output_bytes", 1023, 64 * 1024 * 1024 + 1)])
def test_a_number_out_of_range_is_refused_wherever_it_is_given(least_most: tuple[str, int, int]) -> None:
    name, *wrong = least_most
    for value in wrong:
        with pytest.raises(ConfigError, match=rf"{name}: got {value} \(allowed: {wrong[0] + 1} to {wrong[1] - 1}\)"):
            ContainerSpec.parse({name: value})
        with pytest.raises(ValidationError):
            ContainerSettings(**{"slots_per_container" if name == "slots" else name: value})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"isolation": "some"}, "spec.isolation: got 'some' .allowed: auto, full, user"),
        ({"slot": 1}, "unknown field 'slot' .allowed: slots, "),
        ({"slots": "1"}, "spec.slots: must be int, got str"),
        ({"closed_networks": ["ten"]}, "closed_networks: got"),
        ({"limits": {"processes": 0}}, "limits.processes: got 0"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ContainerSpec.parse(wrong)


def test_settings_that_cannot_be_are_refused_when_they_are_made() -> None:
    with pytest.raises(ConfigError, match=r"closed_networks: got .*IPv4 networks"):
        ContainerSettings(closed_networks=("ten",))
