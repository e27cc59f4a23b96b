"""What an evaluation of inspect_ai says about its sandboxes, as slots: a configuration object, a Dockerfile, or a
compose file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from inspect_ai.util import ComposeConfig, is_compose_yaml, is_dockerfile
from pydantic import BaseModel, ConfigDict, Field

from agentenv import ImageRoot, Service, SharedFarm, shared_farm
from agentenv.errors import ConfigError
from agentenv.harnesses.limits import local_limits
from agentenv.tasks.harbor.compose import Compose, parsed_compose
from agentenv.tasks.harbor.services import read_group, total
from agentenv.tasks.harbor.task import Group, Mount

SLOTS: Final = 40
_EXTENSION: Final = "x-agentenv"
"""Of a compose file: fields of the configuration object that compose files have no word for."""
_OF_EXTENSION: Final = frozenset({"backend", "slots", "start_timeout_s", "storage_mib"})
_DEFAULT: Final = "default"
"""inspect's name of the sandbox that a sample has if nothing else is said."""


class AgentEnvSandboxConfig(BaseModel):
    """``SandboxEnvironmentSpec("agentenv", AgentEnvSandboxConfig(image="debian:trixie"))``: a slot for each sample."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str | None = None
    """As docs/images.md has it; None: a slot with the programs of this machine, read-only, and one user."""
    user: str = ""
    """Empty, as ``workdir``: the image's own."""
    workdir: str = ""
    env: dict[str, str] = Field(default_factory=dict)
    cpus: float | None = None
    memory_mib: int | None = None
    storage_mib: int | None = None
    network: Literal["none", "public"] | tuple[str, ...] = "none"
    """A tuple: only these hosts."""
    backend: Literal["local", "nomad", "farm"] = "local"
    """``farm``: a farm service."""
    slots: int = SLOTS
    """How many samples the farm of this process can have at once; ``farm``: the service says that."""
    start_timeout_s: float = 600.0
    """How long a sample waits for its slot."""

    def __hash__(self) -> int:
        return hash(self.model_dump_json())


@dataclass(frozen=True)
class Plan:
    """The slot of a sample."""

    config: AgentEnvSandboxConfig
    main: str = _DEFAULT
    """The name of the sandbox that is its default."""
    services: Mapping[str, Service] = field(default_factory=dict)
    volumes: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    group: Group = field(default_factory=Group)
    unused: tuple[str, ...] = ()
    """Fields of a compose file that mean nothing here."""

    def root(self) -> ImageRoot | None:
        """None: no image."""
        asked = self.config
        if asked.image is None:
            return None
        return ImageRoot(
            asked.image,
            cpus=asked.cpus,
            memory_mib=asked.memory_mib,
            storage_mib=asked.storage_mib,
            user=asked.user,
            workdir=asked.workdir,
            env=asked.env,
            network=list(asked.network) if isinstance(asked.network, tuple) else asked.network,
            services=self.services,
            volumes=self.volumes,
            hosts=self.group.hosts,
        )

    def farm(self) -> SharedFarm:
        """The farm of this process that such slots are taken from. Raises ConfigError."""
        asked = self.config
        if asked.backend == "farm":
            return shared_farm("farm", start_timeout_s=asked.start_timeout_s)
        network = asked.network != "none"
        if asked.image is not None:
            limits = local_limits(asked.backend)
        else:
            limits = {} if asked.memory_mib is None else {"memory_bytes": asked.memory_mib * 2**20}
        return shared_farm(
            asked.backend,
            slots=asked.slots,
            start_timeout_s=asked.start_timeout_s,
            allow_network=network,
            limits=limits,
        )


def planned(config: BaseModel | str | None, metadata: Mapping[str, Any]) -> Plan:
    """The slot that a sample's configuration means. ``metadata``: the sample's, which compose files may name
    (``${SAMPLE_METADATA_NAME}``), as they may this process's environment. Raises ConfigError naming what slots do not
    have."""
    if config is None or isinstance(config, AgentEnvSandboxConfig):
        return _checked(Plan(config or AgentEnvSandboxConfig()))
    if isinstance(config, ComposeConfig):
        return _of_compose(Path.cwd(), "compose.yaml", config.model_dump(exclude_none=True, by_alias=True), metadata)
    if isinstance(config, str) and is_dockerfile(config):
        place = Path(config).resolve()
        if place.name != "Dockerfile":
            raise ConfigError("sandbox", f"got {config}", next_step="allowed: a file that is called Dockerfile")
        return Plan(AgentEnvSandboxConfig(image=f"dockerfile:{place.parent}", network="public"))
    if isinstance(config, str) and is_compose_yaml(config):
        place = Path(config).resolve()
        try:
            raw = yaml.safe_load(place.read_text())
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError("sandbox", f"{config} cannot be read: {error}") from error
        return _of_compose(place.parent, place.name, raw, metadata)
    allowed = "allowed: an AgentEnvSandboxConfig, a Dockerfile, a compose file"
    raise ConfigError("sandbox", f"got {config!r}", next_step=allowed)


def sample_variables(metadata: Mapping[str, Any]) -> dict[str, str]:
    """A sample's metadata as the variables that compose files name."""
    return {f"SAMPLE_METADATA_{key.replace(' ', '_').upper()}": str(value) for key, value in metadata.items()}


def _checked(plan: Plan) -> Plan:
    """Raises ConfigError for what only an image can have."""
    asked = plan.config
    given: dict[str, object] = {"user": asked.user, "cpus": asked.cpus, "storage_mib": asked.storage_mib}
    given["network"] = asked.network if isinstance(asked.network, tuple) else None
    if asked.image is None and (named := [name for name, value in given.items() if value]):
        raise ConfigError(named[0], "is for sandboxes with an image", next_step="name an image, or leave it out")
    return plan


def _of_compose(directory: Path, file: str, raw: Any, metadata: Mapping[str, Any]) -> Plan:
    extension = raw.pop(_EXTENSION, {}) if isinstance(raw, dict) else {}
    if more := sorted(extension.keys() - _OF_EXTENSION):
        allowed = f"allowed: {', '.join(sorted(_OF_EXTENSION))}"
        raise ConfigError(f"{_EXTENSION}.{more[0]}", f"is not known ({file})", next_step=allowed)
    if isinstance(raw, dict):
        raw = {name: value for name, value in raw.items() if not str(name).startswith("x-")}
    offered = {**os.environ, **sample_variables(metadata)}
    main = _main_of(raw)
    compose = parsed_compose(directory, file, raw, offered, main)
    group = read_group(compose)
    service = compose.main
    network = service.network() if not group.services else None
    config = AgentEnvSandboxConfig(
        image=service.image(),
        user=service.text("user"),
        workdir=service.workdir(),
        env=service.env(),
        cpus=total(service.cpus(), (each.cpus() for each in compose.beside)),
        memory_mib=total(service.memory_mib(), (each.memory_mib() for each in compose.beside)),
        network="none" if network is not None and network.kind == "none" else "public",
        **extension,
    )
    return Plan(
        config,
        main=service.name,
        services={
            each.name: Service(each.image, each.user, each.workdir, each.env, each.volumes) for each in group.services
        },
        volumes=service.volumes(),
        mounts=service.mounts(),
        group=group,
        unused=_unused(compose),
    )


def _main_of(raw: Any) -> str:
    """The service with ``x-default: true``; else inspect's default."""
    services = raw.get("services") if isinstance(raw, dict) else None
    named = services.items() if isinstance(services, dict) else ()
    return next((str(name) for name, one in named if isinstance(one, dict) and one.get("x-default")), _DEFAULT)


def _unused(compose: Compose) -> tuple[str, ...]:
    every = (name for each in (compose.main, *compose.beside) for name in each.unknown())
    return tuple(name for name in every if not name.rpartition(".")[2].startswith("x-"))
