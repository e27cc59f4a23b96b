"""The files of containers on this machine: what their starter writes for them, and what dead ones leave.

::

    STATE/launch-RANDOM/            a RunFile, held by the process whose containers end with it
    STATE/launch-RANDOM/CONTAINER/  spec.json, token, events, log
    STATE/kept-NAME/                a RunFile, held by the process that runs a farm of detached containers
    STATE/kept/NAME/generation      how often that farm has been opened
    STATE/kept/NAME/CONTAINER/      the same files, and lock
    STATE/containers/CONTAINER/     what a container's supervisor uses itself

A detached container's ``lock`` is its standard input: locked by its starter before the start, and held by the processes
of the container until the last of them has ended. So at any moment, whoever is killed, a locked container is alive or
being started, and any other is dead. No sweep removes the directories below ``kept``, because none of them has a lock
of its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import time
from pathlib import Path
from typing import Any, Self

from agentenv import subordinate_ids
from agentenv.config import cache_dir
from agentenv.deadlines import scaled
from agentenv.errors import ConfigError, SandboxUnavailableError
from agentenv.locks import is_locked, try_lock
from agentenv.process_marks import process_mark
from agentenv.run_files import AlreadyRunningError, RunFile, is_held, remove_if_dead
from agentenv.sandbox.supervisor.sweep import sweep_container
from agentenv.slots.backends.base import StartFailed
from agentenv.slots.backends.fleet import StartFailedError
from agentenv.store.layout import Layout
from agentenv.wire.spec import Isolation, SandboxSpec

logger = logging.getLogger(__name__)

_LAUNCH = "launch"
_DETACHED = "kept"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_GENERATION = "generation"
_LOG_LINES, _LOG_TAIL_BYTES = 20, 8192
_SWEEP_WITHIN_S, _SWEEP_PAUSE_S = scaled(20.0), 0.05


class ContainerFiles:
    """The directory of one container."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.token_file = path / "token"
        self.spec_file = path / "spec.json"
        self._lock = path / "lock"
        self._events = path / "events"
        self.log_file = path / "log"

    @property
    def id(self) -> str:
        """The container's name: the farm's, its index and a random number."""
        return self.path.name

    @property
    def index(self) -> int:
        """Its place in the farm."""
        return int(self.id.rsplit("-", 2)[1])

    def write(self, spec: SandboxSpec, token: str) -> None:
        """Create the directory with token and spec, all for this user only. Raises StartFailedError (the disk is full);
        some may exist then."""
        try:
            self.path.mkdir(mode=0o700)
            for path, text in ((self.token_file, token), (self.spec_file, spec.to_json())):
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                    file.write(text)
        except OSError as error:
            raise self._cannot_write(error) from error

    def lock(self) -> int:
        """A descriptor that holds the container's lock. Raises StartFailedError."""
        try:
            lock = try_lock(self._lock, create=True)
        except OSError as error:
            raise self._cannot_write(error) from error
        assert lock is not None  # nobody else knows the name
        return lock

    def open_outputs(self) -> tuple[int, int]:
        """Descriptors for the container's events and its log. Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(self._events, flags, 0o600), os.open(self.log_file, flags, 0o600)

    def is_held(self) -> bool:
        """Whether anything of a detached container still runs, or it is being started."""
        return is_locked(self._lock)

    def is_alive(self) -> bool:
        """The same, but for what is left for a moment after its first process has ended."""
        if not self.is_held():
            return False
        detached = self.events().get("detached")
        return detached is None or process_mark(detached["pid"]) == detached["mark"]

    def spec(self) -> SandboxSpec:
        """Its specification. Raises ConfigError when it cannot be read, or is of another version."""
        return SandboxSpec.load(self.spec_file)

    def token(self) -> str:
        """Its bearer token. Raises OSError."""
        return self.token_file.read_text()

    def events(self) -> dict[str, dict[str, Any]]:
        """The last event of each kind, by kind. What a process has written outlives it; nothing outlives a crash of the
        machine, but then the container does not either."""
        events: dict[str, dict[str, Any]] = {}
        with contextlib.suppress(OSError):
            for line in self._events.read_bytes().split(b"\n")[:-1]:  # the last is being written, or empty
                with contextlib.suppress(ValueError, TypeError, KeyError):  # printed by something else
                    event = json.loads(line)
                    events[event["event"]] = event
        return events

    def last_words(self) -> str:
        """The end of its log."""
        try:
            with self.log_file.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
                lines = file.read().decode("utf-8", "replace").splitlines()[-_LOG_LINES:]
        except OSError:
            lines = []
        return "it logged: " + " | ".join(line[:500] for line in lines) if lines else "it logged nothing"

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _cannot_write(self, error: OSError) -> StartFailedError:
        return StartFailedError(
            StartFailed(
                f"cannot write to {self.path.parent}: {error.strerror}",
                next_step="free some space there, or set AGENTENV_STATE_DIR to a directory with room",
                permanent=True,
            )
        )


class FarmFiles:
    """The directories of a farm's containers, held by this process: nobody else may start or stop them meanwhile."""

    def __init__(self, state: Path, name: str, own: RunFile, directory: Path) -> None:
        self.data_dir = state / "containers"
        self._name = name
        self._own = own
        self._directory = directory

    @classmethod
    def temporary(cls, state: Path) -> Self:
        """For containers that end with this process. Removes what dead processes have left of theirs. Raises
        SandboxUnavailableError when ``state`` cannot be written."""
        try:
            for left in state.glob(f"{_LAUNCH}-*"):
                remove_if_dead(left)
        except OSError as error:
            raise _cannot_keep(state, error) from error
        own = RunFile.open(state, _LAUNCH, secrets.token_hex(4))
        return cls(state, "local", own, own.directory)._made()

    @classmethod
    def open(cls, state: Path, name: str) -> Self:
        """For detached containers: take the farm of this name, which is created if there is none. Raises ConfigError
        when another process has it, SandboxUnavailableError when ``state`` cannot be written."""
        if not _NAME.fullmatch(name):
            raise ConfigError("farm", f"got {name!r}", next_step="allowed: up to 32 letters, digits, - and _")
        try:
            own = RunFile.open(state, _DETACHED, name)
        except AlreadyRunningError as error:
            pid = error.content.get("pid", "unknown")
            raise ConfigError(
                "farm", f"farm {name!r} is run by process {pid}", next_step="end that process, or choose another name"
            ) from None
        return cls(state, name, own, state / _DETACHED / name)._made()

    def _made(self) -> Self:
        try:
            for path in (self._directory, self.data_dir):
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._own.write({"farm": self._name})
        except OSError as error:
            self._own.close()
            raise _cannot_keep(self.data_dir.parent, error) from error
        return self

    def next_generation(self) -> int:
        """Count one opening: 1 for the first, then one more for each. Raises OSError."""
        file = self._directory / _GENERATION
        try:
            generation = int(file.read_text()) + 1
        except (FileNotFoundError, ValueError):
            generation = 1
        new = file.with_suffix(".new")
        new.write_text(f"{generation}\n")
        new.replace(file)
        return generation

    def new(self, index: int) -> ContainerFiles:
        """A container that does not exist yet."""
        return ContainerFiles(self._directory / f"{self._name}-{index}-{secrets.token_hex(4)}")

    def containers(self) -> list[ContainerFiles]:
        """Those that exist, dead or alive, in order of name."""
        return _containers_in(self._directory)

    def remove(self) -> None:
        """Remove what a farm of detached containers has on disk, unless it has containers."""
        if not self.containers():
            (self._directory / _GENERATION).unlink(missing_ok=True)
            for path in (self._directory, self._directory.parent):
                with contextlib.suppress(OSError):  # another farm's are there
                    path.rmdir()

    def close(self) -> None:
        """Let go of the farm; detached containers stay. Repeatable."""
        self._own.close()


def is_run(state: Path, name: str) -> bool:
    """Whether a process has the farm of this name."""
    return is_held(state / f"{_DETACHED}-{name}")


def farms(state: Path) -> list[str]:
    """Names of the farms of detached containers that have something on disk."""
    return sorted(path.name for path in (state / _DETACHED).glob("*") if path.is_dir())


def containers_of(state: Path, name: str) -> list[ContainerFiles]:
    """The containers of the farm of this name, dead or alive."""
    return _containers_in(state / _DETACHED / name)


def _containers_in(directory: Path) -> list[ContainerFiles]:
    return [ContainerFiles(path) for path in sorted(directory.glob("*-*-*")) if path.is_dir()]


def _cannot_keep(state: Path, error: OSError) -> SandboxUnavailableError:
    return SandboxUnavailableError(
        f"cannot keep state in {state}: {error}", next_step="set AGENTENV_STATE_DIR to a writable directory"
    )


def local_store(isolation: Isolation) -> str:
    """The image store of this user, if containers of that isolation may have image slots here: root's, and those of
    users who have subordinate ids. It is made if it is missing: a container finds out at its start what it can show of
    a store. Blocks."""
    if os.geteuid() != 0 and (isolation == "user" or subordinate_ids.refusal() is not None):
        return ""
    directory = cache_dir() / "store"
    try:
        Layout(directory).create()
    except OSError as error:  # plain slots need none
        logger.warning("the image store cannot be made in %s, so there are no slots with images: %s", directory, error)
        return ""
    return str(directory)


def local_disk() -> str:
    """Where containers on this machine keep layers on its disk: the state directory is in memory on many."""
    return str(cache_dir() / "disk")


def sweep_left(directory: Path) -> None:
    """Remove the cgroups and the directory of a container that was killed; after an orderly end there is nothing to
    remove.

    Waits a few seconds for its lock, which its supervisor holds until the kernel has ended it.
    """
    until_s = time.monotonic() + _SWEEP_WITHIN_S
    while directory.exists() and time.monotonic() < until_s:
        if sweep_container(directory) is None:
            time.sleep(_SWEEP_PAUSE_S)
