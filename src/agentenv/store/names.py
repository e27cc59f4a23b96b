"""What references mean in a store: a small file for each name."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from agentenv.store.layout import Layout, replace
from agentenv.store.reference import is_committed


@dataclass(frozen=True)
class Name:
    """``reference`` meant the image ``digest`` at ``named_s``, in seconds since 1970."""

    reference: str
    digest: str
    named_s: float = 0.0

    @property
    def committed(self) -> bool:
        """Whether only this store knows what it means: no registry has it."""
        return is_committed(self.reference)


def read(path: Path) -> Name | None:
    """The name in a file; None if there is none."""
    try:
        return Name(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None


def write(layout: Layout, name: Name) -> None:
    """Let it mean this from now on."""
    replace(layout.name(name.reference), json.dumps(asdict(name)).encode())


def remove(layout: Layout, reference: str) -> bool:
    """Let it mean nothing. Returns whether it meant something."""
    try:
        layout.name(reference).unlink()
    except FileNotFoundError:
        return False
    return True


def all_of(layout: Layout) -> Iterator[Name]:
    """All names of a store."""
    for path in sorted(layout.names.glob("*.json")):
        with contextlib.suppress(FileNotFoundError):
            if (name := read(path)) is not None:
                yield name
