"""Checkpoints of image slots: layers that slots have written, kept read-only below this container's directory.

A checkpoint is a stack: the image, then the layer of each checkpoint up to this one. A layer is a file system of its
own (the tmpfs that was a slot's writable layer), so that it goes away in one unmount.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import CheckpointError, ConfigError
from agentenv.sandbox.supervisor import syscalls
from agentenv.sandbox.supervisor.syscalls import MS_MOVE, MS_NODEV, MS_RDONLY, MS_REMOUNT
from agentenv.sandbox.supervisor.user_namespace import IdRange


@dataclass(frozen=True)
class Frozen:
    """A layer that is no longer written to. ``ids``: those under which its files were written."""

    mount: Path
    ids: IdRange
    size_bytes: int

    @property
    def files(self) -> Path:
        """The layer's root."""
        return self.mount / "upper"


@dataclass(frozen=True)
class Checkpoint:
    """An image and the layers above it, the upmost first."""

    image: str
    layers: tuple[Frozen, ...]


class Checkpoints:
    """See the module. ``place`` is an empty directory; ``budget_bytes`` bounds the sum of all layers kept."""

    def __init__(self, place: Path, budget_bytes: int) -> None:
        self._place = place
        self._budget_bytes = budget_bytes
        self._kept: dict[str, Checkpoint] = {}
        self._mounted: dict[Path, Frozen] = {}
        self._stood_on: Counter[Path] = Counter()
        """How many slots stand on each layer."""

    @property
    def used_bytes(self) -> int:
        """Memory of all layers kept, also of those of dropped checkpoints on which others stand."""
        return sum(layer.size_bytes for layer in self._mounted.values())

    def find(self, name: str) -> Checkpoint:
        """Raises CheckpointError: there is none (any more)."""
        found = self._kept.get(name)
        if found is None:
            raise CheckpointError(f"there is no checkpoint {name!r} in this container (any more)")
        return found

    def refusal(self, writable: Path) -> ConfigError | None:
        """Why the layer that a slot writes to now cannot be kept as well; None if it can."""
        size_bytes = _used_bytes(writable)
        if self.used_bytes + size_bytes <= self._budget_bytes:
            return None
        return ConfigError(
            "checkpoint_bytes",
            f"{size_bytes} bytes more would be kept, beside {self.used_bytes} of at most {self._budget_bytes}",
            next_step="drop checkpoints that are no longer needed, or raise checkpoint_bytes",
        )

    def freeze(self, name: str, image: str, below: tuple[Frozen, ...], writable: Path, ids: IdRange) -> Checkpoint:
        """Keep the file system mounted at ``writable``, which nothing uses any more, as a layer above ``below``.
        Raises OSError."""
        target = self._place / name
        target.mkdir(parents=True)
        size_bytes = _used_bytes(writable)
        syscalls.mount(str(writable), str(target), flags=MS_MOVE)
        syscalls.mount("none", str(target), flags=MS_REMOUNT | MS_RDONLY | MS_NODEV)
        layer = self._mounted[target] = Frozen(target, ids, size_bytes)
        made = self._kept[name] = Checkpoint(image, (layer, *below))
        return made

    def drop(self, name: str) -> None:
        """Forget a checkpoint; layers that no other one has go away once no slot stands on them. No effect if there is
        none. Raises OSError."""
        if self._kept.pop(name, None) is not None:
            self._unmount_unneeded()

    def hold(self, layers: Iterable[Frozen]) -> None:
        """One more slot stands on these layers, until it gives them back."""
        self._stood_on.update(layer.mount for layer in layers)

    def give_back(self, layers: Iterable[Frozen]) -> None:
        """One slot less stands on these layers. Raises OSError."""
        self._stood_on.subtract(layer.mount for layer in layers)
        self._stood_on += Counter()  # without those that are 0
        self._unmount_unneeded()

    def _unmount_unneeded(self) -> None:
        needed = {layer.mount for layer in self._layers()} | self._stood_on.keys()
        for mount in self._mounted.keys() - needed:
            syscalls.umount(str(mount), syscalls.MNT_DETACH)
            mount.rmdir()
            del self._mounted[mount]

    def drop_all(self) -> None:
        """Forget all. Raises OSError."""
        for name in list(self._kept):
            self.drop(name)

    def _layers(self) -> Iterator[Frozen]:
        return (layer for kept in self._kept.values() for layer in kept.layers)


def _used_bytes(mount: Path) -> int:
    seen = os.statvfs(mount)
    return (seen.f_blocks - seen.f_bfree) * seen.f_frsize
