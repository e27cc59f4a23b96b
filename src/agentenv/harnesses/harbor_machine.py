"""What a task of Harbor asks its environment to be, as the root of a slot, and what of it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentenv import ImageRoot, Service
from agentenv.errors import ConfigError
from agentenv.tasks.harbor.compose import Compose, read_compose
from agentenv.tasks.harbor.compose import Service as ComposeService
from agentenv.tasks.harbor.machine import writes
from agentenv.tasks.harbor.services import read_group, total
from agentenv.tasks.harbor.task import Group, image_reference, inside
from agentenv.tasks.harbor.task_file import COMPOSE, MAIN, VARIABLES


@dataclass(frozen=True)
class Definition:
    """The files of an environment's directory."""

    directory: Path
    """Of the task, whose files these are: none of another place is read."""
    place: str
    """The environment's directory in it."""
    compose: Compose
    group: Group

    @property
    def dockerfile(self) -> str:
        """``dockerfile:…``; empty: there is none."""
        build = inside(self.directory, f"{self.place}/Dockerfile")
        return f"dockerfile:{build.parent}" if build is not None else ""

    @property
    def unused(self) -> tuple[str, ...]:
        """Fields of the compose file that mean nothing here."""
        return tuple(field for each in (self.compose.main, *self.compose.beside) for field in each.unknown())


def read_definition(environment_dir: Path, offered: Mapping[str, str]) -> Definition:
    """``offered``: what templates of a compose file may name. Raises ConfigError naming the task, the file and the
    field that slots cannot have."""
    directory, place = environment_dir.resolve().parent, environment_dir.resolve().name
    name = f"{place}/{COMPOSE}"
    if inside(directory, name) is None:
        return Definition(directory, place, Compose(ComposeService(directory, name, MAIN, {}, {})), Group())
    compose = read_compose(directory, name, {**offered, **VARIABLES}, MAIN, always=True)
    compose.main.check_is_main()
    found = Definition(directory, place, compose, read_group(compose))
    for each in (compose.main, *compose.beside):
        each.mounts()  # raises for what cannot be mounted
    return found


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What Harbor enforces; None: nothing."""

    cpus: float | None = None
    memory_mib: int | None = None
    storage_mib: int | None = None
    storage: str = "auto"
    """Where it writes: ``memory``, ``disk``, or as it needs."""

    def of(self, definition: Definition) -> Limits:
        """With those of the services: they are limits of all together."""
        beside = definition.compose.beside
        return Limits(
            cpus=total(self.cpus, (each.cpus() for each in beside)),
            memory_mib=total(self.memory_mib, (each.memory_mib() for each in beside)),
            storage_mib=self.storage_mib,
            storage=self.storage,
        )


def chosen_image(definition: Definition, docker_image: str, *, build: bool) -> str:
    """The reference of the image that Harbor takes: the named one, or that of the Dockerfile, which ``build`` prefers.
    Raises ConfigError when there is none, or the task names files of this machine."""
    if docker_image and not (build and definition.dockerfile):
        return image_reference(definition.directory, "environment.docker_image", docker_image, "task.toml")
    if not definition.dockerfile:
        problem = f"task {definition.directory.name}: neither docker_image nor {definition.place}/Dockerfile"
        raise ConfigError("environment", problem, next_step="write one of them")
    return definition.dockerfile


def root_of(definition: Definition, image: str, limits: Limits, *, workdir: str, network: str | list[str]) -> ImageRoot:
    """The root of the trial's slot. ``workdir`` goes before that of a compose file, which goes before the image's."""
    main = definition.compose.main
    storage, storage_mib = writes(limits.storage, limits.storage_mib, limits.memory_mib)
    return ImageRoot(
        image,
        cpus=limits.cpus,
        memory_mib=limits.memory_mib,
        storage_mib=storage_mib,
        storage=storage,
        workdir=workdir or main.workdir(),
        env=main.env(),
        network=network,
        services={
            each.name: Service(each.image, each.user, each.workdir, each.env, each.volumes)
            for each in definition.group.services
        },
        volumes=main.volumes(),
        hosts=definition.group.hosts,
    )
