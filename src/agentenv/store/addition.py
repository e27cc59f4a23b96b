"""An image made here: the layers of another one, and tars above them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from agentenv.store.layers import CHUNK_BYTES, Blob
from agentenv.store.manifest import Config, StoredImage, machine_architecture, write_config
from agentenv.store.sources import SourceImage


@dataclass(frozen=True)
class Runtime:
    """How the programs of an image are started, and what is built on it (OCI's ``config.md``)."""

    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    shell: tuple[str, ...] = ()
    on_build: tuple[str, ...] = ()

    @classmethod
    def of(cls, image: StoredImage) -> Runtime:
        """As in an image."""
        return cls(image.env, image.user, image.workdir, image.entrypoint, image.cmd, image.shell, image.on_build)


def image_above(base: StoredImage | None, tars: Sequence[Path], runtime: Runtime) -> SourceImage:
    """The image of ``base``'s layers (None: of none) and these uncompressed tars, the lowest first."""
    paths = [*(base.layers if base is not None else ()), *tars]
    diff_ids = [*(base.diff_ids if base is not None else ()), *(f"sha256:{_digest(tar)}" for tar in tars)]
    config = write_config(Config(machine_architecture(), tuple(diff_ids), **vars(runtime)))
    return SourceImage(config, tuple(Blob(partial(_chunks, p), p.stat().st_size) for p in paths))


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
