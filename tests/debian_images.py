"""Images over the base that agentenv makes itself: no registry is asked."""

from __future__ import annotations

from pathlib import Path

from agentenv.config import cache_dir
from agentenv.image.base import base_tarball
from agentenv.locks import locked
from examples.layered_images import Blob, Layout

ENV = {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]}


def base_layer(layout: Layout) -> Blob:
    """Debian's base as a layer of this layout; made (minutes) where the cache does not have it."""
    return layout.add_layer(base_file())


def base_file() -> Path:
    """The tar of Debian's base."""
    with locked(cache_dir() / "image" / "build.lock", waiting=lambda: None):
        return base_tarball(cache_dir() / "image")
