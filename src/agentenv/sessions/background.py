"""One background process: its output, its input, its end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from agentenv.errors import InvalidArgumentsError, UserUnsupportedError
from agentenv.sessions.condition import Changes
from agentenv.sessions.head_tail import Rolling
from agentenv.sessions.host import Host, Program, terminal_env
from agentenv.sessions.reader import Reader
from agentenv.sessions.start_errors import not_started
from agentenv.sessions.unread import Unread
from agentenv.wire.sessions import ProcessState

CANNOT_START = 126
_MAX_ARGV_BYTES = 32 * 1024
_SHOWN_CHARS = 500


@dataclass(frozen=True)
class Order:
    """What to start."""

    command: str
    cwd: str
    env: Mapping[str, str]
    pty: bool = False
    check_interval_s: float | None = None
    size: tuple[int, int] = (40, 120)
    argv: tuple[str, ...] | None = None
    """The program to start, instead of a shell with the command."""
    user: str | None = None

    def program(self, env: Mapping[str, str], stdin: int | None) -> Program:
        """The program that the host starts for it, in this environment and with this standard input."""
        script = self.command.encode("utf-8", "surrogateescape")
        literal = self.argv is not None or len(script) <= _MAX_ARGV_BYTES
        return Program(
            argv=self.argv or (("bash", "-c", self.command) if literal else ("bash", "/dev/fd/9")),
            env=env,
            given=self.env,
            user=self.user,
            cwd=self.cwd,
            stdin=stdin,
            script=None if literal else script + b"\n",
            terminal=self.size if self.pty else None,
        )

    def why_not_started(self, error: int, *, cwd: bool) -> tuple[int, bytes]:
        """The exit code and the message of one that could not be started, as from a shell; ``cwd``: because its
        directory could not be entered."""
        what = "bash" if self.argv is None else self.argv[0]
        text = f"{what}: {not_started(error, cwd=self.cwd if cwd else None)}\n"
        return 1 if cwd else CANNOT_START, text.encode()


class Background:
    """From its start to :meth:`close`. Nothing here waits."""

    def __init__(self, host: Host, name: str, order: Order, unread: Unread) -> None:
        self.name = name
        self.order = order
        self.output = Rolling(terminal=order.pty, unread=unread)
        self.changes = Changes(host.loop)
        self.exit_code: int | None = None
        self.failed = False
        """Whether it could not be started; its output has the reason."""
        self.lost = False
        self.polled_bytes = 0
        """Offset up to which its output was returned by ``poll``."""
        self.noticed_s = host.loop.time()
        """When its state was last reported."""
        self.end_told = False
        self._host = host
        self._began_s = host.loop.time()
        self._ended_s: float | None = None
        self._readers: list[Reader] = []
        self._input = -1
        self._start()
        # What is shown of the command is enough from here on: it may have been 8 MiB.
        if len(order.command) > _SHOWN_CHARS:
            self.order = replace(order, command=order.command[:_SHOWN_CHARS] + "…")

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.exit_code is None and not self.lost

    @property
    def begun(self) -> bool:
        """Whether it is known to be running, to have run, or to have failed to start."""
        return bool(self._readers) or not self.running

    def state(self) -> ProcessState:
        """Its current state."""
        ended_s = self._host.loop.time() if self._ended_s is None else self._ended_s
        return ProcessState(
            process=self.name,
            command=self.order.command,
            state="running" if self.running else "exited",
            exit_code=self.exit_code,
            pty=self.order.pty,
            runs_s=ended_s - self._began_s,
            total_bytes=self.output.total_bytes,
            dropped_bytes=self.output.dropped_bytes,
            unread_bytes=self.output.total_bytes - self.polled_bytes,
        )

    def write(self, data: bytes) -> int:
        """Write to its input; returns how many bytes it took (fewer when it does not read). Raises
        InvalidArgumentsError when its input is closed."""
        fd = self._readers[0].fd if self.order.pty and self._readers else self._input
        if fd < 0 or not self.running:
            raise InvalidArgumentsError(
                f"{self.name} takes no input: {'its input is closed' if self.running else 'it has ended'}"
            )
        try:
            return os.write(fd, data) if data else 0
        except BlockingIOError:
            return 0
        except OSError as error:
            raise InvalidArgumentsError(f"{self.name} takes no input: {os.strerror(error.errno or 0)}") from error

    def end_input(self) -> None:
        """Close its input: the reader gets end of file."""
        if self.order.pty:
            self.write(b"\x04")
        elif self._input >= 0:
            os.close(self._input)
            self._input = -1

    def kill(self) -> None:
        """Kill it and everything it started; it has ended a moment later."""
        self._started.kill()

    def signal(self, number: int) -> None:
        """Send a signal to its process group, which may handle it. No effect when it has ended."""
        self._started.signal(number)

    def close(self) -> None:
        """Release it and its output, whether it has ended or its slot will end it. Repeatable."""
        self._release()
        self.output.shed()
        self.changes.notify()

    def _start(self) -> None:
        order = self.order
        theirs = -1
        env = terminal_env(self._host.env) if order.pty else self._host.env
        if not order.pty:
            self._input, theirs = self._host.input()
            os.set_blocking(self._input, False)
        try:
            self._started = self._host.start(order.program(env, None if theirs < 0 else theirs), self)
        except UserUnsupportedError:
            self._release()
            raise
        except ValueError as error:
            self._release()
            raise InvalidArgumentsError(f"process: {error}") from error
        finally:
            if theirs >= 0:
                os.close(theirs)

    def _release(self) -> None:
        for reader in self._readers:
            reader.close()
        self._readers = []
        if self._input >= 0:
            os.close(self._input)
            self._input = -1

    def _came(self, chunk: bytes) -> None:
        if chunk:
            self.output.feed(chunk)
            self.changes.notify()

    def on_started(self, fds: tuple[int, ...]) -> None:
        """ProgramEvents."""
        self._readers = [Reader(self._host, fd, self._came, terminal=self.order.pty) for fd in fds]
        self.changes.notify()

    def on_failed(self, error: int, *, cwd: bool) -> None:
        """ProgramEvents: an ordinary result, as from a shell."""
        self.failed = True
        code, message = self.order.why_not_started(error, cwd=cwd)
        self.output.feed(message)
        self._end(code)

    def on_ended(self, exit_code: int) -> None:
        """ProgramEvents."""
        for reader in self._readers:
            reader.drain()
        self._end(exit_code)

    def on_lost(self) -> None:
        """ProgramEvents."""
        self.lost = True
        self.close()

    def _end(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self._ended_s = self._host.loop.time()
        self._release()
        self.output.end()
        self.changes.notify()
