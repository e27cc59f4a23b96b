"""Reads lines that each cause work for the server, such as tmux's control mode prints: in small portions."""

from __future__ import annotations

from collections.abc import Callable

from agentenv.sessions.allowance import Allowance
from agentenv.sessions.host import Host
from agentenv.sessions.reader import Reader

LINES_PER_TURN = 256
"""Further lines are left to the next iterations of the loop; meanwhile nothing is read."""
_TURNS_AT_THE_END = 8
WORK_PER_S = 4_096.0
_BURST = 4 * WORK_PER_S
"""Work beyond this burst has to wait: a session that floods slows down itself."""


class LineReader:
    """A :class:`agentenv.sessions.reader.Reader` of lines, from its start to :meth:`close`.

    ``on_lines`` gets each portion (its last line may continue in the next) and returns how much work it was.
    """

    def __init__(self, host: Host, fd: int, on_lines: Callable[[bytes], float], *, most_bytes_per_s: int) -> None:
        self._loop = host.loop
        self._on_lines: Callable[[bytes], float] | None = on_lines
        self._rest = b""
        self._waiting = False
        self._allowance = Allowance(WORK_PER_S, _BURST)
        self._reader = Reader(host, fd, self._came, terminal=False, most_bytes_per_s=most_bytes_per_s)

    def drain(self) -> None:
        """Process the bytes available now, up to the limit of one portion; the rest is lost."""
        self._reader.drain()
        for _ in range(_TURNS_AT_THE_END):
            if self._rest:
                self._portion()

    def close(self) -> None:
        """Release the descriptor and the callbacks. Repeatable."""
        self._on_lines = None
        self._rest = b""
        self._reader.close()

    def _came(self, chunk: bytes) -> None:
        self._rest += chunk
        if not self._waiting:
            self._turn()

    def _turn(self) -> None:
        self._waiting = False
        wait_s = self._portion()
        if self._on_lines is None:
            return
        if wait_s or self._rest:
            self._waiting = True
            self._reader.hold()
            self._loop.call_later(wait_s, self._turn)
        else:
            self._reader.go_on()

    def _portion(self) -> float:
        """Pass on the next lines; returns how long to pause."""
        *lines, rest = self._rest.split(b"\n", LINES_PER_TURN)
        size = len(self._rest) - len(rest) if len(lines) == LINES_PER_TURN else len(self._rest)
        portion, self._rest = self._rest[:size], self._rest[size:]
        work = self._on_lines(portion) if self._on_lines is not None else 0.0
        return self._allowance.take(work, self._loop.time())
