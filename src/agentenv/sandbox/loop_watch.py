"""Measures how long an event loop was blocked, and finds where.

Everything a container does for its slots goes through the event loop of one process: a callback that does not
return makes all of them wait. Each iteration of the loop is timed, which costs two reads of the clock. A one-shot
timer, set by the first iteration after an idle phase, fires during a late iteration and records the stack. If it fires
when the loop is idle again, its signal wakes a loop that handles any signals; the iteration that this causes does not
set the timer again, so that an idle loop sleeps.
"""

from __future__ import annotations

import asyncio
import logging
import math
import selectors
import signal
import time
import traceback
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Final

STALL_S: Final = 0.05
"""A longer iteration is a stall."""
_WARNED_S: Final = 1.0
"""A stall that users notice. A loaded machine has shorter ones, which are logged as information, in one line: the
metrics have them."""
_RECENT_S: Final = 60.0
_LOGGED_AGAIN: Final = 1.5
"""A stall is logged when it is longer than the last logged one by this factor."""
_MAX_FRAMES: Final = 20
_WOKEN_S: Final = 0.01
"""A loop that runs this soon after the timer found it idle, for one event, runs because of the timer's signal."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stalls:
    """Measurements. ``recent_s``: longest iteration of the last one to two minutes; ``stack``: where the process
    was during the longest stall (empty if that was over before it could be seen)."""

    count: int = 0
    longest_s: float = 0.0
    recent_s: float = 0.0
    stack: str = ""


class LoopWatch:
    """Watches one event loop of the main thread, using SIGALRM. A context manager; the loop is from
    :meth:`new_loop`."""

    def __init__(self, name: str) -> None:
        self.turn_began_s = math.inf
        """Infinite while the loop is idle."""
        self.armed = True
        self.found_idle_s = -math.inf
        """When the timer fired and found the loop idle."""
        self._name = name
        self._count = 0
        self._longest_s = 0.0
        self._longest_stack = ""
        self._minute = 0.0
        self._before = 0.0
        self._minute_ends_s = 0.0
        self._logged_s = 0.0
        self._stack = ""
        self._handler: Any = signal.SIG_DFL

    def __enter__(self) -> LoopWatch:
        self._handler = signal.signal(signal.SIGALRM, self._look)
        self.armed = False
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.disarm()
        signal.signal(signal.SIGALRM, self._handler)

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """Create an event loop that is watched."""
        return _WatchedLoop(self)

    def begin(self) -> None:
        """Reset the measurements, because starting up is not a stall. The current iteration does not count either."""
        self._count, self._longest_s, self._longest_stack = 0, 0.0, ""
        self._minute = self._before = self._logged_s = 0.0
        self.turn_began_s = time.monotonic()

    def stalls(self) -> Stalls:
        """The measurements so far."""
        self._turn_minute(time.monotonic())
        return Stalls(self._count, self._longest_s, max(self._minute, self._before), self._longest_stack)

    def arm(self, after_s: float) -> None:
        """Check after this many seconds."""
        self.armed = True
        signal.setitimer(signal.ITIMER_REAL, after_s)

    def disarm(self) -> None:
        """Check no more, nor let the next iteration ask for it."""
        self.armed = True
        signal.setitimer(signal.ITIMER_REAL, 0)

    def turn_ended(self, took_s: float, now_s: float) -> None:
        """Called for iterations longer than any in this minute, and for stalls."""
        self._turn_minute(now_s)
        self._minute = max(self._minute, took_s)
        stack, self._stack = self._stack, ""
        if took_s > self._longest_s:
            self._longest_s, self._longest_stack = took_s, stack
        if took_s <= STALL_S:
            return
        self._count += 1
        if took_s > _LOGGED_AGAIN * self._logged_s:
            self._logged_s = took_s
            held = f"the {self._name}'s event loop was held for {took_s:.3f} s"
            if took_s >= _WARNED_S:
                log.warning("%s\n%s", held, stack or "(not seen where)")
            else:
                log.info("%s%s", held, _innermost(stack))

    @property
    def longest_of_minute_s(self) -> float:
        """Shorter iterations need no check."""
        return min(self._minute, STALL_S)

    def _turn_minute(self, now_s: float) -> None:
        if now_s >= self._minute_ends_s:
            missed = now_s >= self._minute_ends_s + _RECENT_S
            self._before, self._minute = (0.0 if missed else self._minute), 0.0
            self._minute_ends_s = now_s + _RECENT_S

    def _look(self, _number: int, frame: FrameType | None) -> None:
        """The timer fired: check whether the current iteration is late."""
        age_s = time.monotonic() - self.turn_began_s
        if age_s == -math.inf:
            self.armed = False  # idle: the next iteration sets the timer again, unless this signal is all it has
            self.found_idle_s = time.monotonic()
        elif age_s < STALL_S:
            self.arm(STALL_S - age_s)
        else:
            while frame is not None and frame.f_code in _OWN_CODE:
                frame = frame.f_back  # it fired again during this check
            self._stack = "".join(traceback.format_stack(frame, _MAX_FRAMES))
            self.armed = False


def _innermost(stack: str) -> str:
    """``: File ..., line ..., in ...``; empty if it was not seen."""
    frames = [line.strip() for line in stack.splitlines() if line.startswith("  File ")]
    return f": {frames[-1]}" if frames else ""


_OWN_CODE = (LoopWatch._look.__code__, LoopWatch.arm.__code__)


class _WatchedLoop(asyncio.SelectorEventLoop):
    def __init__(self, watch: LoopWatch) -> None:
        super().__init__(_WatchedSelector(watch))
        self._watch = watch

    def close(self) -> None:
        self._watch.disarm()  # asyncio closes the descriptor that signals are written to before it gives it up
        super().close()


class _WatchedSelector(selectors.DefaultSelector):
    def __init__(self, watch: LoopWatch) -> None:
        super().__init__()
        self._watch = watch

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        watch = self._watch
        now_s = time.monotonic()
        took_s = now_s - watch.turn_began_s
        if took_s > watch.longest_of_minute_s:
            watch.turn_ended(took_s, now_s)
        watch.turn_began_s = math.inf
        ready = super().select(timeout)
        watch.turn_began_s = time.monotonic()
        if not watch.armed and (len(ready) != 1 or watch.turn_began_s > watch.found_idle_s + _WOKEN_S):
            watch.arm(STALL_S)
        return ready
