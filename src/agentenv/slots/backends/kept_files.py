"""What a kept farm has on disk, so that the next process that opens it finds its containers.

::

    STATE/kept-NAME/            a RunFile, held by the process that runs the farm
    STATE/kept/NAME/generation  how often the farm has been opened
    STATE/kept/NAME/CONTAINER/  lock, spec.json, token, events, log

A container's ``lock`` is its standard input: locked by its starter before the start, and held by the processes of the
container until the last of them has ended. So at any moment, whoever is killed, a locked container is alive or being
started, and any other is dead. No sweep removes these directories, because none of them has a lock of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Any, Self

from agentenv.errors import ConfigError, SandboxUnavailableError
from agentenv.locks import is_locked, try_lock
from agentenv.process_marks import process_mark
from agentenv.run_files import AlreadyRunningError, RunFile, is_held
from agentenv.slots.backends.fleet import StartFailedError
from agentenv.slots.backends.local_files import cannot_write, write_private
from agentenv.wire.spec import SandboxSpec

KIND = "kept"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_GENERATION = "generation"
_LOG_LINES, _LOG_TAIL_BYTES = 20, 8192


class KeptContainer:
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

    def write(self, spec: SandboxSpec, token: str) -> int:
        """Create the directory, with its files; a descriptor that holds its lock. Raises StartFailedError."""
        try:
            self.path.mkdir(mode=0o700)
            lock = try_lock(self._lock, create=True)
            assert lock is not None  # nobody else knows the name
        except OSError as error:
            self.remove()
            raise cannot_write(self.path.parent, error) from error
        try:
            write_private({self.token_file: token, self.spec_file: spec.to_json()})
        except StartFailedError:
            os.close(lock)
            self.remove()
            raise
        return lock

    def open_outputs(self) -> tuple[int, int]:
        """Descriptors for the container's events and its log. Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(self._events, flags, 0o600), os.open(self.log_file, flags, 0o600)

    def is_held(self) -> bool:
        """Whether anything of the container still runs, or it is being started."""
        return is_locked(self._lock)

    def is_alive(self) -> bool:
        """The same, but for what is left for a moment after its first process has ended."""
        if not self.is_held():
            return False
        detached = self.said().get("detached")
        return detached is None or process_mark(detached["pid"]) == detached["mark"]

    def spec(self) -> SandboxSpec:
        """Its specification. Raises ConfigError when it cannot be read, or is of another version."""
        return SandboxSpec.load(self.spec_file)

    def token(self) -> str:
        """Its bearer token. Raises OSError."""
        return self.token_file.read_text()

    def said(self) -> dict[str, dict[str, Any]]:
        """The last event of each kind, by kind. What a process has written outlives it; nothing outlives a crash of the
        machine, but then the container does not either."""
        events: dict[str, dict[str, Any]] = {}
        with contextlib.suppress(OSError):
            for line in self._events.read_bytes().split(b"\n")[:-1]:  # the last is being written, or empty
                with contextlib.suppress(ValueError):
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


class KeptFarm:
    """A farm's directory, held by this process: nobody else may start or stop its containers meanwhile."""

    def __init__(self, name: str, directory: Path, data_dir: Path, own: RunFile) -> None:
        self.name = name
        self.data_dir = data_dir
        self._directory = directory
        self._own = own

    @classmethod
    def open(cls, state: Path, name: str) -> Self:
        """Take the farm of this name, which is created if there is none. Raises ConfigError when another process has
        it, SandboxUnavailableError when ``state`` cannot be written."""
        if not _NAME.fullmatch(name):
            raise ConfigError("farm", f"got {name!r}", next_step="allowed: up to 32 letters, digits, - and _")
        try:
            own = RunFile.open(state, KIND, name)
        except AlreadyRunningError as error:
            pid = error.content.get("pid", "unknown")
            raise ConfigError(
                "farm", f"farm {name!r} is run by process {pid}", next_step="end that process, or choose another name"
            ) from None
        try:
            directory = state / KIND / name
            data_dir = state / "containers"
            for path in (directory, data_dir):
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
            own.write({"farm": name})
        except BaseException as error:
            own.close()
            if isinstance(error, OSError):
                raise SandboxUnavailableError(
                    f"cannot keep state in {state}: {error}", next_step="set AGENTENV_STATE_DIR to a writable directory"
                ) from error
            raise
        return cls(name, directory, data_dir, own)

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

    def new(self, index: int) -> KeptContainer:
        """A container that does not exist yet."""
        return KeptContainer(self._directory / f"{self.name}-{index}-{secrets.token_hex(4)}")

    def containers(self) -> list[KeptContainer]:
        """Those that exist, dead or alive, in order of name."""
        return containers_of(self._directory.parent.parent, self.name)

    def data(self, container: KeptContainer) -> Path:
        """The directory that a container's supervisor uses itself."""
        return self.data_dir / container.id

    def remove(self) -> None:
        """Remove what the farm has on disk, unless it has containers."""
        if not self.containers():
            (self._directory / _GENERATION).unlink(missing_ok=True)
            for path in (self._directory, self._directory.parent):
                with contextlib.suppress(OSError):  # another farm's are there
                    path.rmdir()

    def close(self) -> None:
        """Let go of the farm; its containers stay. Repeatable."""
        self._own.close()


def is_run(state: Path, name: str) -> bool:
    """Whether a process has the farm of this name."""
    return is_held(state / f"{KIND}-{name}")


def farms(state: Path) -> list[str]:
    """Names of the farms that have something on disk."""
    return sorted(path.name for path in (state / KIND).glob("*") if path.is_dir())


def containers_of(state: Path, name: str) -> list[KeptContainer]:
    """The containers of the farm of this name, dead or alive."""
    return [KeptContainer(path) for path in sorted((state / KIND / name).glob("*-*-*")) if path.is_dir()]
