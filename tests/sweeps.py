"""Sweeps: tests that compare with independent programs, over random cases, for as long as they are given.

A test with the fixture ``sweep`` is one. All of them together take ``SWEEP_SECONDS`` (60; ``make sweep SECONDS=600``).
Each case follows from ``SWEEP_SEED`` and its number alone: a failure names both, and ``SWEEP_CASE`` runs it alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from random import Random
from typing import Final

import pytest

DEFAULT_SECONDS: Final = 60.0
DEFAULT_SEED: Final = "24"
_COUNT = pytest.StashKey[int]()


class Sweep:
    """The cases of one test. The first one runs however little time there is."""

    def __init__(self, name: str, seconds: float) -> None:
        self.seed = os.environ.get("SWEEP_SEED") or DEFAULT_SEED
        self.only = os.environ.get("SWEEP_CASE")
        self._name = name
        self._seconds = seconds
        self._number = 0

    def cases(self) -> Iterator[Random]:
        """A source of random numbers for each case, until the time is over."""
        ends_at = time.monotonic() + self._seconds
        while self._number == 0 or time.monotonic() < ends_at:
            if self.only is not None:
                self._number = int(self.only)
            yield Random(f"{self.seed} {self._name} {self._number}")
            if self.only is not None:
                return
            self._number += 1

    def seeds(self) -> Iterator[int]:
        """A number for each case."""
        for random in self.cases():
            yield random.randrange(2**32)

    def __str__(self) -> str:
        return f"case {self._number} of seed {self.seed}; alone: SWEEP_SEED={self.seed} SWEEP_CASE={self._number}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    swept = [item for item in items if "sweep" in getattr(item, "fixturenames", ())]
    config.stash[_COUNT] = len(swept)
    for item in swept:
        item.add_marker(pytest.mark.sweep)


@pytest.fixture
def sweep(request: pytest.FixtureRequest) -> Iterator[Sweep]:
    """See :class:`Sweep`."""
    seconds = float(os.environ.get("SWEEP_SECONDS") or DEFAULT_SECONDS) / max(1, request.config.stash[_COUNT])
    request.node.add_marker(pytest.mark.timeout(600 + 2 * seconds))
    made = Sweep(request.node.name, seconds)
    yield made
    print(f"\nthe sweep ended with {made}")  # shown where the test failed
