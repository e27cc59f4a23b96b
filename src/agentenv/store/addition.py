"""An image made here: the layers of another one, and tars above them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from agentenv.store.layers import CHUNK_BYTES, Blob
from agentenv.store.manifest import StoredImage, machine_architecture
from agentenv.store.sources import SourceImage


@dataclass(frozen=True)
class Runtime:
    """How the programs of an image are started (OCI's ``config.md``)."""

    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()

    @classmethod
    def of(cls, image: StoredImage) -> Runtime:
        """As an image says it."""
        return cls(image.env, image.user, image.workdir, image.entrypoint, image.cmd)


def image_above(base: StoredImage | None, tars: Sequence[Path], runtime: Runtime) -> SourceImage:
    """The image of ``base``'s layers (None: of none) and these uncompressed tars, the lowest first."""
    paths = [*(base.layers if base is not None else ()), *tars]
    diff_ids = [*(base.diff_ids if base is not None else ()), *(f"sha256:{_digest(tar)}" for tar in tars)]
    document = {
        "architecture": machine_architecture(),
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
        "config": {
            "Env": [f"{name}={value}" for name, value in runtime.env.items()],
            "User": runtime.user,
            "WorkingDir": runtime.workdir,
            "Entrypoint": list(runtime.entrypoint),
            "Cmd": list(runtime.cmd),
        },
    }
    return SourceImage(json.dumps(document).encode(), tuple(Blob(partial(_chunks, p), p.stat().st_size) for p in paths))


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
