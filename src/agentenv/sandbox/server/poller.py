"""Readiness of the many short-lived descriptors of slots, cheaper than the event loop's own.

One epoll set, itself watched by the event loop: adding and removing a descriptor is one system call (the loop's
``add_reader`` costs several times that), and everything that became ready in one iteration of the loop is handled
together, so that the resulting messages can be sent together.
"""

from __future__ import annotations

import asyncio
import logging
import select
from collections.abc import Callable

_MAX_ROUNDS = 4
"""Rounds handled in one iteration before the loop's other work is done."""
_MAX_EVENTS = 64
_LATER_S = 0.001

log = logging.getLogger(__name__)


class Poller:
    """Calls back when a descriptor can be read (or has hung up). Callbacks must not block."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._deferred: list[Callable[[], None]] = []
        self._later: dict[object, Callable[[], None]] = {}
        self._tick: asyncio.TimerHandle | None = None
        self._in_turn = False
        self.going = asyncio.Event()
        """Set except between :meth:`pause` and :meth:`resume`."""
        self.going.set()
        loop.add_reader(self._epoll.fileno(), self._turn)

    def add(self, fd: int, callback: Callable[[], None]) -> None:
        """Watch ``fd``, which the caller owns and must remove before closing it."""
        self._epoll.register(fd, select.EPOLLIN)
        self._callbacks[fd] = callback

    def remove(self, fd: int) -> None:
        """Stop watching ``fd``; no error when it is not watched."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def defer(self, callback: Callable[[], None]) -> None:
        """Call back once everything that is ready now has been handled, in order of registration."""
        self._deferred.append(callback)
        if not self._in_turn and len(self._deferred) == 1:
            self.loop.call_soon(self._run_deferred)

    def later(self, key: object, callback: Callable[[], None]) -> None:
        """Call back in a millisecond or two unless :meth:`not_later` comes first, as it usually does. One timer
        serves all callers, and none fires when nobody waits (a wake-up costs more than a call)."""
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
        """Go on after :meth:`pause`."""
        self.going.set()
        self.loop.add_reader(self._epoll.fileno(), self._turn)

    def close(self) -> None:
        """Stop watching everything. Repeatable. The descriptors stay their owners'."""
        if not self._epoll.closed:
            self.loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
        self._callbacks.clear()
        self._later.clear()

    def _turn(self) -> None:
        self._in_turn = True
        try:
            for _ in range(_MAX_ROUNDS):
                if not self._round():
                    break
        finally:
            self._in_turn = False

    def _round(self) -> bool:
        """Handle what is ready now; returns whether there was anything."""
        events = [] if self._epoll.closed else self._epoll.poll(0, _MAX_EVENTS)
        for fd, _mask in events:
            # A descriptor closed earlier in this round has no callback any more; a reused one gets an extra
            # call, which is why every reader must be prepared to find nothing.
            if (callback := self._callbacks.get(fd)) is not None:
                _guarded(callback)
        self._run_deferred()
        return bool(events)

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
