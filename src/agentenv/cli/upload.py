"""Local files as a tar for the ``artifacts`` tool."""

from __future__ import annotations

import base64
import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

from agentenv.errors import ConfigError
from agentenv.wire.base import MAX_FILE_BYTES


def tar_of(paths: Sequence[Path]) -> str:
    """A gzipped tar of the paths (each under its own name), base64.

    Raises ConfigError when two paths have one name, one cannot be read, or the archive is over 64 MiB.
    """
    names = [path.resolve().name or "root" for path in paths]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError("--upload", f"two paths are called {min(repeated)!r}", next_step="rename one of them")
    buffer = io.BytesIO()
    try:
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
            for path, name in zip(paths, names, strict=True):
                archive.add(path.resolve(), arcname=name)
    except OSError as error:
        raise ConfigError("--upload", str(error)) from error
    if buffer.tell() > MAX_FILE_BYTES:
        raise ConfigError(
            "--upload",
            f"{buffer.tell()} bytes packed, at most {MAX_FILE_BYTES}",
            next_step="upload less, or fetch it inside the slot with --network",
        )
    return base64.b64encode(buffer.getvalue()).decode("ascii")
