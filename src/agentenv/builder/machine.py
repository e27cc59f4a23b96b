"""What a build needs of the machines it runs on, and of the images that they start with. An image slot is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import IO, Any, Final, Literal, Protocol

DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH of an image that sets none; BuildKit's ``system.DefaultPathEnv``."""
DEFAULT_SHELL: Final = ("/bin/sh", "-c")


@dataclass(frozen=True)
class ImageConfig:
    """The ``config`` object of an OCI image, with Docker's additions ``Shell`` and ``OnBuild``.

    ``env`` keeps its order. ``workdir`` is absolute, or empty for ``/``. ``user`` is as written: a name or a number,
    perhaps with a group after a colon; empty is root. A ``cmd`` or an ``entrypoint`` of None is not set.
    """

    env: tuple[tuple[str, str], ...] = ()
    user: str = ""
    workdir: str = ""
    cmd: tuple[str, ...] | None = None
    entrypoint: tuple[str, ...] | None = None
    shell: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    ports: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    stop_signal: str = ""
    on_build: tuple[str, ...] = ()

    def to_oci(self) -> dict[str, Any]:
        """The ``config`` object; what is not set is left out."""
        config: dict[str, Any] = {
            "Env": [f"{name}={value}" for name, value in self.env],
            "User": self.user,
            "WorkingDir": self.workdir,
            "Shell": list(self.shell),
            "Labels": dict(self.labels),
            "ExposedPorts": {port: {} for port in self.ports},
            "Volumes": {path: {} for path in self.volumes},
            "StopSignal": self.stop_signal,
        }
        commands = {"Cmd": self.cmd, "Entrypoint": self.entrypoint}
        given = {name: list(command) for name, command in commands.items() if command is not None}
        return {**{name: value for name, value in config.items() if value}, **given}

    def with_env(self, name: str, value: str) -> ImageConfig:
        """A variable set; one that was there keeps its place."""
        return replace(self, env=with_pair(self.env, name, value))

    def with_label(self, name: str, value: str) -> ImageConfig:
        """A label set."""
        return replace(self, labels=with_pair(self.labels, name, value))


def with_pair(pairs: tuple[tuple[str, str], ...], name: str, value: str) -> tuple[tuple[str, str], ...]:
    """The pairs with this one, in the place of an older one of its name."""
    return tuple({**dict(pairs), name: value}.items())


@dataclass(frozen=True)
class Start:
    """What a machine's root starts as: an image (its digest), a checkpoint, or nothing at all (``scratch``)."""

    image: str = ""
    checkpoint: str = ""


@dataclass(frozen=True)
class BaseImage:
    """An image that a reference meant when it was resolved."""

    digest: str
    config: ImageConfig


@dataclass(frozen=True)
class Seen:
    """What is at a path of a root. ``path`` is the path with every link on it followed, as chroot would, as far as it
    exists."""

    kind: Literal["directory", "file", "missing"]
    path: str


class Machine(Protocol):
    """A root with root inside. All paths are absolute and of the root; links on them never lead out of it."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        user: str,
        cwd: str,
        timeout_s: float,
        on_output: Callable[[bytes], None],
    ) -> int | None:
        """Run a command without input and return its exit code (128 + n for signal n); None if it was ended at its
        timeout. ``env`` is all of its environment but HOME, which is the user's unless given. ``user`` is a name or a
        number, perhaps with ``:group``, empty for root. ``cwd`` is made if it is missing. Output and errors go to
        ``on_output`` as they come. Processes that it leaves behind end with it."""
        ...

    async def put(self, stream: IO[bytes], at: str, *, owner: tuple[int, int], mode: int) -> None:
        """Unpack a tar stream (PAX) below the directory ``at``, which is made with its missing parents, of this owner
        and mode; one that exists stays as it is.

        Directories that exist take the owner, mode and time of their entries; files and links are replaced, never
        written through. Raises OSError for a directory where something else is, and for the reverse."""
        ...

    async def look(self, path: str) -> Seen:
        """What is at the path. Raises OSError if links on it lead to one another without end."""
        ...

    async def names(self, directory: str) -> Sequence[tuple[str, bool]]:
        """The names in a directory, each with whether it is a directory itself (a link is not). Raises OSError."""
        ...

    async def get(self, path: str) -> IO[bytes]:
        """A tar stream, to read and close: of a directory, everything below it, with names relative to it and parents
        first; of a file, itself under its last name. Raises OSError."""
        ...

    async def checkpoint(self) -> str:
        """Freeze the files as they are; ``Start(checkpoint=…)`` continues from there, as does this machine. A build
        makes one for each of its steps, on top of the one before."""
        ...

    async def commit(self, config: ImageConfig) -> str:
        """The files as they are and this configuration as an image; returns its digest."""
        ...


class Machines(Protocol):
    """Where machines come from, and images."""

    async def resolve(self, reference: str) -> BaseImage:
        """The image of a reference, fetched if it has to be. Raises a ConfigError for one that does not exist."""
        ...

    async def holds(self, start: Start) -> bool:
        """Whether a machine can be opened there: images and checkpoints may have been deleted."""
        ...

    def open(self, start: Start) -> AbstractAsyncContextManager[Machine]:
        """A machine with a root of its own; leaving the context discards it."""
        ...
