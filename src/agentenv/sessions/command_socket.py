"""Our ends of the channels over which a program receives commands and sends answers."""

from __future__ import annotations

import os
from collections.abc import Callable

from agentenv.sessions.host import Host

_READ_BYTES = 16 * 1024


class CommandSocket:
    """Writes as fast as the program reads, and passes its answers to ``heard``. The program's ends, made here, are
    :attr:`questions` and :attr:`answers`, open until :meth:`started`."""

    def __init__(self, host: Host, heard: Callable[[bytes], None] | None = None) -> None:
        self._host = host
        self._heard = heard
        self._unsent = bytearray()
        self._from = self.answers = -1
        self._to, self.questions = host.input()
        os.set_blocking(self._to, False)
        if heard is None:
            return
        try:
            self._from, self.answers = host.answers()
        except OSError:
            self.close()
            raise
        os.set_blocking(self._from, False)
        host.watch(self._from, self._readable)

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes waiting for the program to read."""
        return len(self._unsent)

    def started(self) -> None:
        """The program has its ends, or never will. Repeatable."""
        theirs, self.questions, self.answers = (self.questions, self.answers), -1, -1
        for fd in theirs:
            if fd >= 0:
                os.close(fd)

    def type(self, text: str) -> None:
        """Send text, now or as soon as there is room. Writes to a dead program are dropped."""
        if self._to < 0 or not text:
            return
        data = text.encode("utf-8", "surrogateescape")
        if self._unsent:
            self._unsent += data
            return
        sent = self._send(data)
        if sent < len(data):
            self._unsent += memoryview(data)[sent:]
            self._host.loop.add_writer(self._to, self._writable)

    def all_read(self) -> bool:
        """Whether everything sent has reached the program."""
        if self._to < 0 or self._unsent:
            return False
        return not self._host.unread_bytes(self._to)

    def close(self) -> None:
        """Close our ends. Repeatable."""
        self.started()
        self._heard = None
        if self._to >= 0:
            self._stop_writing()
            os.close(self._to)
            self._to = -1
        if self._from >= 0:
            self._host.unwatch(self._from)
            os.close(self._from)
            self._from = -1

    def _send(self, data: bytes | bytearray) -> int:
        try:
            return os.write(self._to, data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # it reads no more; its end is reported in other ways

    def _writable(self) -> None:
        del self._unsent[: self._send(self._unsent)]
        if not self._unsent:
            self._stop_writing()

    def _stop_writing(self) -> None:
        self._unsent.clear()
        self._host.loop.remove_writer(self._to)

    def _readable(self) -> None:
        try:
            said = os.read(self._from, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        heard = self._heard
        if not said:
            self.close()
        if heard is not None:
            heard(said)
