"""How long work tells what it is doing, without knowing who shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class BuildStep:
    """What is being done now. ``done`` of ``total`` in any unit; ``total`` 0: nobody knows how much there is."""

    name: str
    detail: str = ""
    done: int = 0
    total: int = 0


Report = Callable[[BuildStep], None]


def silent(step: BuildStep) -> None:
    """Tell nobody."""
