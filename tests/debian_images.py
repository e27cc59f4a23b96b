"""Debian's base as an image of a store of its own, made from the tar that the cache keeps: no registry is asked."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from agentenv.config import cache_dir
from agentenv.image.base import base_tarball
from agentenv.locks import locked


def base_in_cache(directory: Path) -> Path:
    """A cache directory that has the tar of Debian's base; made (minutes) where this machine's own does not have it."""
    own = cache_dir() / "image"
    own.mkdir(parents=True, exist_ok=True)
    with locked(own / "build.lock", waiting=lambda: None):
        tarball = base_tarball(own)
    (directory / "image").mkdir(parents=True)
    try:
        os.link(tarball, directory / "image" / tarball.name)
    except OSError:  # another file system
        shutil.copyfile(tarball, directory / "image" / tarball.name)
    return directory
