"""Readiness of the many short-lived descriptors of slots, cheaper than the event loop's own, in fair turns.

One epoll set, itself watched by the event loop: adding and removing a descriptor is one system call (the loop's
``add_reader`` costs several times that), and what became ready in one iteration of the loop is handled together, so
that the resulting messages can be sent together.

Slots share the loop by the time that their callbacks take (start-time fair queueing,
docs/decisions/0055-fair-turns.md): the slot that took least is next, and one slot's many descriptors count as one
slot. Readiness is level-triggered, so what is not handled in one turn is simply found again in the next.
"""

from __future__ import annotations

import asyncio
import logging
import select
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import attrgetter

_TURN_S = 0.001
"""Time for callbacks in one iteration of the loop before its other work, such as the messages of clients, is done. A
callback that has begun is not interrupted."""
_MAX_EVENTS = 256
_LATER_S = 0.001
_TOOK_S = attrgetter("took_s")

log = logging.getLogger(__name__)


class Lane:
    """One slot's share of a poller, for as long as the server runs."""

    __slots__ = ("add", "defer", "later", "loop", "not_later", "remove", "took_s")

    def __init__(self, poller: Poller) -> None:
        self.loop = poller.loop
        self.add = partial(poller.add, self)
        self.remove = poller.remove
        self.defer = poller.defer
        self.later = poller.later
        self.not_later = poller.not_later
        self.took_s = 0.0
        """Where this slot's next callback begins in the poller's virtual time: see :meth:`Poller._round`."""


class Poller:
    """Calls back when a descriptor can be read (or has hung up). Callbacks must not block. ``clock``: seconds of this
    thread's processor, because a slot does not pay for other work of the machine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.thread_time) -> None:
        self.loop = loop
        self._clock = clock
        self._epoll = select.epoll()
        self._callbacks: dict[int, tuple[Callable[[], None], Lane]] = {}
        self._ready: dict[int, None] = {}
        """Found ready and not handled yet, the longest first. A reader must be prepared to find nothing."""
        self._virtual_s = 0.0
        self._deferred: list[Callable[[], None]] = []
        self._later: dict[object, Callable[[], None]] = {}
        self._tick: asyncio.TimerHandle | None = None
        self._in_turn = False
        self.going = asyncio.Event()
        """Set except between :meth:`pause` and :meth:`resume`."""
        self.going.set()
        loop.add_reader(self._epoll.fileno(), self._turn)

    def add(self, lane: Lane, fd: int, callback: Callable[[], None]) -> None:
        """Watch ``fd``, which the caller owns and must remove before closing it."""
        self._epoll.register(fd, select.EPOLLIN)
        self._callbacks[fd] = callback, lane

    def remove(self, fd: int) -> None:
        """Stop watching ``fd``; no error when it is not watched."""
        if self._callbacks.pop(fd, None) is not None:
            self._ready.pop(fd, None)
            self._epoll.unregister(fd)

    def defer(self, callback: Callable[[], None]) -> None:
        """Call back once everything that is ready now has been handled, in order of registration."""
        self._deferred.append(callback)
        if not self._in_turn and len(self._deferred) == 1:
            self.loop.call_soon(self._run_deferred)

    def later(self, key: object, callback: Callable[[], None]) -> None:
        """Call back in a millisecond or two unless :meth:`not_later` comes first, as it usually does. One timer
        serves all callers, and none fires without a caller (a wake-up costs more than a call)."""
        self._later[key] = callback
        if self._tick is None:
            self._tick = self.loop.call_later(_LATER_S, self._run_later)

    def not_later(self, key: object) -> None:
        """Revoke :meth:`later`. No effect if it was not requested, or has happened."""
        if self._later.pop(key, None) is not None and not self._later and self._tick is not None:
            self._tick.cancel()
            self._tick = None

    def pause(self) -> None:
        """Suspend callbacks until :meth:`resume`: descriptors that become ready wait."""
        self.going.clear()
        self.loop.remove_reader(self._epoll.fileno())

    def resume(self) -> None:
        """Continue after :meth:`pause`."""
        self.going.set()
        self.loop.add_reader(self._epoll.fileno(), self._turn)

    def close(self) -> None:
        """Stop watching everything. Repeatable. The descriptors stay their owners'."""
        if not self._epoll.closed:
            self.loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
        self._callbacks.clear()
        self._ready.clear()
        self._later.clear()

    def _turn(self) -> None:
        self._in_turn = True
        until_s = self._clock() + _TURN_S
        try:
            while self._round(until_s):
                pass
        finally:
            self._in_turn = False

    def _round(self, until_s: float) -> bool:
        """Handle what is ready, always the slot that took least first; returns whether there may be more, and time
        for it. What is left over comes before what becomes ready later."""
        for fd, _mask in () if self._epoll.closed else self._epoll.poll(0, _MAX_EVENTS):
            if fd in self._callbacks:  # else it would be looked up in every turn from now on, and end each
                self._ready.setdefault(fd)
        waiting: dict[Lane, deque[int]] = {}
        for fd in self._ready:
            waiting.setdefault(self._callbacks[fd][1], deque()).append(fd)
        any_ready, now_s = bool(waiting), self._clock()
        while waiting and now_s < until_s:
            lane = min(waiting, key=_TOOK_S)
            fd = waiting[lane].popleft()
            if not waiting[lane]:
                del waiting[lane]
            if fd in self._ready:  # not removed by a callback of this round
                del self._ready[fd]
                # The slot pays for the time of its callback. One that had nothing to do for a while begins where the
                # others are now: it has saved nothing up.
                self._virtual_s = max(self._virtual_s, lane.took_s)
                _guarded(self._callbacks[fd][0])
                began_s, now_s = now_s, self._clock()
                lane.took_s = self._virtual_s + now_s - began_s
        self._run_deferred()
        return any_ready and now_s < until_s

    def _run_later(self) -> None:
        self._tick = None
        callbacks, self._later = self._later, {}
        for callback in callbacks.values():
            _guarded(callback)
        self._run_deferred()

    def _run_deferred(self) -> None:
        while self._deferred:
            deferred, self._deferred = self._deferred, []
            for callback in deferred:
                _guarded(callback)


def _guarded(callback: Callable[[], None]) -> None:
    """Errors of one slot's callback must not affect the others in the same round."""
    try:
        callback()
    except Exception:
        log.exception("a callback failed")
