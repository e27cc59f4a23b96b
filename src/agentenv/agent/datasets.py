"""Items from a dataset, for environments that name one instead of writing ``get_next_item``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentenv.errors import ConfigError


def load_items(name: str | None, split: str) -> list[dict[str, Any]]:
    """All items of a ``.jsonl`` file, or of a dataset that the ``datasets`` library can load. Blocking.

    Raises: ConfigError naming what is wrong (no name, not found, no items, not JSON objects).
    """
    if name is None:
        raise ConfigError("dataset_name", "is not set", next_step="set it, or write get_next_item()")
    items = _from_lines(Path(name)) if name.endswith((".jsonl", ".json")) else _from_datasets(name, split)
    if not items:
        raise ConfigError("dataset_name", f"{name!r} has no items", next_step="check dataset_split")
    return items


def _from_lines(path: Path) -> list[dict[str, Any]]:
    try:
        # Not splitlines(): JSON may contain unescaped U+2028 and similar, which do not end a line here.
        items = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(
            "dataset_name", f"cannot read {path}: {error}", next_step="one JSON object per line"
        ) from error
    if not all(isinstance(item, dict) for item in items):
        raise ConfigError("dataset_name", f"{path} has a line that is not a JSON object")
    return items


def _from_datasets(name: str, split: str) -> list[dict[str, Any]]:
    try:
        from datasets import load_dataset

        return [dict(row) for row in load_dataset(name, split=split)]
    except Exception as error:  # the library raises whatever its back ends raise
        raise ConfigError("dataset_name", f"cannot load {name!r}, split {split!r}: {error}") from error
