"""A machine from its start to its end: passes on the guest's events, and requests to stop.

The guest is believed as little as a container. Of its line of events one `ready` and one `failed` are passed on, with
fields of known types and limited lengths: so nothing that it sends can stop this process from ending it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import socket
import subprocess
import time
from typing import Any, Final

from agentenv.sandbox.machine import guest
from agentenv.sandbox.supervisor import events

log = logging.getLogger("machine")

_STOP_S: Final = 12.0
"""What a guest has to stop in order; never scaled, because Nomad kills after the job's `kill_timeout` of 15 s."""
_REPEAT_S: Final = 0.5
_MOST_LINE_BYTES: Final = 64 * 1024
_MOST_CHARACTERS: Final = 1000
_MOST_WEAKER: Final = 5
"""All of it fits into an unread pipe."""
_MOST_EXIT_CODE: Final = 255


class Running:
    """``line``: our end of the guest's line of events. ``port``: of this machine, instead of the guest's own."""

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket, port: int) -> None:
        self._process = process
        self._line = line
        self._port = port
        self._unread = b""
        self._reported: set[str] = set()
        self._code: int | None = None
        self._asked_at: float | None = None

    def until_its_end(self, stops: socket.socket, *, lifeline: bool) -> int:
        """Returns the exit code. A machine that ended by itself is reported on standard error, as any process that
        died: why is among what QEMU and the guest's kernel have written there."""
        ended = os.pidfd_open(self._process.pid)
        with selectors.DefaultSelector() as selector:
            selector.register(ended, selectors.EVENT_READ, None)
            selector.register(stops, selectors.EVENT_READ, self._stop)
            selector.register(self._line, selectors.EVENT_READ, self._read)
            if lifeline:
                selector.register(0, selectors.EVENT_READ, lambda: bool(os.read(0, 65536)) or self._stop())
            while self._process.poll() is None:
                for key, _ in selector.select(None if self._asked_at is None else _REPEAT_S):
                    if key.data is not None and not key.data():
                        selector.unregister(key.fileobj)
                if self._asked_at is not None:
                    self._ask(self._asked_at)
        os.close(ended)
        while self._read():
            pass
        if self._code is not None:
            return self._code
        if self._asked_at is not None:
            log.error("the guest did not stop within %g s and was killed", _STOP_S)
        else:
            log.error("QEMU exited unexpectedly with %d", self._process.wait())
        return events.EXIT_FAILED

    def _stop(self) -> bool:
        """Once is enough; what comes after is not read."""
        self._asked_at = self._asked_at or time.monotonic()
        return False

    def _ask(self, since: float) -> None:
        """At every turn: a guest that has not booted does not read it."""
        if time.monotonic() > since + _STOP_S:
            self._process.kill()
        with contextlib.suppress(OSError):  # QEMU has just ended, or does not read yet
            self._line.send(guest.STOP, socket.MSG_DONTWAIT)

    def _read(self) -> bool:
        """False at the end."""
        try:
            data = self._line.recv(65536)
        except OSError:
            data = b""
        *lines, self._unread = (self._unread + data)[-_MOST_LINE_BYTES:].split(b"\n")
        for line in lines:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict):
                self._take(event)
        return bool(data)

    def _take(self, event: dict[str, Any]) -> None:
        kind, code = event.get("event"), event.get("code")
        if kind == "exited":
            self._code = code if isinstance(code, int) and 0 <= code <= _MOST_EXIT_CODE else events.EXIT_FAILED
        elif kind in ("ready", "failed") and kind not in self._reported:
            self._reported.add(kind)
            if kind == "ready":
                events.emit(
                    "ready",
                    port=self._port,
                    pid=os.getpid(),
                    isolation=_text(event.get("isolation")),
                    weaker=_texts(event.get("weaker")),
                )
            else:
                fields = {name: _text(event.get(name)) for name in ("code", "message", "next_step")}
                events.emit("failed", **fields)


def _text(given: object) -> str:
    return given[:_MOST_CHARACTERS] if isinstance(given, str) else ""


def _texts(given: object) -> list[str]:
    return [_text(one) for one in given[:_MOST_WEAKER]] if isinstance(given, list) else []
