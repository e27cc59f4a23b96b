"""What trajectories ask of a farm: when they come, and how long they stay. Deterministic by seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

Arrival = tuple[float, float]
"""When a trajectory asks for a slot (seconds from the start), and how long it keeps it."""


class Load(Protocol):
    """Arrivals in order of time; ``ended`` tells it of each trajectory that is done."""

    def arrivals(self, chance: random.Random) -> Iterator[Arrival]:
        """Those known from the start."""

    def after(self, now: float, running: int, chance: random.Random) -> list[Arrival]:
        """Those that follow from one having ended, ``running`` being left."""


@dataclass(frozen=True)
class Stream:
    """Independent arrivals at ``rate`` per second of time; stays are drawn by ``stay_s``."""

    rate: Callable[[float], float]
    highest_rate: float
    stay_s: Callable[[random.Random], float]
    until_s: float

    def arrivals(self, chance: random.Random) -> Iterator[Arrival]:
        now = 0.0
        while (now := now + chance.expovariate(self.highest_rate)) < self.until_s:
            if chance.random() * self.highest_rate < self.rate(now):
                yield now, self.stay_s(chance)

    def after(self, now: float, running: int, chance: random.Random) -> list[Arrival]:  # noqa: ARG002
        return []


@dataclass(frozen=True)
class Steps:
    """Training: ``size`` rollouts asked for at once; when all have ended, a pause, then the next."""

    size: int
    pause_s: float
    stay_s: Callable[[random.Random], float]
    until_s: float

    def arrivals(self, chance: random.Random) -> Iterator[Arrival]:
        yield from ((5.0, self.stay_s(chance)) for _ in range(self.size))

    def after(self, now: float, running: int, chance: random.Random) -> list[Arrival]:
        if running or now + self.pause_s > self.until_s:
            return []
        return [(now + self.pause_s, self.stay_s(chance)) for _ in range(self.size)]


def exponential(mean_s: float) -> Callable[[random.Random], float]:
    """Stays without memory."""
    return lambda chance: chance.expovariate(1 / mean_s)


def lognormal(median_s: float, sigma: float, longest_s: float) -> Callable[[random.Random], float]:
    """Stays with a long tail: most are short, a few last very long."""
    return lambda chance: min(longest_s, chance.lognormvariate(math.log(median_s), sigma))


def steady(slots: float, stay_s: float) -> Callable[[float], float]:
    """The rate that keeps about so many slots in use."""
    return lambda _: slots / stay_s


def wave(low: float, high: float, period_s: float, stay_s: float) -> Callable[[float], float]:
    """A rate that swings, so that slots in use go from ``low`` to ``high`` and back each period."""
    return lambda now: (low + (high - low) * (0.5 - 0.5 * math.cos(2 * math.pi * now / period_s))) / stay_s


def bursts(low: float, high: float, every_s: float, lasting_s: float, stay_s: float) -> Callable[[float], float]:
    """A low rate, and a high one for a while now and then."""
    return lambda now: (high if now % every_s >= every_s - lasting_s else low) / stay_s
