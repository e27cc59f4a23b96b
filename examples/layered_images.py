"""Writes OCI image layouts: images as layers over one base, which a store then has once for all of them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agentenv.store.manifest import machine_architecture

_CHUNK_BYTES: Final = 1024 * 1024
_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"


@dataclass(frozen=True)
class Blob:
    """A file of a layout, by its content."""

    digest: str
    size_bytes: int

    def described(self, media_type: str) -> dict[str, Any]:
        """As a manifest names it."""
        return {"mediaType": media_type, "digest": self.digest, "size": self.size_bytes}


class Layout:
    """An image layout that is being written (https://github.com/opencontainers/image-spec, image-layout.md). Layers are
    kept as they are, uncompressed: a layout on this machine is read once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._blobs = directory / "blobs/sha256"
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._images: dict[str, dict[str, Any]] = {}
        (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}\n')

    def add_layer(self, tar: Path) -> Blob:
        """A layer with this tar's content: linked if it is on the same file system, else copied."""
        digest = hashlib.sha256()
        with tar.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        at = self._blobs / digest.hexdigest()
        if not at.exists():
            try:
                os.link(tar, at)
            except OSError:
                shutil.copyfile(tar, at)
        return Blob(f"sha256:{digest.hexdigest()}", tar.stat().st_size)

    def add_image(self, tag: str, layers: Sequence[Blob], config: Mapping[str, Any]) -> str:
        """An image of these layers, the lowest first; ``config`` has Env, User, WorkingDir and the like. Returns its
        reference."""
        rootfs = {"type": "layers", "diff_ids": [layer.digest for layer in layers]}
        described = {"os": "linux", "architecture": machine_architecture(), "config": dict(config), "rootfs": rootfs}
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": self._add(described).described(_CONFIG),
            "layers": [layer.described(_LAYER) for layer in layers],
        }
        self._images[tag] = self._add(manifest).described(_MANIFEST)
        named = [
            {**image, "annotations": {"org.opencontainers.image.ref.name": name}}
            for name, image in self._images.items()
        ]
        (self.directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": named}))
        return f"oci:{self.directory}:{tag}"

    def _add(self, document: Mapping[str, Any]) -> Blob:
        content = json.dumps(document, sort_keys=True).encode()
        digest = hashlib.sha256(content).hexdigest()
        (self._blobs / digest).write_bytes(content)
        return Blob(f"sha256:{digest}", len(content))


def tar_of(tree: Path, at: str, target: Path, modes: Mapping[str, int] | None = None) -> Path:
    """The files below ``tree`` as a layer that has them below ``at``, all root's; ``modes`` by their names in it."""

    def as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        member.mode = (modes or {}).get(Path(member.name).name, member.mode)
        return member

    with tarfile.open(target, "w") as tar:
        tar.add(tree, at.strip("/"), filter=as_root)
    return target
