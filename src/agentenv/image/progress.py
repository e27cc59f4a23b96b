"""How long operations report their progress, independent of who shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class BuildStep:
    """The current step. ``done`` of ``total`` in any unit; ``total`` 0: unknown."""

    name: str
    detail: str = ""
    done: int = 0
    total: int = 0


Report = Callable[[BuildStep], None]


def silent(step: BuildStep) -> None:
    """Report nothing."""
