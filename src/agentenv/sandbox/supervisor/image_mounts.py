"""The images of a node's store, mounted in this container: each once, for all slots that use it.

The store is read-only for us (docs/images.md has its files). Its indexes were written by our own code from tars that it
has read; what an image brings is file content only, so the kernel never parses metadata made by a stranger.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

from agentenv.errors import BadImageError, ImageUnavailableError, SandboxUnavailableError
from agentenv.locks import hold
from agentenv.rooted import LeadsOutError, RootedDirectory
from agentenv.sandbox.slot_env import PATH
from agentenv.sandbox.supervisor import static_bash, syscalls
from agentenv.sandbox.supervisor.user_namespace import ImageIds
from agentenv.wire.environment import why_no_config

_BASHES: Final = ("usr/bin/bash", "bin/bash")
_TMUXES: Final = ("usr/bin/tmux", "bin/tmux", "usr/local/bin/tmux")


@dataclass(frozen=True)
class ImageConfig:
    """How an image configures its programs."""

    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    has_bash: bool = True
    has_tmux: bool = True
    bash_build: str = ""
    """Of the bash that its PATH leads to (:func:`agentenv.sandbox.supervisor.static_bash.build_in`)."""

    @property
    def path(self) -> str:
        """The search path of its programs."""
        return self.env.get("PATH", PATH)


@dataclass(frozen=True)
class ImageLayer:
    """A directory that an image is made from."""

    files: Path
    ids: ImageIds | None
    """Under which its files lie; None: under the image's own ids."""


class Images(Protocol):
    """The images of a store, as slots have them below their own layers."""

    def require(self, digest: str) -> None:
        """Raises ImageUnavailableError when the store does not have the image, BadImageError when no slot can have it;
        OSError."""

    async def ready(self, digest: str) -> None:
        """Prepare an image that is there; may take as long as unpacking it. Raises ImageUnavailableError,
        SandboxUnavailableError."""

    def take(self, digest: str) -> tuple[tuple[ImageLayer, ...], ImageConfig]:
        """What the image is made from, the upmost first. It stays ready, and in the store, also when no slot has it
        any more: it is often wanted again. Raises SandboxUnavailableError when it is not ready,
        ImageUnavailableError, OSError."""


@dataclass
class _Mounted:
    place: Path
    manifest_json: Mapping[str, Any]
    lock: int
    """Kept open: see :func:`held_manifest`."""
    config: ImageConfig | None = None
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


class ImageMounts:
    """Implements Images: mounts those of the store ``store`` below ``place``; see the module."""

    def __init__(self, store: Path, place: Path) -> None:
        self._store = store
        self._place = place
        self._mounted: dict[str, _Mounted] = {}

    def take(self, digest: str) -> tuple[tuple[ImageLayer, ...], ImageConfig]:
        """See Images."""
        mounted = self._mounted.get(digest)
        if mounted is None or mounted.config is None:
            raise SandboxUnavailableError(f"image {digest} is not mounted")
        return (ImageLayer(mounted.place, None),), mounted.config

    async def ready(self, digest: str) -> None:
        """See Images: mounted, and its programs inspected, in a thread: their files are untrusted."""
        self.require(digest)
        mounted = self._mounted[digest]
        async with mounted.reading:
            if mounted.config is None:
                mounted.config = await asyncio.to_thread(config_of, mounted.manifest_json, [mounted.place])

    def require(self, digest: str) -> None:
        """See Images: mounts it if it is not mounted."""
        if digest not in self._mounted:
            self._mounted[digest] = self._mount(digest)

    def _mount(self, digest: str) -> _Mounted:
        name = digest.replace(":", "-")
        lock, manifest_json = held_manifest(self._store, digest)
        try:
            place = self._place / name
            place.mkdir(parents=True, exist_ok=True)
            layers = [f"{layer['diff_id'].replace(':', '-')}.tar" for layer in manifest_json["layers"]]
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
        return _Mounted(place, manifest_json, lock)


def held_manifest(store: Path, digest: str) -> tuple[int, dict[str, Any]]:
    """An image's manifest, and a descriptor whose lock keeps the image in the store. Raises ImageUnavailableError;
    BadImageError for an environment larger than programs can have, which earlier versions stored; OSError."""
    manifest = store / "images" / f"{digest.replace(':', '-')}.json"
    try:
        lock = hold(manifest, shared=True)
    except FileNotFoundError:
        raise ImageUnavailableError(
            f"image {digest} is not in the store {store}", next_step="fetch it: agentenv images pull"
        ) from None
    try:
        manifest_json = json.loads(manifest.read_bytes())
        if why := why_no_config(manifest_json["env"], manifest_json["user"], manifest_json["workdir"]):
            raise BadImageError(f"the configuration of image {digest} cannot be used by a slot: {why}")
    except BaseException:
        os.close(lock)
        raise
    return lock, manifest_json


def config_of(manifest: Mapping[str, Any], layers: Sequence[Path]) -> ImageConfig:
    """How an image configures its programs, and which it has; ``layers`` are the directories that it is made from, the
    upmost first. Blocks, and may take long: the files are untrusted."""
    config = ImageConfig(
        MappingProxyType(manifest["env"]),
        manifest["user"],
        manifest["workdir"],
        tuple(manifest.get("entrypoint", ())),
        tuple(manifest.get("cmd", ())),
        has_bash=any(_is_in(layers, path) for path in _BASHES),
        has_tmux=any(_is_in(layers, path) for path in _TMUXES),
    )
    return replace(config, bash_build=static_bash.build_in(layers, config.path))


def _is_in(layers: Sequence[Path], path: str) -> bool:
    """By the upmost layer that has it; a whiteout means that it is removed, and what cannot be reached (links
    without end) is not there."""
    for layer in layers:
        with contextlib.suppress(OSError, LeadsOutError), RootedDirectory(layer, as_root=True) as root:
            if (found := root.seen(path)) is not None:
                return not stat.S_ISCHR(found.st_mode)
    return False


@contextmanager
def _working_in(directory: Path) -> Iterator[None]:
    before = os.open(".", os.O_PATH | os.O_CLOEXEC)
    try:
        os.chdir(directory)
        yield
    finally:
        os.fchdir(before)
        os.close(before)
