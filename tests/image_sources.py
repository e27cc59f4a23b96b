"""Images as registries and engines hand them out, made of layers that tests write."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from agentenv.store.manifest import machine_architecture

Compression = Literal["", "gzip", "zstd"]
RUNTIME: Mapping[str, Any] = {"Env": ["PATH=/usr/bin:/bin", "A=b=c"], "User": "1000", "WorkingDir": "/w", "Cmd": ["sh"]}


def member(name: str, content: bytes = b"", **attributes: Any) -> tuple[tarfile.TarInfo, bytes]:
    """A file's entry; ``attributes`` are TarInfo's (type=tarfile.DIRTYPE, linkname=…, pax_headers=…)."""
    made = tarfile.TarInfo(name)
    made.size = len(content)
    made.mtime = 1_600_000_000
    for key, value in attributes.items():
        setattr(made, key, value)
    return made, content


def tar_of(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    """An uncompressed tar."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=form) as tar:
        for made, content in members:
            tar.addfile(made, io.BytesIO(content))
    return target.getvalue()


@lru_cache(maxsize=4)  # the same programs are a layer of image after image
def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def compressed(content: bytes, how: Compression) -> bytes:
    if how == "gzip":
        return gzip.compress(content, 1, mtime=0)
    if how == "zstd":
        return subprocess.run(["zstd", "-q", "-1", "-c"], input=content, capture_output=True, check=True).stdout
    return content


def config_of(layers: Sequence[bytes], **changes: Any) -> dict[str, Any]:
    """The configuration of an image with these layers for this machine."""
    rootfs = {"type": "layers", "diff_ids": [sha256(layer) for layer in layers]}
    return {"os": "linux", "architecture": machine_architecture(), "config": RUNTIME, "rootfs": rootfs, **changes}


class OciLayout:
    """A layout that is being written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._manifests: list[dict[str, Any]] = []
        (directory / "blobs/sha256").mkdir(parents=True, exist_ok=True)
        (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self._save()

    def blob(self, content: bytes, media_type: str) -> dict[str, Any]:
        """Write a blob. Returns its descriptor."""
        digest = sha256(content)
        if not self.path(digest).exists():
            self.path(digest).write_bytes(content)
        return {"mediaType": media_type, "digest": digest, "size": len(content)}

    def path(self, digest: str) -> Path:
        return self.directory / "blobs/sha256" / digest.removeprefix("sha256:")

    def manifest(self, layers: Sequence[bytes], how: Compression = "gzip", **changes: Any) -> dict[str, Any]:
        """Write an image. Returns the descriptor of its manifest; ``changes`` of its configuration."""
        config = json.dumps(config_of(layers, **changes)).encode()
        suffix = f"+{how}" if how else ""
        kind = f"application/vnd.oci.image.layer.v1.tar{suffix}"
        document = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": self.blob(config, "application/vnd.oci.image.config.v1+json"),
            "layers": [self.blob(compressed(layer, how), kind) for layer in layers],
        }
        return self.document(document)

    def document(self, document: dict[str, Any]) -> dict[str, Any]:
        """Write a manifest or an index. Returns its descriptor."""
        return self.blob(json.dumps(document).encode(), document["mediaType"])

    def index(self, *manifests: dict[str, Any]) -> dict[str, Any]:
        """Write an index of manifests. Returns its descriptor."""
        kind = "application/vnd.oci.image.index.v1+json"
        return self.document({"schemaVersion": 2, "mediaType": kind, "manifests": list(manifests)})

    def name(self, descriptor: dict[str, Any], tag: str) -> None:
        """Give a manifest or an index a tag."""
        self._manifests.append({**descriptor, "annotations": {"org.opencontainers.image.ref.name": tag}})
        self._save()

    def _save(self) -> None:
        (self.directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": self._manifests}))


def oci_layout(directory: Path, *layers: bytes, how: Compression = "gzip", tag: str = "t", **changes: Any) -> OciLayout:
    """A layout of one image."""
    layout = OciLayout(directory)
    layout.name(layout.manifest(layers, how, **changes), tag)
    return layout


def docker_archive(path: Path, *layers: bytes, name: str = "app:1", **changes: Any) -> Path:
    """What ``docker save`` writes. A layer that comes twice is a link, as the engine writes it."""
    config = json.dumps(config_of(layers, **changes)).encode()
    config_name = f"{sha256(config).removeprefix('sha256:')}.json"
    members = [member(config_name, config)]
    first: dict[bytes, str] = {}
    names = []
    for number, layer in enumerate(layers):
        names.append(f"{number}/layer.tar")
        if layer in first:
            members.append(member(names[-1], type=tarfile.SYMTYPE, linkname=f"../{first[layer]}"))
        else:
            members.append(member(names[-1], layer))
        first.setdefault(layer, names[-1])
    listed = [{"Config": config_name, "RepoTags": [name], "Layers": names}]
    members.append(member("manifest.json", json.dumps(listed).encode()))
    path.write_bytes(tar_of(*members))
    return path
