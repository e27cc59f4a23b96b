"""One terminal session: a persistent bash, and the command it is running."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from agentenv.deadlines import scaled
from agentenv.errors import InvalidArgumentsError, LeaseLostError, SessionBusyError, UserUnsupportedError
from agentenv.sessions import foreground, shell_protocol
from agentenv.sessions.command_socket import CommandSocket
from agentenv.sessions.condition import Changes
from agentenv.sessions.host import Host, Program, Started, number_of, terminal_env
from agentenv.sessions.keys import SIGNAL_KEYS
from agentenv.sessions.output_window import OutputWindow
from agentenv.sessions.start_errors import not_started
from agentenv.sessions.unread import Unread

CANNOT_START = 126
_MARKER_WAIT_S = scaled(1.0)
_MAX_UNREAD_BYTES = 256 * 1024
"""More unread bytes than this are not an answer of the shell."""
_SHOWN_CHARS = 200
_ASK_AGAIN_LOOKS, _MUTE_LOOKS = 2, 4
"""Number of consecutive checks of a shell that has read our question without answering, before asking again, and
before giving up."""
_ALIASING = ("alias", "source", ". ", "BASH_ALIASES", "eval")


class TerminalPhase(StrEnum):
    """State of the shell."""

    starting = "starting"
    idle = "idle"
    checking = "checking"
    """It parses the command, to see whether it is complete."""
    running = "running"
    exited = "exited"


@dataclass(frozen=True)
class Setup:
    """How a session's shell is started."""

    cwd: str
    env: Mapping[str, str]
    cap_bytes: int
    pty: bool = False
    size: tuple[int, int] = (40, 120)
    user: str | None = None


@dataclass(frozen=True)
class Taken:
    """Output since it was last taken."""

    stdout: str = ""
    stderr: str = ""
    stdout_dropped_bytes: int = 0
    stderr_dropped_bytes: int = 0


class Terminal:
    """A session from its start to :meth:`close`. Callers decide how long to wait; only :meth:`look` waits here."""

    def __init__(self, host: Host, setup: Setup, unread: Unread) -> None:
        self.setup = setup
        self.changes = Changes(host.loop)
        self.phase = TerminalPhase.starting
        self.command: str | None = None
        """The running command, or the next one."""
        self.command_began_s = 0.0
        self._result: int | None = None
        self._result_told = False
        self.cwd = setup.cwd
        self.lost = False
        self.detached = False
        """Whether another program has replaced the shell (``exec``), which cannot be queried."""
        self.mute = False
        """Whether the shell reads its input without answering, whatever the command has done to it."""
        self.asks_input = False
        """Whether the running program was seen waiting for input from its terminal."""
        self.start_error = ""
        self._unread = unread
        self._looks = 0
        self._typed_at = False
        self._host = host
        self._nonce = ""
        self._said = b""
        self._answer: shell_protocol.ShellReport | None = None
        self._last = shell_protocol.ShellReport(0, (0,), "", setup.cwd)
        self._aliases = False
        self._marker_timer: asyncio.TimerHandle | None = None
        self._out: OutputWindow | None = None
        self._err: OutputWindow | None = None
        self._started = self._start()

    # -- what calls do -----------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a command is running."""
        return self.command is not None

    @property
    def shown_command(self) -> str | None:
        """The running command, cut to a length suitable for a context window."""
        shown = self.command
        return shown if shown is None or len(shown) <= _SHOWN_CHARS else shown[:_SHOWN_CHARS] + "…"

    @property
    def answering(self) -> bool:
        """Whether the end of the command can still be detected."""
        return not self.detached and not self.mute

    @property
    def number(self) -> int | None:
        """N, when its terminal is ``/dev/pts/N`` in the slot."""
        return number_of(self._out.fd) if self.setup.pty and self._out is not None and self._out.open else None

    @property
    def typed_bytes(self) -> int:
        """Memory taken by commands that were sent but not read."""
        return self._socket.unsent_bytes + len(self.command or "")

    def run(self, command: str) -> None:
        """Start a command. Raises SessionBusyError when one is running."""
        if self.command is not None:
            raise self.busy_error()
        self.command = command
        self.asks_input = False
        self.command_began_s = self._host.loop.time()
        self._result = None
        if self.phase is TerminalPhase.idle:
            self._begin()

    def busy_error(self) -> SessionBusyError:
        """The error naming the running command and the options."""
        for_s = self._host.loop.time() - self.command_began_s
        return SessionBusyError(
            f"the session is busy: {self.shown_command!r} has been running for {for_s:.1f} s",
            next_step="get its output with an empty command, send keys such as C-c, use another session, or reset it",
        )

    def signal(self, data: bytes) -> None:
        """A key without a terminal, as the signal it stands for. Raises InvalidArgumentsError when there is none."""
        if (number := SIGNAL_KEYS.get(data)) is None:
            raise InvalidArgumentsError(
                "without a pty only C-c and C-\\ can be sent: commands have no terminal to read from",
                next_step="reset the session with pty=true, or give the input in the command (a pipe, a here-document)",
            )
        if self.command is not None:
            self._started.signal(number, self.command_began_s)
            self._ask_again()

    def type(self, data: bytes | memoryview) -> int:
        """Type into the terminal; returns how many bytes it took at once. Raises InvalidArgumentsError when it
        takes no more."""
        if self._out is None and self.phase is TerminalPhase.starting:
            raise InvalidArgumentsError("the session's shell is still starting", next_step="send the input again")
        if self._out is None or not self._out.open:
            raise InvalidArgumentsError("the session's terminal is closed", next_step="reset the session")
        self.asks_input = False
        self._typed_at = True
        self._ask_again()
        try:
            return os.write(self._out.fd, data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise InvalidArgumentsError(f"the session's terminal does not accept keys: {error.strerror}") from error

    async def look(self) -> None:
        """To be called from time to time while waiting for the command's end: detects whether the program waits for
        input, and repeats a question to the shell that was lost because the command changed how it reads. Waits for
        2 s at most."""
        asked = (
            self.phase in (TerminalPhase.starting, TerminalPhase.checking, TerminalPhase.running)
            and self._answer is None
        )
        all_read, number = asked and self._socket.all_read(), self.number
        if not all_read and number is None:
            return
        nonce = self._nonce
        waits = await foreground.seen(self._host, commands=self._started.input_inode, terminal=number)
        if waits is None or not self.busy or self._nonce != nonce:
            return
        self.asks_input = waits.input
        self._looks = self._looks + 1 if all_read and waits.commands and self._answer is None else 0
        if self._looks == _ASK_AGAIN_LOOKS:
            # bash still has the first question, and returns to it (and to its marker) without the editor
            self._socket.type(shell_protocol.question(self._nonce, marker=False) + shell_protocol.without_editor())
        elif self._looks == _MUTE_LOOKS:
            self.mute = True
            self.changes.notify()

    def take(self) -> Taken:
        """Output since the last call of this."""
        last = not self.busy  # a partial character left by a command that has ended stays partial
        out, out_dropped = self._out.take(last=last) if self._out else ("", 0)
        err, err_dropped = self._err.take(last=last) if self._err else ("", 0)
        return Taken(out, err, out_dropped, err_dropped)

    def take_result(self, during_s: float | None) -> int | None:
        """The exit code of the ended command, returned once to every call made while it ran. ``during_s``: the
        ``command_began_s`` that the call saw; None when nothing was running."""
        if self._result_told and during_s != self.command_began_s:
            return None
        self._result_told = self._result is not None
        return self._result

    @property
    def waiting_bytes(self) -> int:
        """Output not taken yet."""
        return sum(tap.waiting_bytes for tap in (self._out, self._err) if tap is not None)

    async def shell_has_ended(self) -> bool:
        """Whether the slot's kernel says so, though its end was not reported yet."""
        waits = await foreground.seen(self._host, group=self._started.pid)
        return waits is not None and waits.ended

    def kill(self) -> None:
        """Kill the shell and everything it started; afterwards it is ``exited``."""
        self._started.kill()

    def close(self) -> None:
        """Release it and its output, whether it has ended or its slot will end it. Repeatable."""
        if self._marker_timer is not None:
            self._marker_timer.cancel()
            self._marker_timer = None
        self._socket.close()
        for tap in (self._out, self._err):
            if tap is not None:
                tap.close()
        self._out = self._err = None
        self.phase = TerminalPhase.exited
        self.changes.notify()

    # -- starting ----------------------------------------------------------------------------------

    def _start(self) -> Started:
        self._socket = CommandSocket(self._host, self._received)
        env = terminal_env(self._host.env) if self.setup.pty else self._host.env
        try:
            started = self._host.start(
                Program(
                    argv=shell_protocol.SHELL_ARGV,
                    env=env,
                    given=self.setup.env,
                    user=self.setup.user,
                    cwd=self.setup.cwd,
                    stdin=self._socket.questions,
                    answers=self._socket.answers,
                    terminal=self.setup.size if self.setup.pty else None,
                ),
                self,
            )
        except UserUnsupportedError:
            self._socket.close()
            raise
        except ValueError as error:
            self._socket.close()
            raise InvalidArgumentsError(f"terminal: {error}") from error
        finally:
            self._socket.started()
        self._send(shell_protocol.first_lines(terminal=self.setup.pty))
        return started

    def on_started(self, fds: tuple[int, ...]) -> None:
        """ProgramEvents."""
        cap_bytes, pty, unread = self.setup.cap_bytes, self.setup.pty, self._unread
        taps = [OutputWindow(self._host, fd, cap_bytes, self.changes.notify, terminal=pty, unread=unread) for fd in fds]
        self._out, self._err = taps[0], taps[1] if len(taps) > 1 else None
        if self.setup.pty:
            self._out.expect(self._nonce, shell_protocol.marker_line(self._nonce), self._settle)
        self._settle()

    def on_failed(self, error: int, *, cwd: bool) -> None:
        """ProgramEvents: an ordinary result, as from a shell."""
        self.start_error = f"bash: {not_started(error, cwd=self.setup.cwd if cwd else None)}\n"
        self._ended(1 if cwd else CANNOT_START)

    def on_ended(self, exit_code: int) -> None:
        """ProgramEvents: the shell (or the program that replaced it) ended."""
        for tap in (self._out, self._err):
            if tap is not None:
                tap.drain()
        self._ended(exit_code)

    def on_lost(self) -> None:
        """ProgramEvents."""
        self.lost = True
        self.close()

    def _ended(self, exit_code: int) -> None:
        self._socket.close()
        self.phase = TerminalPhase.exited
        self.command = None
        self._result, self._result_told = exit_code, False
        self.changes.notify()

    # -- the dialogue with the shell ---------------------------------------------------------------

    def _begin(self) -> None:
        assert self.command is not None
        if not shell_protocol.fits(self.command):
            self._run(shell_protocol.evaluated(self.command))
        elif not self._aliases and shell_protocol.is_plain(self.command):
            self._run(shell_protocol.native(self.command, plain=True))
        else:
            self.phase = TerminalPhase.checking
            self._send(shell_protocol.check(self.command), marker=False)

    def _ask_again(self) -> None:
        """After keys the question may be asked once more: bash drops the line that it reads when C-c arrives."""
        self._looks = min(self._looks, _ASK_AGAIN_LOOKS - 1)
        self.mute = False

    def _checked(self, *, whole: bool) -> None:
        assert self.command is not None
        self._run(shell_protocol.native(self.command) if whole else shell_protocol.evaluated(self.command))

    def _run(self, text: str) -> None:
        assert self.command is not None
        self._aliases = self._aliases or any(word in self.command for word in _ALIASING)
        self.phase = TerminalPhase.running
        before = shell_protocol.typed_ahead_dropped() if self._typed_at else ""
        self._typed_at = False
        self._send(before + shell_protocol.restored(self._last) + text)

    def _send(self, text: str, *, marker: bool = True) -> None:
        """Type this, and a question for the shell's state after it. In one piece, because each piece wakes the
        shell."""
        self._nonce = secrets.token_hex(16)
        self._said = b""
        self._answer = None
        self._looks = 0
        marker = marker and self.setup.pty
        self._socket.type(text + shell_protocol.question(self._nonce, marker=marker))
        if marker and self._out is not None:
            self._out.expect(self._nonce, shell_protocol.marker_line(self._nonce), self._settle)

    def _received(self, said: bytes) -> None:
        """The shell answers, or (empty) hangs up."""
        if not said:
            self.detached = True
            self.changes.notify()
            return
        self._said += said
        if len(self._said) > _MAX_UNREAD_BYTES:
            self._socket.close()
            self.detached = True
            return
        answer = shell_protocol.report(self._nonce, self._said)
        if answer is None or self._answer is not None:
            return
        self._answer = answer
        if self.phase is TerminalPhase.checking:
            self._checked(whole=answer.exit_code == 1)
        else:
            self._settle()

    def _settle(self) -> None:
        """Continue once everything has arrived: the answer, the descriptors, and on a terminal the marker."""
        if (
            self._answer is None
            or self._out is None
            or self.phase not in (TerminalPhase.starting, TerminalPhase.running)
        ):
            return
        if self._out.expecting and self._marker_timer is None:
            self._marker_timer = self._host.loop.call_later(_MARKER_WAIT_S, self._give_up_marker)
        if not self._out.expecting:
            self._arrived()

    def _give_up_marker(self) -> None:
        """The command closed its terminal, or replaced it."""
        if self._out is not None:
            self._out.expect_nothing()
        if self._answer is not None:
            self._arrived()

    def _arrived(self) -> None:
        answer, self._answer = self._answer, None
        assert answer is not None
        if self._marker_timer is not None:
            self._marker_timer.cancel()
            self._marker_timer = None
        for tap in (self._out, self._err):
            if tap is not None:
                tap.drain()
        if self.phase is TerminalPhase.starting:
            self._ready(answer)
            return
        self._last = answer
        self.mute = False
        self.cwd = answer.cwd
        self.phase = TerminalPhase.idle
        self.command = None
        self._result, self._result_told = answer.exit_code, False
        self.changes.notify()

    def _ready(self, answer: shell_protocol.ShellReport) -> None:
        """The shell is up: messages of an interactive bash without a terminal are not output."""
        for tap in (self._out, self._err):
            if tap is not None:
                tap.forget()
        self.phase = TerminalPhase.idle
        self.cwd = answer.cwd
        if self.command is not None:
            self._begin()
        self.changes.notify()

    def check_lost(self) -> None:
        """Raise LeaseLostError once the slot is gone."""
        if self.lost:
            raise LeaseLostError("the slot was lost")
