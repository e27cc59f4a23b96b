"""The images of a node's store, mounted in this container: each once, for all slots that use it.

The store is read-only for us (docs/images.md has its files). Its indexes were written by our own code from tars that it
has read; what an image brings is file content only, so the kernel never parses metadata made by a stranger.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from agentenv.errors import ImageUnavailableError
from agentenv.locks import hold
from agentenv.sandbox.supervisor import syscalls

_BASHES: Final = ("usr/bin/bash", "bin/bash")
_TMUXES: Final = ("usr/bin/tmux", "bin/tmux", "usr/local/bin/tmux")


@dataclass(frozen=True)
class ImageConfig:
    """What an image says of the programs in it."""

    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = ""
    has_bash: bool = True
    has_tmux: bool = True


@dataclass
class _Mounted:
    place: Path
    config: ImageConfig
    lock: int
    users: int = 0


class ImageMounts:
    """Mounts the images of the store ``store`` below ``place``; see the module."""

    def __init__(self, store: Path, place: Path) -> None:
        self._store = store
        self._place = place
        self._mounted: dict[str, _Mounted] = {}

    def take(self, digest: str) -> tuple[Path, ImageConfig]:
        """Where the image is mounted, for one more user of it. Raises ImageUnavailableError when the store does not
        have it, OSError."""
        self.require(digest)
        mounted = self._mounted[digest]
        mounted.users += 1
        return mounted.place, mounted.config

    def require(self, digest: str) -> None:
        """Mount the image if it is not mounted. Raises as :meth:`take`."""
        if digest not in self._mounted:
            self._mounted[digest] = self._mount(digest)

    def give_back(self, digest: str) -> None:
        """One user less. Without users an image stays mounted: it costs some inodes, and is often wanted again."""
        self._mounted[digest].users -= 1

    def unmount_unused(self) -> None:
        """Unmount images that nobody uses: the store may delete them then. Raises OSError."""
        for digest, mounted in list(self._mounted.items()):
            if not mounted.users:
                syscalls.umount(str(mounted.place))
                mounted.place.rmdir()
                os.close(mounted.lock)
                del self._mounted[digest]

    def _mount(self, digest: str) -> _Mounted:
        name = digest.replace(":", "-")
        manifest = self._store / "images" / f"{name}.json"
        try:
            lock = hold(manifest, shared=True)  # nobody deletes the image while we have it
        except FileNotFoundError:
            raise ImageUnavailableError(
                f"image {digest} is not in the store {self._store}", next_step="fetch it: agentenv images pull"
            ) from None
        try:
            said: dict[str, Any] = json.loads(manifest.read_bytes())
            place = self._place / name
            place.mkdir(parents=True, exist_ok=True)
            layers = [f"{layer['diff_id'].replace(':', '-')}.tar" for layer in said["layers"]]
            with _working_in(self._store / "layers"):  # an option has 255 bytes at most
                source = ("source", f"../images/{name}.idx")
                made = syscalls.make_mount("erofs", [source, *(("device", layer) for layer in layers)])
            try:
                syscalls.attach_mount(made, str(place))
            finally:
                os.close(made)
        except BaseException:
            os.close(lock)
            raise
        config = ImageConfig(
            MappingProxyType(said["env"]),
            said["user"],
            said["workdir"],
            has_bash=any(os.path.lexists(place / path) for path in _BASHES),
            has_tmux=any(os.path.lexists(place / path) for path in _TMUXES),
        )
        return _Mounted(place, config, lock)


@contextmanager
def _working_in(directory: Path) -> Iterator[None]:
    before = os.open(".", os.O_PATH | os.O_CLOEXEC)
    try:
        os.chdir(directory)
        yield
    finally:
        os.fchdir(before)
        os.close(before)
