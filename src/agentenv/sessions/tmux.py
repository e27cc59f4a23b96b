"""One tmux session, controlled through its own control-mode client."""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentenv.deadlines import scaled
from agentenv.errors import InvalidArgumentsError, LeaseLostError, UnknownSessionError
from agentenv.sessions import foreground
from agentenv.sessions.allowance import Allowance
from agentenv.sessions.asciicast import Recorder
from agentenv.sessions.command_socket import CommandSocket
from agentenv.sessions.condition import Changes
from agentenv.sessions.host import Host, Program
from agentenv.sessions.reader import Reader
from agentenv.sessions.run_once import output_of
from agentenv.sessions.start_errors import not_started
from agentenv.sessions.tmux_control import Answer, ControlParser, Event, Noticed, Printed
from agentenv.sessions.unread import Unread
from agentenv.wire.sessions import TmuxState

HISTORY_LINES = 50_000
LINES_PER_TURN = 256
"""Further lines are left to the next iterations of the loop; meanwhile nothing is read."""
_TURNS_AT_THE_END = 8
WORK_PER_S = 4_096.0
_BURST = 4 * WORK_PER_S
"""Work beyond this burst has to wait: a session that floods slows down itself."""
_ANSWER_S = scaled(15.0)
_ATTACH_S = scaled(15.0)
_PAUSED_S = 0.2
_REAPED_S = scaled(2.0)
_PAUSE_AFTER_S = 3
"""A session that prints faster than it is read is paused by tmux, which then omits output."""
_MOST_BYTES_PER_S = 1024 * 1024
"""Enough for any screen; recording more would be too much work, and no one could watch it."""
_MOST_PRINTED_BYTES = 64 * 1024
"""Longest line that reports a program's output; tmux's own have 11 KB."""
_LINES_PER_EVENT = 16
"""Cost of a line of an answer relative to an event: one event costs this many lines."""
_MOST_ASKED = 512
"""Maximum number of unanswered commands; a tmux with more gets no new ones."""
_FIELDS = (
    *("pane_dead", "pane_dead_status", "pane_dead_signal", "pane_pid", "history_size", "pane_width", "pane_height"),
    *("cursor_x", "cursor_y", "pid", "pane_current_command"),
)
_FORMAT = "\t".join(f"#{{{name}}}" for name in _FIELDS)
_OPTIONS = (
    ("remain-on-exit", "on"),  # otherwise the last screen and the exit code would be gone
    ("remain-on-exit-format", ""),
    ("status", "off"),
    ("history-limit", str(HISTORY_LINES)),
    ("default-terminal", "screen-256color"),
)
_PANE = re.compile(r"%[0-9]{1,9}")
_NUMBER = re.compile(r"[0-9]{1,9}")
_RUNNING = re.compile(r"0? (?P<pid>[0-9]{1,9}) /dev/pts/(?P<terminal>[0-9]{1,6})")
"""A pane whose program has not ended."""
_OTHER_COMMANDS = 2
"""Answers not meant for us: ``start-server`` and ``new-session``."""


@dataclass(frozen=True)
class TmuxSetup:
    """What to start."""

    name: str
    command: str | None
    cwd: str
    env: Mapping[str, str]
    rows: int
    columns: int
    record: bool


class Tmux:
    """A session from its start to :meth:`close`. Its methods wait only for tmux's answers."""

    def __init__(self, host: Host, setup: TmuxSetup, unread: Unread) -> None:
        self.setup = setup
        self.changes = Changes(host.loop)
        self.lost = False
        self.start_error = ""
        self.recorder = Recorder(
            columns=setup.columns, rows=setup.rows, began_unix_s=time.time(), now_s=host.loop.time(), title=setup.name
        )
        self._host = host
        self._unread = unread
        self._seen: list[str] = []
        self._seen_chars = 0
        self._parser = ControlParser()
        self._asked: deque[asyncio.Future[Answer | None]] = deque()
        self._going_on: asyncio.Future[Answer | None] | None = None
        self._readers: list[Reader | LineReader] = []
        self._pane = ""
        self._attached = False
        self._begun = 0
        self._shown_dead = False
        self._ended = False
        self._start()

    @property
    def pane(self) -> str:
        """The target of commands."""
        return self._pane

    @property
    def seen(self) -> list[str]:
        """Lines of the last capture; empty when they were dropped for the slot's limit of unread output."""
        return self._seen

    @seen.setter
    def seen(self, lines: list[str]) -> None:
        self._seen, self._seen_chars = lines, sum(map(len, lines))
        self._notify_held()

    def shed(self) -> None:
        """Holder: the slot exceeds its limit of unread output."""
        self._parser.shed()
        self.seen = []

    def _notify_held(self) -> None:
        self._unread.holds(self, self._parser.held_bytes + self._seen_chars)

    @property
    def alive(self) -> bool:
        """Whether it accepts commands."""
        return not self._ended and not self.lost

    async def open(self) -> None:
        """Wait until it is running. ``start_error`` is the reason if it does not start. Raises LeaseLostError."""
        setup = self.setup
        until_s = self._host.loop.time() + _ATTACH_S
        # Commands sent earlier would be refused: there is "no current client" yet.
        while self.alive and not self._attached and await self.changes.until(until_s):
            pass
        output = f"pause-after={_PAUSE_AFTER_S}" if setup.record else "no-output"
        try:
            await self.command(f"refresh-client -C {setup.columns}x{setup.rows}")
            await self.command(f"refresh-client -f {output}")
            self._pane = await self._line("display-message -p '#{pane_id}'")
        except (InvalidArgumentsError, UnknownSessionError) as error:
            self.start_error = self.start_error or error.message

    async def command(self, command: str) -> list[str]:
        """tmux's answer to a command. Raises InvalidArgumentsError when tmux refuses it, UnknownSessionError
        when it has ended or does not answer, LeaseLostError."""
        answered: asyncio.Future[Answer | None] = self._host.loop.create_future()
        if len(self._asked) >= _MOST_ASKED:
            self.close()
        if self.alive:
            self._asked.append(answered)
            self._socket.type(command + "\n")
        else:
            answered.set_result(None)
        done, _ = await asyncio.wait([answered], timeout=_ANSWER_S)
        if self.lost:
            raise LeaseLostError("the slot was lost")
        answer = answered.result() if done else None
        if answer is None:
            how = "has ended" if done else "does not respond"
            raise UnknownSessionError(f"the tmux session {self.setup.name!r} {how}", next_step="start it again")
        if not answer.ok:
            raise InvalidArgumentsError(f"tmux refused: {' '.join(answer.lines)[:500]}")
        left_out = [f"[{answer.dropped_bytes} earlier bytes were omitted]"] if answer.dropped_bytes else []
        return [*left_out, *answer.lines]

    async def state(self, *, idle: bool | None = None) -> TmuxState:
        """Its current state."""
        if not self.alive:
            return TmuxState(session=self.setup.name, state="exited")
        found = await self._fields()
        dead = found.get("pane_dead") == "1"
        until_s = self._host.loop.time() + _REAPED_S
        while dead and _exit_code(found) is None and self._host.loop.time() < until_s:
            # Its terminal is closed and its process about to be reaped; tmux 3.3 misses some of these signals.
            reap = f"kill -CHLD {_number(found, 'pid') or '$$'}; sleep 0.02"
            await output_of(self._host, "bash", "-c", reap, longest_s=_REAPED_S)
            found = await self._fields()
        if dead and not self._shown_dead:
            await self._record_end()
        return TmuxState(
            session=self.setup.name,
            state="exited" if dead else "running",
            exit_code=_exit_code(found) if dead else None,
            idle=idle,
            command="" if dead else found.get("pane_current_command", ""),
            rows=_number(found, "pane_height") or 0,
            columns=_number(found, "pane_width") or 0,
            cursor_row=_number(found, "cursor_y") or 0,
            cursor_column=_number(found, "cursor_x") or 0,
            history_lines=_number(found, "history_size") or 0,
        )

    async def _record_end(self) -> None:
        """Record the last screen: tmux forgets a program's last output when its terminal is closed before the
        output was passed on."""
        self._shown_dead = True
        lines = await self.command(f"capture-pane -p -e -t {self._pane}")
        while lines and not lines[-1]:
            lines.pop()
        self.recorder.output(("\x1b[H\x1b[2J" + "\r\n".join(lines) + "\r\n").encode(), self._host.loop.time())

    async def _line(self, command: str) -> str:
        """A one-line answer; empty when another program in the slot answers in tmux's place."""
        lines = await self.command(command)
        return lines[0] if lines else ""

    async def _fields(self) -> dict[str, str]:
        said = await self._line(f"display-message -p -t {self._pane} '{_FORMAT}'")
        return dict(zip(_FIELDS, said.split("\t"), strict=False))

    async def idle(self) -> bool:
        """Whether the started program (usually a shell) is itself blocked until something is typed: nothing it
        started is in the foreground, and it has read all that was typed. True when it has ended, False when neither
        can be determined."""
        found = await self._line(f"display-message -p -t {self._pane} '#{{pane_dead}} #{{pane_pid}} #{{pane_tty}}'")
        shown = _RUNNING.fullmatch(found)
        if shown is None:
            return True
        waits = await foreground.seen(self._host, terminal=int(shown["terminal"]), group=int(shown["pid"]))
        # tmux 3.3 does not always notice the end
        return waits is not None and (waits.input or waits.ended)

    async def ended(self) -> bool:
        """Whether the started program has ended. Raises UnknownSessionError, LeaseLostError."""
        return not self.alive or (await self._fields()).get("pane_dead") == "1"

    async def screen(self, *, history: bool = False, joined: bool = False) -> list[str]:
        """Lines of the screen, or of the whole scrollback; ``joined``: without the terminal's line breaks."""
        return await self.command(f"capture-pane -p {'-S - ' * history}{'-J ' * joined}-t {self._pane}")

    async def resize(self, rows: int, columns: int) -> None:
        """Change the size; programs are notified."""
        await self.command(f"refresh-client -C {columns}x{rows}")
        self.recorder.resized(columns, rows, self._host.loop.time())

    def close(self) -> None:
        """Release it; the session itself ends with its slot. Repeatable."""
        self._ended = True
        self._socket.close()
        for reader in self._readers:
            reader.close()
        self._readers = []
        self._unread.holds(self, 0)
        self._fail_asked()

    def take_recording(self) -> str:
        """The part of its asciicast added since the last call of this."""
        return self.recorder.take(self._host.loop.time()) if self.setup.record else ""

    # -- inside ------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._socket = CommandSocket(self._host)
        try:
            # In the session's directory, so that one that cannot be entered is refused as by the other tools:
            # tmux itself would start the program somewhere else, and not say so.
            self._client = self._host.start(
                Program(
                    self._argv(),
                    self._host.env,
                    self.setup.cwd,
                    stdin=self._socket.questions,
                    given=self._host.tmux_env,
                ),
                self,
            )
        except ValueError as error:
            self._socket.close()
            raise InvalidArgumentsError(f"tmux: command and env are too large: {error}") from error
        finally:
            self._socket.started()

    def _argv(self) -> list[str]:
        setup = self.setup
        argv = [*self._host.tmux, "-S", self._host.tmux_socket, "-u", "-f", "/dev/null", "-C", "start-server"]
        for name in self._host.tmux_env:
            argv += [";", "set-environment", "-gu", name]
        for name, value in _OPTIONS:
            argv += [";", "set-option", "-gq", name, value]
        argv += [";", "new-session", "-s", setup.name, "-x", str(setup.columns), "-y", str(setup.rows)]
        argv += ["-c", _word(setup.cwd)]
        for name, value in {"HISTFILE": "", **setup.env}.items():
            argv += ["-e", _word(f"{name}={value}")]
        return argv if setup.command is None else [*argv, _word(setup.command)]

    def on_started(self, fds: tuple[int, ...]) -> None:
        """ProgramEvents."""
        out, err = fds
        self._readers = [
            LineReader(self._host, out, self._came, most_bytes_per_s=_MOST_BYTES_PER_S),
            Reader(self._host, err, self._complained, terminal=False),
        ]

    def on_failed(self, error: int, *, cwd: bool) -> None:
        """ProgramEvents."""
        self.start_error = not_started(error, cwd=self.setup.cwd if cwd else None)
        self.close()
        self.changes.notify()

    def on_ended(self, exit_code: int) -> None:  # noqa: ARG002 (ProgramEvents)
        """ProgramEvents: the client ended, because the session ended or the connection to it was lost."""
        for reader in self._readers:
            reader.drain()
        self.close()
        self.changes.notify()

    def on_lost(self) -> None:
        """ProgramEvents."""
        self.lost = True
        self.close()
        self.changes.notify()

    def _complained(self, chunk: bytes) -> None:
        self.start_error = (self.start_error + chunk.decode("utf-8", "replace"))[:1_000]

    def _came(self, chunk: bytes) -> float:
        events = self._parser.feed(chunk)
        for event in events:
            self._take(event)
        self._notify_held()
        self.changes.notify()
        return 1 + len(events) + chunk.count(b"\n") / _LINES_PER_EVENT

    def _take(self, event: Event) -> None:
        match event:
            case Answer(ours=True):
                if self._asked and not (asked := self._asked.popleft()).done():
                    asked.set_result(event)
            case Answer(ok=ok):
                self._begun += 1
                self._attached = (
                    self._attached or self._begun == len(_OPTIONS) + len(self._host.tmux_env) + _OTHER_COMMANDS
                )
                self.start_error = self.start_error if ok else " ".join(event.lines)[:1_000]
            case Printed():
                if self._pane in ("", event.pane):
                    self._record(event)
            case Noticed(name="pause"):
                self._pause(event.rest)
            case Noticed(name="session-changed"):
                self._attached = True
            case Noticed(name="exit"):
                self._ended = True
                if not self._pane:
                    self.start_error = self.start_error or event.rest[:1_000]
                self._fail_asked()

    def _record(self, printed: Printed) -> None:
        if self.recorder.full or len(printed.escaped) > _MOST_PRINTED_BYTES:
            self.recorder.skip(len(printed.escaped))
        else:
            self.recorder.output(printed.data, self._host.loop.time())

    def _pause(self, pane: str) -> None:
        """Resume the recorded pane, once for each time that tmux has answered."""
        waits = self._going_on is not None and not self._going_on.done()
        if waits or self._pane not in ("", pane) or not _PANE.fullmatch(pane):
            return
        self._going_on = self._host.loop.create_future()
        self.recorder.left_out(self._host.loop.time())
        self._host.loop.call_later(_PAUSED_S, self._go_on, pane, self._going_on)

    def _go_on(self, pane: str, answered: asyncio.Future[Answer | None]) -> None:
        if self.alive:
            self._asked.append(answered)
            self._socket.type(f"refresh-client -A '{pane}:continue'\n")

    def _fail_asked(self) -> None:
        while self._asked:
            if not (asked := self._asked.popleft()).done():
                asked.set_result(None)


class LineReader:
    """A :class:`agentenv.sessions.reader.Reader` of lines that each cause work for the server, in small portions; from
    its start to :meth:`close`.

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


def _exit_code(found: Mapping[str, str]) -> int | None:
    signal_number = _number(found, "pane_dead_signal")
    return 128 + signal_number if signal_number else _number(found, "pane_dead_status")


def _number(found: Mapping[str, str], name: str) -> int | None:
    text = found.get(name, "")
    return int(text) if _NUMBER.fullmatch(text) else None


def _word(text: str) -> str:
    """Escape: tmux takes an argument that ends in a semicolon for the end of a command."""
    return f"{text[:-1]}\\;" if text.endswith(";") else text
