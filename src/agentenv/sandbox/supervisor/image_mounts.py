"""The images of a node's store, mounted in this container: each once, for all slots that use it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agentenv.errors import SandboxUnavailableError
from agentenv.sandbox.supervisor import syscalls
from agentenv.sandbox.supervisor.syscalls import MS_NODEV, MS_RDONLY

_FLAGS = MS_RDONLY | MS_NODEV


@dataclass(frozen=True)
class ImageConfig:
    """What an image says of the programs in it."""

    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = ""
    has_bash: bool = True


@dataclass
class _Mounted:
    place: Path
    config: ImageConfig
    users: int = 0


class ImageMounts:
    """Mounts images below ``place``; see the module. ``store`` is the node's store, in which everything is read-only
    for us: ``images/DIGEST.json`` and ``.idx``, ``layers/DIFFID.tar``, with ``-`` for ``:``."""

    def __init__(self, store: Path, place: Path) -> None:
        self._store = store
        self._place = place
        self._mounted: dict[str, _Mounted] = {}

    def take(self, digest: str) -> tuple[Path, ImageConfig]:
        """Where the image is mounted, for one more user of it. Raises SandboxUnavailableError when the store does not
        have it, OSError."""
        mounted = self._mounted.get(digest)
        if mounted is None:
            mounted = self._mounted[digest] = self._mount(digest)
        mounted.users += 1
        return mounted.place, mounted.config

    def give_back(self, digest: str) -> None:
        """One user less. Without users an image stays mounted: it costs some inodes, and is often wanted again."""
        self._mounted[digest].users -= 1

    def unmount_unused(self) -> None:
        """Unmount images that nobody uses. Raises OSError."""
        for digest, mounted in list(self._mounted.items()):
            if not mounted.users:
                syscalls.umount(str(mounted.place))
                mounted.place.rmdir()
                del self._mounted[digest]

    def _mount(self, digest: str) -> _Mounted:
        name = digest.replace(":", "-")
        try:
            manifest: dict[str, Any] = json.loads((self._store / "images" / f"{name}.json").read_text())
        except (OSError, ValueError) as error:
            raise SandboxUnavailableError(
                f"image {digest} is not in the store {self._store}: {error}", next_step="agentenv images pull"
            ) from error
        layers = [self._store / "layers" / f"{layer['diff_id'].replace(':', '-')}.tar" for layer in manifest["layers"]]
        place = self._place / name
        place.mkdir(parents=True, exist_ok=True)
        options = ",".join(f"device={layer}" for layer in layers)
        index = self._store / "images" / f"{name}.idx"
        # A page of options, if the layers have long names and are very many: names relative to the store are shorter.
        here = os.open(".", os.O_PATH)
        try:
            os.chdir(self._store)
            if len(options) >= os.sysconf("SC_PAGE_SIZE"):
                options = ",".join(f"device=layers/{layer.name}" for layer in layers)
            syscalls.mount(str(index), str(place), "erofs", _FLAGS, options)
        finally:
            os.fchdir(here)
            os.close(here)
        config = manifest.get("config", {})
        env = MappingProxyType({str(name): str(value) for name, value in dict(config.get("env", {})).items()})
        has_bash = any((place / name).exists() for name in ("usr/bin/bash", "bin/bash"))
        return _Mounted(place, ImageConfig(env, str(config.get("user", "")), str(config.get("workdir", "")), has_bash))
