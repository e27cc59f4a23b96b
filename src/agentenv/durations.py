"""Durations as people write them. Standard library only."""

from __future__ import annotations

import itertools

_STEPS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def duration(seconds: float | None) -> str:
    """``3.2 s``, ``4 min``, ``2 h 5 min``; a dash if unknown."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    for (size, unit), (next_size, next_unit) in itertools.pairwise(_STEPS):
        if seconds >= size:
            rest = int(seconds % size // next_size)
            return f"{int(seconds // size)} {unit}" + (f" {rest} {next_unit}" if rest and unit != "min" else "")
    raise AssertionError("every number of seconds is at least one second here")  # pragma: no cover
