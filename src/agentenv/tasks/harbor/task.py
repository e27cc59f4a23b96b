"""A task as the environment plays it, whatever format its directory has."""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from agentenv.errors import ConfigError
from agentenv.rooted import LeadsOutError, RootedDirectory, read_beneath
from agentenv.store.reference import is_of_this_machine
from agentenv.store.reference import parse as parse_reference
from agentenv.tasks.harbor.rewards import Results
from agentenv.wire.network import NetworkPolicy

DEFAULT_TIMEOUT_S: Final = 600.0
"""Harbor's: of a verifier, and of a build."""
PUBLIC: Final = NetworkPolicy("public")
"""Harbor's default."""
TESTS: Final = "/tests"
"""Where slots get the verifier's files."""
MAX_FILE_BYTES: Final = 1024 * 1024
"""Of a task's file that is read here: its settings, its instruction, its Dockerfile."""
PRIVATE: Final = frozenset({"tests", "run-tests.sh", "solution", "solution.sh", "solution.yaml"})
"""Of a task's directory, what its agent must not see."""
_OURS: Final = "a task has only what lies in its directory"
_NAME: Final = re.compile(r"(?=.{1,200}$)[A-Za-z0-9_.+-]+(?: +[A-Za-z0-9_.+-]+)*")


@dataclass(frozen=True)
class Phase:
    """What the agent's and the verifier's part have of their own."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    """``inf``: no limit, of an agent."""
    user: str = ""
    """Empty: the image's."""
    network: NetworkPolicy = PUBLIC


@dataclass(frozen=True)
class Healthcheck:
    """A command that succeeds when the machine is ready for the agent, and how often it is run; as in Docker."""

    command: str
    interval_s: float = 5.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0
    """For so long failures do not count."""
    start_interval_s: float = 5.0
    retries: int = 3
    """So many failures in a row mean that it never will be."""


Condition = Literal["service_started", "service_healthy", "service_completed_successfully"]
"""What one service waits for of another."""


@dataclass(frozen=True)
class Mount:
    """What a machine has at ``target`` instead of what its image has there: a copy of the task's files, since a slot
    shares nothing with this machine."""

    target: str
    entries: tuple[tuple[str, Path], ...]
    """Names below ``target``, and what they are; an empty name: it is ``target`` itself."""


@dataclass(frozen=True, kw_only=True)
class SideService:
    """A service beside the agent's machine: an image, and the program that is started in it."""

    name: str
    image: str
    """A reference, as :attr:`Machine.image`."""
    entrypoint: tuple[str, ...] | None = None
    """None: the image's. One that is given replaces the image's command as well."""
    command: tuple[str, ...] | None = None
    """None: the image's."""
    restart: Literal["no", "on-failure", "always"] = "no"
    user: str = ""
    workdir: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    volumes: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    healthcheck: Healthcheck | None = None
    after: Mapping[str, Condition] = field(default_factory=dict)
    """Services that it waits for, other than the agent's machine, which is there from the beginning."""


@dataclass(frozen=True)
class Group:
    """The services beside the agent's machine."""

    services: tuple[SideService, ...] = ()
    """In an order in which each comes after those that it waits for."""
    after: Mapping[str, Condition] = field(default_factory=dict)
    """What the agent's machine waits for."""
    hosts: tuple[str, ...] = ()
    """Names, besides those of the services, by which they and the machine know each other."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """An image, and what a slot of it has. ``env`` has its templates (``${NAME}``) filled in."""

    image: str
    """A reference (docs/images.md); ``dockerfile:…`` where the task has a Dockerfile and no image."""
    dockerfile: str = ""
    """``dockerfile:…`` where the task has a Dockerfile, also beside an image."""
    cpus: float | None = None
    memory_mib: int | None = None
    storage_mib: int | None = None
    workdir: str = ""
    """Empty: the image's."""
    cpus_field: str = "environment.cpus"
    memory_field: str = "environment.memory_mb"
    """What these limits are called in the task's files."""
    limits_file: str = "task.toml"
    """Where they are."""
    build_timeout_s: float = DEFAULT_TIMEOUT_S
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    volumes: Mapping[str, str] = field(default_factory=dict)
    """Absolute paths, and the name of the volume that is there."""


@dataclass(frozen=True, kw_only=True)
class Separate(Machine):
    """The verifier's machine, where it has one of its own."""

    has_tests: bool
    """Its image has the tests in it; else they are uploaded."""
    artifacts: tuple[str, ...]
    """Absolute paths that are copied to it from the agent's machine, those that are there."""


@dataclass(frozen=True, kw_only=True)
class HarborTask(Machine):
    """One task, and the machine that the agent gets."""

    name: str
    directory: Path
    instruction: str
    tests: tuple[Path, ...]
    """What the verifier's directory gets: files, and what directories have in them."""
    script: str
    """The one of these that is run."""
    solution: Path
    """The oracle's: a directory with ``solve.sh``, a script, or keys to be typed (``.yaml``). A task may have none."""
    results: Results = "reward"
    """Where the script writes its results."""
    agent: Phase = Phase()
    verifier: Phase = Phase()
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    solution_env: Mapping[str, str] = field(default_factory=dict)
    healthcheck: Healthcheck | None = None
    """Before the agent begins: of the machine, or of one step."""
    group: Group = Group()
    separate: Separate | None = None
    """None: the verifier runs on the agent's machine."""
    steps: tuple[HarborTask, ...] = ()
    """Of a task of several steps each, as a task of its own on the one machine of all; this task's own fields are then
    those of the first."""
    step: str = ""
    """What it is called, if it is one of several."""
    workdir_files: Path | None = None
    """The directory of what the working directory gets before a step; its ``setup.sh`` is run then."""
    min_reward: Mapping[str, float] = field(default_factory=dict)
    """Rewards of a step without which no further one begins."""
    reward_of_steps: Literal["mean", "final"] = "mean"
    """The task's reward: the mean of its steps', or the last one's."""
    unknown: tuple[str, ...] = ()
    """Unused fields."""

    @property
    def parts(self) -> tuple[HarborTask, ...]:
        """Its steps, or the task itself."""
        return self.steps or (self,)

    @property
    def separates(self) -> tuple[Separate, ...]:
        """The machines of verifiers."""
        return tuple(part.separate for part in self.parts if part.separate)

    @property
    def other_user(self) -> str | None:
        """The user of everything but the agent; None: the image's user. Root where the agent has another user."""
        return "root" if self.agent.user else None


def from_dockerfiles(task: HarborTask) -> HarborTask:
    """The task, each of whose machines has the image of its Dockerfile if there is one."""
    separate = task.separate and replace(task.separate, image=task.separate.dockerfile or task.separate.image)
    steps = tuple(map(from_dockerfiles, task.steps))
    return replace(task, image=task.dockerfile or task.image, separate=separate, steps=steps)


def named(directory: Path) -> str:
    """A task's name: that of its directory. Raises ConfigError when it cannot be one."""
    if not _NAME.fullmatch(directory.name):
        raise ConfigError(
            "tasks",
            f"{directory.name!r} is not a valid task name",
            next_step="letters, digits, _ . + -, and blanks between them",
        )
    return directory.name


def wrong(directory: Path, name: str, problem: str, next_step: str = "", *, file: str = "") -> ConfigError:
    """What is wrong with a field of a task's file, or with the file ``name``."""
    return ConfigError(name, f"task {directory.name}: {problem}" + (f" ({file})" if file else ""), next_step=next_step)


def inside(directory: Path, name: str) -> Path | None:
    """The file or directory of a task by that name, as a path without links; None if there is none. Raises ConfigError
    for a link that leads out of the task's directory, and for a pipe, a device or a socket."""
    try:
        with RootedDirectory(directory) as tree:
            found = tree.followed(name)
            mode = tree.status(found).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (LeadsOutError, OSError) as error:
        raise _unread(directory, name, error) from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise wrong(directory, name, "is not a regular file", _OURS)
    return directory / found


def text_of(directory: Path, name: str) -> str:
    """The text of a task's file. Raises ConfigError, also for a link that leads out of the task's directory, for what
    is not a regular file, and for more than MAX_FILE_BYTES."""
    try:
        return read_beneath(directory, name, MAX_FILE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise wrong(directory, name, f"is not UTF-8: {error.reason} at byte {error.start}") from error
    except (LeadsOutError, OSError) as error:
        raise _unread(directory, name, error) from error


def _unread(directory: Path, name: str, error: LeadsOutError | OSError) -> ConfigError:
    if isinstance(error, LeadsOutError):
        return wrong(directory, name, f"leads out of the task: {error}", _OURS)
    return wrong(directory, name, f"cannot be read: {error.strerror or error}")


def image_reference(directory: Path, name: str, text: str, file: str) -> str:
    """The value of a field that names an image. Raises ConfigError when it cannot be one, or names files or an engine
    of this machine: a task has only what lies in its directory."""
    try:
        reference = parse_reference(text)
    except ConfigError as error:
        raise wrong(directory, name, error.message, error.next_step, file=file) from error
    if is_of_this_machine(reference):
        allowed = "name a registry's, or a stored one (localhost/NAME, sha256:…)"
        raise wrong(directory, name, f"{text} is an image of this machine", allowed, file=file)
    return text


def absolute(directory: Path, name: str, text: str, file: str) -> str:
    """The value of a field that is an absolute path, or empty. Raises ConfigError."""
    if text and not text.startswith("/"):
        raise wrong(directory, name, f"got {text!r}", "allowed: an absolute path", file=file)
    return text


def not_offered(directory: Path, name: str, variable: str, file: str) -> ConfigError:
    """What is wrong with a field whose template names a variable of this machine."""
    offer = "offer it by name (host_env), if it is set"
    return wrong(directory, name, f"requests {variable} of this machine", offer, file=file)
