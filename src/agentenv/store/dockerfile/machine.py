"""What a build needs of the machines it runs on. An image slot is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import IO, Literal, Protocol

from agentenv.store.dockerfile.image_config import ImageConfig


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
        """The names in a directory, each with whether it is a directory itself (a link is none). Raises OSError."""
        ...

    async def get(self, path: str) -> IO[bytes]:
        """A tar stream, to read and close: of a directory, everything below it, with names relative to it and parents
        first; of a file, itself under its last name. Raises OSError."""
        ...

    async def checkpoint(self) -> str:
        """Freeze the files as they are; ``Start(checkpoint=…)`` goes on from there, as does this machine. A build
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
