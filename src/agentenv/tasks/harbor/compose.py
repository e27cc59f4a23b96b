"""The services of a compose file, each as a machine: read strictly. The agent works in one of them
(:mod:`agentenv.tasks.harbor.services` reads what the others have besides).

What changes a machine and cannot be done for a slot is refused by name; other fields are named as unused. What the file
mounts of the task's directory is copied into the slot (:class:`agentenv.tasks.harbor.task.Mount`).
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from agentenv.errors import ConfigError
from agentenv.tasks.harbor.task import (
    PRIVATE,
    PUBLIC,
    Mount,
    absolute,
    image_reference,
    inside,
    not_offered,
    text_of,
    wrong,
)
from agentenv.wire.network import NetworkPolicy
from agentenv.wire.roots import why_no_volumes

_READ: Final = frozenset(
    {"build", "image", "command", "environment", "working_dir", "user", "network_mode", "volumes", "deploy"}
    | {"cpus", "mem_limit"}
)
"""Fields of a service that mean something here."""
_OF_MAIN: Final = frozenset({"build", "image", "command", "environment", "working_dir", "volumes"})
"""Those that a file of Harbor's may add to its ``main``."""
_OF_GROUPS: Final = frozenset(
    {"depends_on", "networks", "links", "expose", "ports", "healthcheck", "hostname", "container_name"}
)
"""Fields of services of which there are several."""
_OF_SIDE: Final = _OF_GROUPS | {"entrypoint", "restart"}
"""Fields of those in which the agent does not work."""
_PARTS: Final = frozenset({"services", "version", "name", "volumes", "networks"})
"""Of a compose file."""
_NEEDLESS: Final = frozenset(
    {"container_name", "platform", "init", "tty", "stdin_open", "labels", "restart", "stop_grace_period", "logging"}
    | {"stop_signal", "pull_policy"}
)
"""Fields of a service that slots need no word about."""
_LACKING: Final[Mapping[str, str]] = {
    "privileged": "slots have only the rights of docs/isolation.md",
    "cap_add": "slots have only the rights of docs/isolation.md",
    "security_opt": "slots have only the rights of docs/isolation.md",
    "devices": "slots have no devices of the machine",
    "runtime": "slots have no devices of the machine",
    "gpus": "slots have no GPU",
    "entrypoint": "programs of the agent's image are not started",
    "depends_on": "there are no other services",
    "networks": "there are no other services",
    "links": "there are no other services",
    "scale": "there is one of each service",
    "pid": "slots share nothing with each other",
    "ipc": "slots share nothing with each other",
    "extends": "write out what it would take over",
    "env_file": "name the variables in environment",
    "extra_hosts": "slots have the hosts of their network",
    "secrets": "name variables in environment",
    "configs": "COPY it in the Dockerfile",
    "tmpfs": "all of a slot's files are in memory, or on disk (storage)",
}
"""Fields of a service that mean something a slot cannot do, and why."""
_LOGS: Final = re.compile(r"\$\{(T_BENCH|HOST)_\w+\}:")
"""A volume of the harness: of Terminal-Bench, and of a file that ``harbor task migrate`` has made."""
_IDLE: Final = re.compile(r"((exec )?(sleep (infinity|inf|\d+[smhd]?)|tail -f /dev/null)|(/bin/)?(ba)?sh);?")
_MOST_COMMAND_CHARS: Final = 1000
_SHELLS: Final = frozenset({"sh", "bash", "/bin/sh", "/bin/bash"})
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([bkmg])?b?", re.IGNORECASE)
_MIB_OF: Final = {"b": 1 / 2**20, "k": 1 / 1024, "m": 1, "g": 1024}
_VARIABLE: Final = re.compile(r"\$(?:(\$)|\{([A-Za-z_][A-Za-z0-9_]*)(?::?-([^}]{0,1024}))?\}|([A-Za-z_][A-Za-z0-9_]*))")
_VOLUME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_NETWORKS: Final[Mapping[str, NetworkPolicy]] = {"none": NetworkPolicy("none"), "bridge": PUBLIC, "default": PUBLIC}


def loaded(directory: Path, name: str) -> Any:
    """What a YAML file of a task has in it. Raises ConfigError."""
    text = text_of(directory, name)
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise wrong(directory, name, "has aliases (*NAME), which are not read", "write out their values")
        return yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise wrong(directory, name, f"is not valid: {' '.join(str(error).split())}") from error


@dataclass(frozen=True)
class Compose:
    """A compose file: the service in which the agent works, and those beside it."""

    main: Service
    beside: tuple[Service, ...] = ()


def read_compose(directory: Path, name: str, offered: Mapping[str, str], main: str, *, always: bool = False) -> Compose:
    """A task's compose file ``name``. ``offered``: what its templates may name. ``main``: what the agent's service is
    called, where there are several, or (``always``) in any case: the file may leave it out then. Raises ConfigError
    naming the task, the file and the field."""
    return parsed_compose(directory, name, loaded(directory, name), offered, main, always=always)


def parsed_compose(
    directory: Path, name: str, compose: Any, offered: Mapping[str, str], main: str, *, always: bool = False
) -> Compose:
    """The same of what the file ``name`` has in it."""
    services = compose.get("services") if isinstance(compose, dict) else None
    if not isinstance(services, dict) or not services or not all(isinstance(one, dict) for one in services.values()):
        raise wrong(directory, name, "has no services")
    if more := sorted(compose.keys() - _PARTS):
        raise wrong(directory, more[0], "is not supported", file=name)
    volumes = _volumes(directory, name, compose.get("volumes") or {})
    started = {str(key): one for key, one in services.items() if not one.get("profiles") or len(services) == 1}
    if always:
        started.setdefault(main, {})
    if len(started) == 1:
        ((only, raw),) = started.items()
        return Compose(Service(directory, name, only, raw, offered, volumes))
    if main not in started:
        problem = f"has several services, and none is called {main}, in which the agent works: {', '.join(started)}"
        raise wrong(directory, name, problem)
    found = {
        key: Service(directory, name, key, raw, offered, volumes, _OF_GROUPS if key == main else _OF_SIDE)
        for key, raw in started.items()
    }
    return Compose(found.pop(main), tuple(found.values()))


def _volumes(directory: Path, file: str, raw: Any) -> frozenset[str]:
    """The named volumes of a file."""
    if not isinstance(raw, dict):
        raise wrong(directory, "volumes", f"got {raw!r}", "allowed: a table", file=file)
    for name, volume in raw.items():
        more = sorted((volume or {}).keys() - {"driver", "name", "labels"}) if isinstance(volume or {}, dict) else [""]
        if more or (volume or {}).get("driver", "local") != "local":
            problem = "is not a directory of the slot's own"
            raise wrong(directory, f"volumes.{name}", problem, "allowed: a name without options", file=file)
    return frozenset(map(str, raw))


class Service:
    """Reads the fields of one service."""

    def __init__(
        self,
        directory: Path,
        file: str,
        name: str,
        raw: Mapping[str, Any],
        offered: Mapping[str, str],
        volumes: Collection[str] = (),
        more: frozenset[str] = frozenset(),
    ) -> None:
        """``volumes``: the named ones of the file. ``more``: fields that mean something here besides the usual."""
        self.directory = directory
        self.file = file
        self.name = name
        self.at = f"services.{name}"
        self.raw = raw
        self._offered = offered
        self._named_volumes = volumes
        self._more = more
        for field, why in _LACKING.items():
            if raw.get(field) and field not in more:
                raise self.error(field, f"is not supported: {why}")
        if "entrypoint" not in more:
            self._check_command()

    def check_is_main(self) -> None:
        """Raises ConfigError when it does not merely add to the ``main`` that Harbor itself describes: files,
        environment, a directory. What else a machine has is in task.toml."""
        for name in sorted(_READ - _OF_MAIN - self._more):
            if self.raw.get(name):
                raise self.error(name, "is not read", "write it into task.toml")
        if not self.raw.get("build"):
            if (image := str(self.raw.get("image") or "")) and "${" not in image:
                raise self.error("image", f"got {image!r}", "write it into task.toml (environment.docker_image)")
        elif self.image() != f"dockerfile:{inside(self.directory, self._below('.'))}":
            raise self.error("build", "is another directory", f"allowed: {posixpath.dirname(self.file)}")

    def unknown(self) -> Iterable[str]:
        """Unused fields."""
        known = _READ | _NEEDLESS | _LACKING.keys() | self._more
        return sorted(f"{self.at}.{name}" for name in self.raw if name not in known)

    def image(self) -> str:
        """A reference: of the Dockerfile, else of the named image."""
        build = self.raw.get("build")
        if build is None:
            return self._named_image()
        table = {"context": build} if isinstance(build, str) else build
        if not isinstance(table, dict):
            raise self.error("build", f"got {build!r}", "allowed: a directory, or a table with context")
        for name in ("args", "target", "additional_contexts", "secrets", "ssh", "dockerfile_inline"):
            if table.get(name):
                raise self.error(f"build.{name}", "is not supported", "write it into the Dockerfile")
        if str(table.get("dockerfile", "Dockerfile")).removeprefix("./") != "Dockerfile":
            raise self.error("build.dockerfile", f"got {table['dockerfile']!r}", "allowed: Dockerfile, in the context")
        named = self._below(self.filled("build.context", str(table.get("context", "."))))
        context = inside(self.directory, named)
        if context is None or inside(self.directory, f"{named}/Dockerfile") is None:
            raise self.error("build", f"there is no Dockerfile in {named}")
        return f"dockerfile:{context}"

    def _named_image(self) -> str:
        image = str(self.raw.get("image", ""))
        if not image or "${T_BENCH_" in image:
            raise self.error("build", "is missing, and the file that image names does not exist")
        return image_reference(self.directory, f"{self.at}.image", self.filled("image", image), self.file)

    def _check_command(self) -> None:
        """Slots start no program of their own: only what would wait is accepted."""
        command = self.raw.get("command")
        words = [command] if isinstance(command, str) else [str(word) for word in command or ()]
        try:
            parts = shlex.split(command) if isinstance(command, str) and len(command) <= _MOST_COMMAND_CHARS else words
        except ValueError:
            parts = words
        if len(parts) == 3 and parts[0] in _SHELLS and parts[1] in ("-c", "-lc"):
            parts = parts[2:]
        if parts and not _IDLE.fullmatch(" ".join(parts).strip()):
            problem = f"{' '.join(parts)[:100]!r} would not be started: an image's programs are not"
            raise self.error("command", problem, "start it from the instruction or the tests instead")

    def mounts(self) -> tuple[Mount, ...]:
        """What the service mounts of the task's directory, without what the agent must not see of it."""
        listed = self._listed_volumes()
        return tuple(
            self._mount(volume, source, target)
            for volume, source, target, _ in listed
            if source not in self._named_volumes
        )

    def volumes(self) -> dict[str, str]:
        """Where named volumes are (:attr:`agentenv.wire.roots.RootSpec.volumes`)."""
        found = {
            target: f"{source}:ro" if read_only else source
            for _, source, target, read_only in self._listed_volumes()
            if source in self._named_volumes
        }
        if found and (why := why_no_volumes(found)):
            raise self.error("volumes", f"{', '.join(found)} cannot be mounted", f"allowed: {why}")
        return found

    def shared_mounts(self) -> dict[str, bool]:
        """What is mounted of the task's directory, and whether it is read-only."""
        return {
            posixpath.normpath(source): read_only
            for _, source, _, read_only in self._listed_volumes()
            if source not in self._named_volumes
        }

    def _listed_volumes(self) -> list[tuple[object, str, str, bool]]:
        """Each volume as it is written, its source and target, and whether it is read-only. Those for a harness' logs
        are left out, and those without a name, since a slot's files are its own."""
        found = []
        for volume in self.raw.get("volumes") or ():
            if isinstance(volume, str):
                if _LOGS.match(volume) or (volume.startswith("/") and ":" not in volume):
                    continue
                source, _, rest = self.filled("volumes", volume).partition(":")
                target, _, mode = rest.partition(":")
                read_only = "ro" in mode.split(",")
            elif isinstance(volume, dict) and volume.get("type") in ("bind", "volume"):
                source, target = (self.filled("volumes", str(volume.get(name, ""))) for name in ("source", "target"))
                read_only = volume.get("read_only") is True
            else:
                raise self.error("volumes", f"{volume!r} is not mounted", "COPY it in the Dockerfile")
            if _VOLUME.fullmatch(source) and source not in self._named_volumes:
                raise self.error("volumes", f"{source} is not among the file's volumes")
            found.append((volume, source, posixpath.normpath(target), read_only))
        return found

    def _mount(self, volume: object, source: str, target: str) -> Mount:
        if not target.startswith("/") or not target.strip("/") or not source.startswith("."):
            raise self.error("volumes", f"{volume!r} is not mounted", "allowed: ./FILE:/PATH, of the task's directory")
        name = self._below(source)
        place = None if name.partition("/")[0] == ".." else inside(self.directory, name)
        if place is None or self._is_private(place):
            why = "is not in the task's directory" if place is None else "has what the agent must not see"
            raise self.error("volumes", f"{source} {why}", "COPY what the agent needs in the Dockerfile")
        if place != self.directory:
            return Mount(target, (("", place),))
        below = ((child.name, inside(self.directory, child.name)) for child in sorted(place.iterdir()))
        entries = ((name, child) for name, child in below if child is not None and not self._is_private(child))
        return Mount(target, tuple(entries))

    def _is_private(self, place: Path) -> bool:
        """Whether a path without links is one that the agent must not see; a verifier's machine has no agent."""
        first = place.relative_to(self.directory).parts[:1]
        return not self.file.startswith("tests/") and bool(first) and first[0] in PRIVATE

    def _below(self, path: str) -> str:
        """A path of the compose file, which is relative to its directory, as one of the task's."""
        return posixpath.normpath(posixpath.join(posixpath.dirname(self.file), path))

    def env(self) -> dict[str, str]:
        """The environment. A variable without a value is this machine's, if it is offered."""
        variables = self.raw.get("environment") or {}
        if isinstance(variables, list):
            pairs = [str(each).partition("=") for each in variables]
            variables = {name: value if equals else None for name, equals, value in pairs}
        if not isinstance(variables, dict):
            raise self.error("environment", f"got {variables!r}", "allowed: a list of NAME=VALUE, or a table")
        found = {
            name: self._offered.get(name) if value is None else self.filled(f"environment.{name}", _as_text(value))
            for name, value in variables.items()
        }
        return {name: value for name, value in found.items() if value is not None}

    def workdir(self) -> str:
        """Empty: the image's."""
        workdir = self.filled("working_dir", self.text("working_dir"))
        return absolute(self.directory, f"{self.at}.working_dir", workdir, self.file)

    def network(self) -> NetworkPolicy:
        """That of both phases: Docker's, which reaches everything, unless there is none."""
        mode = self.text("network_mode") or "default"
        if mode not in _NETWORKS:
            raise self.error("network_mode", f"got {mode!r}", f"allowed: {', '.join(_NETWORKS)}")
        return _NETWORKS[mode]

    def cpus(self) -> float | None:
        """A limit of the slot."""
        cpus = self._limit("cpus")
        if cpus is None:
            return None
        try:
            return float(cpus)
        except ValueError as error:
            raise self.error("cpus", f"got {cpus!r}", "allowed: a number") from error

    def memory_mib(self) -> int | None:
        """A limit of the slot."""
        limit = self._limit("mem_limit", "memory")
        if limit is None:
            return None
        size = _SIZE.fullmatch(limit)
        if size is None:
            raise self.error("mem_limit", f"got {limit!r}", "allowed: 512m, 2g and the like")
        return max(1, int(float(size[1]) * _MIB_OF[(size[2] or "b").lower()]))

    def _limit(self, name: str, in_deploy: str = "") -> str | None:
        """A limit, of the service itself or below ``deploy.resources.limits``."""
        value = self.raw.get(name)
        found: Any = self.raw
        for part in ("deploy", "resources", "limits"):
            found = found.get(part) if isinstance(found, dict) else None
        if value is None and isinstance(found, dict):
            value = found.get(in_deploy or name)
        return None if value is None else self.filled(name, str(value))

    def text(self, name: str) -> str:
        """A field that is text, or a number as text; empty if it is not there."""
        value = self.raw.get(name)
        if value is None:
            return ""
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise self.error(name, f"got {value!r}", "allowed: text")
        return str(value)

    def filled(self, name: str, text: str) -> str:
        """The value of a field with all its templates (``${NAME}``, ``${NAME:-default}``, ``$NAME``; ``$$`` is a
        dollar) replaced. A task is
        a stranger's file: it gets only what was offered by name."""

        def of(found: re.Match[str]) -> str:
            dollar, variable, default = found[1], found[2] or found[4], found[3]
            if dollar:
                return dollar
            if variable in self._offered:
                return self._offered[variable]
            if default is None:
                raise not_offered(self.directory, f"{self.at}.{name}", variable, self.file)
            return default

        return _VARIABLE.sub(of, text)

    def error(self, name: str, problem: str, next_step: str = "") -> ConfigError:
        """What is wrong with a field of the service."""
        return wrong(self.directory, f"{self.at}.{name}", problem, next_step, file=self.file)


def _as_text(value: object) -> str:
    """A value as compose writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
