"""Checkpoints: files that slots have written, kept read-only below this container's directory.

One is a stack: the image (of a plain slot: nothing), then the layer of each checkpoint up to this one. A layer is a
file system of its own (the tmpfs that was a slot's writable layer or workspace, or the one on the disk), so that it
goes away in one unmount. Where workspaces cannot be layers, one of a plain slot is a tar of it, in a file system too.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from agentenv.errors import CheckpointError, ConfigError
from agentenv.sandbox.supervisor import mounts, syscalls
from agentenv.sandbox.supervisor.syscalls import MS_MOVE, MS_NODEV, MS_RDONLY, MS_REMOUNT
from agentenv.sandbox.supervisor.user_namespace import Ids
from agentenv.wire.roots import RootSpec

MAX_LAYERS: Final = 64
"""Checkpoints that may lie below a slot: each costs every lookup of a name a little."""


@dataclass(frozen=True)
class FrozenLayer:
    """A layer that is no longer written to: a file system, and the directory in it that is the layer's root. ``ids``:
    those under which its files were written."""

    mount: Path
    files: Path
    ids: Ids
    memory_bytes: int
    """0: it is on the disk."""


@dataclass(frozen=True)
class Packed:
    """The workspace of a plain slot as a tar (``slottar pack-whole``), without owners."""

    mount: Path
    memory_bytes: int

    @property
    def tar(self) -> Path:
        """The tar."""
        return self.mount / "workspace.tar"


@dataclass(frozen=True)
class Beside:
    """What an image slot has beside its main root: a slot that begins with a checkpoint must have the same, since the
    layers of all roots, and the volumes, are in one file system."""

    services: tuple[tuple[str, str], ...] = ()
    """Name and image of each, in order."""
    volumes: frozenset[str] = frozenset()

    @classmethod
    def of(cls, root: RootSpec) -> Self:
        """Those that a root requests."""
        every = [root.volumes, *(service.volumes for service in root.services)]
        volumes = frozenset(name.removesuffix(":ro") for each in every for name in each.values())
        return cls(tuple((service.name, service.image) for service in root.services), volumes)

    def __str__(self) -> str:
        services = ", ".join(f"{name} ({image[:19]})" for name, image in self.services) or "no services"
        return f"{services}; {', '.join(sorted(self.volumes)) or 'no volumes'}"


NOTHING_BESIDE: Final = Beside()


@dataclass(frozen=True)
class Checkpoint:
    """An image and the layers above it, the upmost first."""

    image: str
    """Empty: layers of a plain slot."""
    layers: tuple[FrozenLayer, ...]
    beside: Beside = NOTHING_BESIDE


class Checkpoints:
    """See the module. ``place`` is an empty directory; ``budget_bytes`` bounds the memory of all layers kept. Layers on
    a disk are bounded by what that has free."""

    def __init__(self, place: Path, budget_bytes: int) -> None:
        self.layered = False
        """Whether workspaces can be layers here; otherwise they are copied."""
        self._place = place
        self._budget_bytes = budget_bytes
        self._by_name: dict[str, Checkpoint | Packed] = {}
        self._mounted: dict[Path, FrozenLayer | Packed] = {}
        self._stood_on: Counter[Path] = Counter()
        """How many slots use each layer."""
        self.one_at_a_time = asyncio.Lock()
        """To be held while a workspace is packed, so that the room is known that is left."""

    @property
    def used_bytes(self) -> int:
        """Memory of all layers kept, also of those of dropped checkpoints that others use."""
        return sum(layer.memory_bytes for layer in self._mounted.values())

    def find(self, name: str) -> Checkpoint:
        """One of an image slot. Raises CheckpointError: there is none (any more)."""
        found = self._find(name)
        if isinstance(found, Packed) or not found.image:
            raise CheckpointError(f"checkpoint {name} was made in a slot without an image")
        return found

    def find_plain(self, name: str) -> Checkpoint | Packed:
        """One of a plain slot. Raises CheckpointError: there is none (any more)."""
        found = self._find(name)
        if isinstance(found, Checkpoint) and found.image:
            raise CheckpointError(f"checkpoint {name} was made in a slot of image {found.image}")
        return found

    def _find(self, name: str) -> Checkpoint | Packed:
        found = self._by_name.get(name)
        if found is None:
            raise CheckpointError(f"this container has no checkpoint {name!r} (any more)")
        return found

    def refusal(self, writable: Path) -> ConfigError | None:
        """Why the layer in memory that a slot writes to now cannot be kept as well; None if it can."""
        size_bytes = _used_bytes(writable)
        if self.used_bytes + size_bytes <= self._budget_bytes:
            return None
        return self.no_room_for(f"{size_bytes} bytes")

    def no_room_for(self, more: str) -> ConfigError:
        """The refusal of a checkpoint of so many bytes."""
        return ConfigError(
            "checkpoint_bytes",
            f"{more} more do not fit: {self.used_bytes} of {self._budget_bytes} are used",
            next_step="drop checkpoints that are no longer needed, or raise checkpoint_bytes",
        )

    def freeze(
        self,
        name: str,
        image: str,
        below: tuple[FrozenLayer, ...],
        writable: Path,
        ids: Ids,
        files: str,
        *,
        in_memory: bool = True,
        beside: Beside = NOTHING_BESIDE,
    ) -> Checkpoint:
        """Keep the file system mounted at ``writable``, which nothing uses any more, as a layer above ``below``, with
        the directory ``files`` of it as its root. Raises OSError."""
        target = self._place / name
        target.mkdir(parents=True)
        memory_bytes = _used_bytes(writable) if in_memory else 0
        syscalls.mount(str(writable), str(target), flags=MS_MOVE)
        syscalls.mount("none", str(target), flags=MS_REMOUNT | MS_RDONLY | MS_NODEV)
        layer = self._mounted[target] = FrozenLayer(target, target / files, ids, memory_bytes)
        checkpoint = self._by_name[name] = Checkpoint(image, (layer, *below), beside)
        return checkpoint

    @contextmanager
    def packing(self, name: str) -> Iterator[int]:
        """A descriptor of a new file for the tar of a plain workspace, as large as there is room; it is a checkpoint
        when this is left without an exception. One at a time. Raises OSError."""
        packed = Packed(self._place / name, 0)
        packed.mount.mkdir(parents=True)
        room_bytes = max(self._budget_bytes - self.used_bytes, mounts.PAGE_BYTES)
        mounts.mount_tmpfs(packed.mount, size_bytes=room_bytes, mode=0o700, uid=os.geteuid())
        try:
            file = os.open(packed.tar, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                yield file
            finally:
                os.close(file)
        except BaseException:
            unmount([packed.mount])
            raise
        checkpoint = Packed(packed.mount, _used_bytes(packed.mount))
        self._by_name[name] = self._mounted[checkpoint.mount] = checkpoint

    def drop(self, name: str) -> list[Path]:
        """Forget a checkpoint; no effect if there is none. Returns the layers that no other one has and no slot uses
        on, which are no longer counted: :func:`unmount` them."""
        self._by_name.pop(name, None)
        return self._forget_unneeded()

    def hold(self, layers: Iterable[FrozenLayer]) -> None:
        """One more slot uses these layers, until it gives them back."""
        self._stood_on.update(layer.mount for layer in layers)

    def give_back(self, layers: Iterable[FrozenLayer]) -> list[Path]:
        """One slot less uses these layers. Returns those to unmount, as :meth:`drop`."""
        self._stood_on.subtract(layer.mount for layer in layers)
        self._stood_on += Counter()  # without those that are 0
        return self._forget_unneeded()

    def _forget_unneeded(self) -> list[Path]:
        needed = {kept.mount for kept in self._needed()} | self._stood_on.keys()
        unneeded = list(self._mounted.keys() - needed)
        for mount in unneeded:
            del self._mounted[mount]
        return unneeded

    def _needed(self) -> Iterator[FrozenLayer | Packed]:
        for checkpoint in self._by_name.values():
            yield from (checkpoint,) if isinstance(checkpoint, Packed) else checkpoint.layers


def unmount(layers: Iterable[Path]) -> None:
    """Free layers that are not needed. May take long (300 ms a GiB): call it in a thread. Raises OSError."""
    for mount in layers:
        syscalls.umount(str(mount), syscalls.MNT_DETACH)
        mount.rmdir()


def _used_bytes(mount: Path) -> int:
    seen = os.statvfs(mount)
    return (seen.f_blocks - seen.f_bfree) * seen.f_frsize
