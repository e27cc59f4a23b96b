"""What earlier builds made: cache keys and the checkpoints or images they stand for."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


class LayerCache:
    """A directory with one small file for each key. Several builds may use it at the same time; of two that make the
    same, the later is kept. What it names may have been deleted since, which the user checks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find(self, key: str) -> str | None:
        """What was kept under the key."""
        try:
            return (self._directory / key).read_text() or None
        except FileNotFoundError:
            return None

    def keep(self, key: str, made: str) -> None:
        """Keep what was made; whoever reads meanwhile sees the old or the new, and after a crash too."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self._directory, prefix=".new-", delete=False) as file:
            file.write(made)
            file.flush()
            os.fsync(file.fileno())
        Path(file.name).replace(self._directory / key)
