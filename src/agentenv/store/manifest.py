"""What a store keeps of an image in addition to its files: the layers, and how its programs are started.

The digest of an image is that of its manifest in one canonical form. So it depends on the content of its layers and on
its configuration, not on the way it took: from a registry, an archive or an engine, with whatever compression, it is
the same image on every node.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

from agentenv.errors import BadImageError
from agentenv.store.reference import is_digest
from agentenv.wire.environment import why_no_config

_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
"""Names of ``uname -m`` as images have them, where they differ."""

T = TypeVar("T")


@dataclass(frozen=True)
class StoredLayer:
    """A layer: the digest of its uncompressed tar, and the tar's size."""

    diff_id: str
    size_bytes: int


@dataclass(frozen=True)
class Config:
    """An image's configuration, as far as it matters here (OCI's ``config.md``)."""

    architecture: str
    diff_ids: tuple[str, ...]
    env: Mapping[str, str]
    user: str = ""
    workdir: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    shell: tuple[str, ...] = ()
    on_build: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoredImage:
    """An image in a store. The files stay as they are while it is pinned (``Store.pin``)."""

    digest: str
    """``sha256:…`` of the image's content, wherever it was fetched from."""
    index: Path
    """An EROFS image to be mounted with the layers as its devices, in their order."""
    layers: tuple[Path, ...]
    """The layers' tars, lowest first."""
    diff_ids: tuple[str, ...]
    architecture: str
    env: Mapping[str, str]
    user: str
    """As in the image: name or number, perhaps with a group; empty: root."""
    workdir: str
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    size_bytes: int
    """Of the layers' tars, which other images may share."""
    shell: tuple[str, ...] = ()
    """What RUN, CMD and ENTRYPOINT of images built on this one are run with when they are text; empty: /bin/sh -c."""
    on_build: tuple[str, ...] = ()
    """Instructions that images built on this one begin with."""


def machine_architecture() -> str:
    """This machine's, as images name it."""
    return _ARCHITECTURES.get(platform.machine(), platform.machine())


def parse_config(content: bytes, architecture: str) -> Config:
    """An image's configuration. Raises BadImageError when it is malformed, for another kind of machine, or larger than
    the programs of a slot can be given."""
    document = parse_object(content, "the image's configuration")
    system = _get(document, "os", str, "linux")
    found = _get(document, "architecture", str, "")
    if system != "linux" or found != architecture:
        raise BadImageError(
            f"the image is for {system}/{found}, this machine is linux/{architecture}",
            next_step="use an image that is built for this machine",
        )
    rootfs = _get(document, "rootfs", dict, {})
    diff_ids = _strings(rootfs, "diff_ids")
    if document.get("rootfs") is None or not all(is_digest(diff_id) for diff_id in diff_ids):
        raise BadImageError("the image's configuration does not name its layers by sha256: not a container image")
    runtime = _get(document, "config", dict, {})
    config = Config(
        architecture=found,
        diff_ids=diff_ids,
        env=_environment(_strings(runtime, "Env")),
        user=_get(runtime, "User", str, ""),
        workdir=_get(runtime, "WorkingDir", str, ""),
        entrypoint=_strings(runtime, "Entrypoint"),
        cmd=_strings(runtime, "Cmd"),
        shell=_strings(runtime, "Shell"),
        on_build=_strings(runtime, "OnBuild"),
    )
    if why := why_no_config(config.env, config.user, config.workdir, (*config.entrypoint, *config.cmd)):
        raise BadImageError(f"the image's configuration cannot be used by a slot: {why}")
    return config


def write_config(config: Config) -> bytes:
    """The configuration as a source has it, for :func:`parse_config`."""
    runtime = {
        "Env": [f"{name}={value}" for name, value in config.env.items()],
        "User": config.user,
        "WorkingDir": config.workdir,
        "Entrypoint": config.entrypoint,
        "Cmd": config.cmd,
        "Shell": config.shell,
        "OnBuild": config.on_build,
    }
    rootfs = {"type": "layers", "diff_ids": config.diff_ids}
    document = {"os": "linux", "architecture": config.architecture, "rootfs": rootfs, "config": runtime}
    return json.dumps(document).encode()


def manifest_of(config: Config, sizes_bytes: Sequence[int]) -> bytes:
    """The canonical manifest; ``sizes_bytes`` of the layers' tars."""
    layers = [asdict(StoredLayer(*pair)) for pair in zip(config.diff_ids, sizes_bytes, strict=True)]
    document = {
        "architecture": config.architecture,
        "cmd": config.cmd,
        "entrypoint": config.entrypoint,
        "env": dict(config.env),
        "layers": layers,
        "user": config.user,
        "workdir": config.workdir,
    }
    # Only where they are set: an image that has neither keeps its digest of before they were kept.
    if config.shell:
        document["shell"] = config.shell
    if config.on_build:
        document["on_build"] = config.on_build
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def digest_of_manifest(manifest: bytes) -> str:
    """The digest of the image that has this manifest."""
    return f"sha256:{hashlib.sha256(manifest).hexdigest()}"


def read_manifest(manifest: bytes, index: Path, layer: Callable[[str], Path]) -> StoredImage:
    """The image of a manifest that :func:`manifest_of` made; ``layer``: the path of a diff id's tar."""
    document = json.loads(manifest)
    layers = [StoredLayer(**entry) for entry in document["layers"]]
    return StoredImage(
        digest=digest_of_manifest(manifest),
        index=index,
        layers=tuple(layer(one.diff_id) for one in layers),
        diff_ids=tuple(one.diff_id for one in layers),
        architecture=document["architecture"],
        env=MappingProxyType(document["env"]),
        user=document["user"],
        workdir=document["workdir"],
        entrypoint=tuple(document["entrypoint"]),
        cmd=tuple(document["cmd"]),
        size_bytes=sum({one.diff_id: one.size_bytes for one in layers}.values()),
        shell=tuple(document.get("shell", ())),
        on_build=tuple(document.get("on_build", ())),
    )


def config_of_manifest(manifest: bytes, digest: str) -> tuple[bytes, list[StoredLayer]]:
    """The configuration, as a source has it, and the layers of a manifest that came from elsewhere.

    Raises BadImageError when it is not the manifest of ``digest``.
    """
    if digest_of_manifest(manifest) != digest:
        raise BadImageError(f"a manifest is {digest_of_manifest(manifest)}, but should be {digest}")
    document = json.loads(manifest)  # made by manifest_of, as its digest says
    layers = [StoredLayer(**entry) for entry in document["layers"]]
    config = Config(
        architecture=document["architecture"],
        diff_ids=tuple(layer.diff_id for layer in layers),
        env=document["env"],
        user=document["user"],
        workdir=document["workdir"],
        entrypoint=document["entrypoint"],
        cmd=document["cmd"],
        shell=document.get("shell", ()),
        on_build=document.get("on_build", ()),
    )
    return write_config(config), layers


def parse_object(content: bytes, what: str) -> dict[str, Any]:
    """A JSON object of an image. Raises BadImageError."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadImageError(f"{what} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadImageError(f"{what} is not a JSON object")
    return document


def _get(document: Mapping[str, Any], key: str, kind: type[T], otherwise: T) -> T:
    """A value of that type; ``otherwise`` where it is missing or null. Raises BadImageError."""
    value = document.get(key)
    if value is None:
        return otherwise
    if not isinstance(value, kind) or (isinstance(value, str) and not _is_text(value)):
        raise BadImageError(f"the image's configuration has a wrong {key!r}: {str(value)[:80]!r}")
    return value


def _strings(document: Mapping[str, Any], key: str) -> tuple[str, ...]:
    values = _get(document, key, list, [])
    if not all(isinstance(value, str) and _is_text(value) for value in values):
        raise BadImageError(f"the image's configuration has a wrong {key!r}: {str(values)[:80]!r}")
    return tuple(values)


def _is_text(value: str) -> bool:
    """Whether it can be an argument of a program: JSON also has NULs and halves of characters."""
    return "\0" not in value and not any("\ud800" <= char <= "\udfff" for char in value)


def _environment(assignments: Sequence[str]) -> dict[str, str]:
    found = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise BadImageError(f"the image's environment has {assignment[:80]!r}, which is not NAME=VALUE")
        found[name] = value
    return found
