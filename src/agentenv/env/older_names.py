"""Settings under the names of the harnesses that environments come from. Pure.

:data:`ALIASES` are other names of settings here, :data:`REFUSED` unsupported settings, with what to use
instead. docs/porting.md has both tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentenv.errors import ConfigError

ALIASES: Final[Mapping[str, str]] = {"max_agent_turns": "agent_max_steps", "terminal_timeout": "tool_timeout_s"}
"""Names of other harnesses → names here. Either can be set, at any time, and both be read."""

_SLOTS: Final = "every rollout gets a slot: tool_pool_mode is local or nomad"
REFUSED: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "terminal_backend": ((None, "local"), f"docker, modal, ssh and singularity are not there; {_SLOTS}"),
    "privileged": ((None, False), "containers run with the few capabilities that docs/nomad.md lists"),
    "tool_pool_size": ((None, *range(1, 10_001)), "tools need no threads"),
    "singularity_image": ((None,), 'use driver="apptainer" and sandbox_image with the path of the .sif file'),
    "terminal_cwd": ((None,), "the working directory of a slot is /workspace"),
}
"""Settings of other harnesses: the values that change nothing here, and what to use instead of any other."""
_REFUSED_FAMILIES: Final = {"modal_": _SLOTS, "docker_": _SLOTS, "ssh_": _SLOTS}
DRIVERS: Final[Mapping[str, str]] = {"singularity": "apptainer"}
"""Drivers by their former names."""


def with_names_of_here(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those that change nothing here.

    Raises: ConfigError for one that would change something and is not supported; names what to use instead.
    """
    kept = dict(given)
    for name, (harmless, instead) in REFUSED.items():
        if name in kept and kept.pop(name) not in harmless:
            raise ConfigError(name, f"{given[name]!r} is not supported", next_step=instead)
    for name in kept:
        for family, instead in _REFUSED_FAMILIES.items():
            if name.startswith(family):
                raise ConfigError(name, "no such backend exists", next_step=instead)
    if "driver" in kept:
        kept["driver"] = DRIVERS.get(kept["driver"], kept["driver"])
    return kept


def with_flags_of_here(arguments: Sequence[str]) -> list[str]:
    """A command line, whose ``--env.`` flags :func:`with_names_of_here` has treated as settings. Raises as it does."""
    kept: list[str] = []
    rest = list(arguments)
    while rest:
        flag, equals, value = (argument := rest.pop(0)).partition("=")
        name = flag.removeprefix("--env.")
        if name == flag or not (name == "driver" or name in REFUSED or name.startswith(tuple(_REFUSED_FAMILIES))):
            kept.append(argument)
            continue
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        for setting, said in with_names_of_here({name: _read(value)}).items():
            kept += [f"--env.{setting}", str(said)]
    return kept


def _read(text: str) -> object:
    """The value that a flag's text stands for."""
    words = {"true": True, "false": False, "none": None, "null": None}
    return int(text) if text.isdigit() else words.get(text.lower(), text)


def take_aliases(config: Any, given: set[str]) -> frozenset[str]:
    """Give a setting and its alias the same value; return the aliases that were set. ``given``: the names set.

    Raises: ConfigError when both were set, to different values. In a dump of a whole config (what atropos merges a
    command line into) every name is set: there only values other than the default count.
    """
    fields = type(config).model_fields
    said = given if len(given) < len(fields) else set()
    used = set()
    for alias, name in ALIASES.items():
        value, current = getattr(config, alias), getattr(config, name)
        if value is None:
            vars(config)[alias] = current
            continue
        if value != current and (name in said or current != fields[name].default):
            raise _disagree(alias, value, name, current)
        vars(config)[name] = value  # not as an assignment, after which the name would count as set
        used.add(alias)
    return frozenset(used)


def in_step(changed: Mapping[str, Any]) -> dict[str, Any]:
    """Changes of settings, with those of the other names. An alias that becomes None changes nothing.

    Raises: ConfigError when a setting and its alias would have two values.
    """
    both = dict(changed)
    for alias, name in ALIASES.items():
        if both.get(alias) is None:
            both.pop(alias, None)
            if name in both:
                both[alias] = both[name]
        elif both.setdefault(name, both[alias]) != both[alias]:
            raise _disagree(alias, both[alias], name, both[name])
    return both


def _disagree(alias: str, value: object, name: str, current: object) -> ConfigError:
    return ConfigError(alias, f"{alias}={value} and {name}={current} disagree", next_step=f"set only {name}")


def as_set(config: Any, dumped: dict[str, Any], aliases: frozenset[str], *, only_set: bool) -> dict[str, Any]:
    """A dump that has each setting under the name it was set by, so that it can be read again. ``only_set``: the dump
    has no defaults."""
    for alias, name in ALIASES.items():
        other, default = (name, type(config).model_fields[name].default) if alias in aliases else (alias, None)
        if only_set:
            dumped.pop(other, None)
        elif other in dumped:
            dumped[other] = default
    return dumped


def differing_defaults(config: Any, *, own_settings: bool) -> list[str]:
    """What may change a score, because its default is another one where ``AgentEnv[Config]`` comes from, whether it was
    set or not: a command line sets every field. ``own_settings``: the environment writes ``build_agent_config``."""
    found, temperature, there = [], config.agent_temperature, config.temperature_there
    if not config.allow_network and config.tool_pool_mode != "fake":  # whose commands have the machine's
        found.append("slots have no network here (allow_network): installing packages and cloning fail")
    here = "the model's server's" if temperature is None else temperature
    if own_settings and temperature != there:
        found.append(f"the default temperature of build_agent_config is {here} (agent_temperature, there {there})")
    elif temperature is None:
        found.append(f"the temperature is {here} (agent_temperature, there {there})")
    if not config.last_turn_scored_there:
        found.append("a rollout that reaches agent_max_steps is verified and scored, unlike there")
    return found
