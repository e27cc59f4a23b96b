"""Reads lines each of which is work for the server, as tmux's control mode prints them: in small portions."""

from __future__ import annotations

from collections.abc import Callable

from agentenv.sessions.port import Host
from agentenv.sessions.reader import Reader

LINES_PER_TURN = 256
"""More that came are for the loop's next turns; meanwhile nothing is read."""
_TURNS_AT_THE_END = 8
WORK_PER_S = 4_096.0
_BURST = 4 * WORK_PER_S
"""What a slot has the server do beyond it waits: a session that floods slows down itself."""


class LineReader:
    """A :class:`agentenv.sessions.reader.Reader` of lines, from its start to :meth:`close`.

    ``on_lines`` gets each portion (its last line may go on in the next) and returns how much work it was.
    """

    def __init__(self, host: Host, fd: int, on_lines: Callable[[bytes], float], *, most_bytes_per_s: int) -> None:
        self._loop = host.loop
        self._on_lines: Callable[[bytes], float] | None = on_lines
        self._rest = b""
        self._waiting = False
        self._allowed = _BURST
        self._since_s = host.loop.time()
        self._gate = _Gate(host)
        self._reader = Reader(self._gate, fd, self._came, terminal=False, most_bytes_per_s=most_bytes_per_s)

    def drain(self) -> None:
        """Take what is there now, but no more of it than is done at once; the rest is lost."""
        self._reader.drain()
        for _ in range(_TURNS_AT_THE_END):
            if self._rest:
                self._portion()

    def close(self) -> None:
        """Let go of it, and of whom it told. Repeatable."""
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
            self._gate.shut()
            self._loop.call_later(wait_s, self._turn)
        else:
            self._gate.open()

    def _portion(self) -> float:
        """Hand over the next lines; for how long there must be no more."""
        *lines, rest = self._rest.split(b"\n", LINES_PER_TURN)
        size = len(self._rest) - len(rest) if len(lines) == LINES_PER_TURN else len(self._rest)
        portion, self._rest = self._rest[:size], self._rest[size:]
        work = self._on_lines(portion) if self._on_lines is not None else 0.0
        now = self._loop.time()
        earned = (now - self._since_s) * WORK_PER_S
        self._since_s = now
        self._allowed = min(self._allowed + earned, _BURST) - work
        return max(0.0, -self._allowed / WORK_PER_S)


class _Gate:
    """The host of one reader, which is told of its descriptor only while the gate is open."""

    def __init__(self, host: Host) -> None:
        self.loop, self.env, self.workspace, self.tmux_socket = host.loop, host.env, host.workspace, host.tmux_socket
        self.start, self.orphan = host.start, host.orphan
        self._host = host
        self._is_open = True
        self._wanted: tuple[int, Callable[[], None]] | None = None

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Host."""
        self._wanted = (fd, callback)
        if self._is_open:
            self._host.watch(fd, callback)

    def unwatch(self, fd: int) -> None:
        """Host."""
        self._wanted = None
        self._host.unwatch(fd)

    def shut(self) -> None:
        """Tell nothing. Repeatable."""
        if self._is_open and self._wanted is not None:
            self._host.unwatch(self._wanted[0])
        self._is_open = False

    def open(self) -> None:
        """Tell again. Repeatable."""
        if not self._is_open and self._wanted is not None:
            self._host.watch(*self._wanted)
        self._is_open = True
