"""A bash of a slot on this terminal: passes keys, output and window sizes, and restores the terminal afterwards.

In the slot, ``script`` gives the bash a terminal and relays it over the pipes of a streamed program, byte for byte (the
tools' own PTYs normalise line ends for models, which breaks full-screen programs). It waits for no call of the slot,
and none waits for it.

The screen is written by the caller's thread, which also handles signals; everything else happens in the event loop of
the portal, which must not wait for a screen.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shlex
import signal
import termios
import tty
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Final

from agentenv.containers.programs import StreamedProgram, checked_order, start_program
from agentenv.containers.transfer import TransferLease
from agentenv.deadlines import scaled
from agentenv.errors import AgentEnvError

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

_PIECE_BYTES: Final = 64 * 1024
_RESIZE_S: Final = scaled(10.0)
_FALLBACK_TERM: Final = "xterm-256color"
_SHELL: Final = (
    f"tty >{{tty}}; {{size}}; infocmp >/dev/null 2>&1 || export TERM={_FALLBACK_TERM}; "
    r"exec env PS1='slot:\w\$ ' bash --norc -i"
)
_START: Final = (
    "type script stty >/dev/null || exit 1; script -qe -c {shell} /dev/null; code=$?; rm -f {tty}; exit $code"
)
_MODE: Final = re.compile(rb"\x1b\[\?([\d;]+)([hl])")
_LONGEST_MODE: Final = 32
_CURSOR_MODE: Final = 25
_LINE_MODES: Final = frozenset({7, _CURSOR_MODE})
"""Private modes that are on by default in a terminal: line wrap and a visible cursor."""


async def can_attach(lease: TransferLease) -> bool:
    """Whether the slot has ``script`` and ``stty``, as every Debian does."""
    order = checked_order(command="type script stty >/dev/null", input=False)
    async with await start_program(lease, order) as program:
        return await program.wait() == 0


def attach(portal: BlockingPortal, lease: TransferLease, keyboard: int, screen: int, user: str | None = None) -> int:
    """Run until the slot's bash ends, or this terminal goes away (129); return the bash's exit code, or 1 with the
    reason on the screen when there can be none.

    ``keyboard`` and ``screen`` are descriptors of a terminal, which is restored afterwards whatever happens. Call
    it in the main thread: it handles SIGWINCH. Raises: InfraError, and what signal handlers raise.
    """
    modes = Modes()
    bash = _Bash(lease, keyboard, user)
    with (
        _raw(keyboard, screen, modes),
        _on_resize(bash.resized_by_signal),
        portal.wrap_async_context_manager(bash.running()) as program,
    ):
        try:
            for stream in (program.stdout, program.stderr):  # the second has only why there is no bash
                while piece := portal.call(stream.read, _PIECE_BYTES):
                    modes.see(piece)
                    _show(screen, piece if stream is program.stdout else piece.replace(b"\n", b"\r\n"))
            return portal.call(program.wait)
        except OSError:  # of the screen
            return 128 + signal.SIGHUP
        except AgentEnvError:
            if bash.hung_up:
                return 128 + signal.SIGHUP
            raise


class _Bash:
    """The bash in the slot, with keys from this terminal. Its file there has a unique name."""

    def __init__(self, lease: TransferLease, keyboard: int, user: str | None) -> None:
        self.hung_up = False
        """Whether this terminal went away."""
        self._lease = lease
        self._keyboard = keyboard
        self._user = user
        self._tty = f"/tmp/.agentenv-tty-{secrets.token_hex(4)}"  # noqa: S108 - inside the slot
        self._resized = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[StreamedProgram]:
        """Start it; it ends with the block."""
        self._loop = asyncio.get_running_loop()
        order = checked_order(
            command=_START.format(tty=self._tty, shell=shlex.quote(_SHELL.format(tty=self._tty, size=self._size()))),
            env={"TERM": os.environ.get("TERM", _FALLBACK_TERM)},
            user=self._user,
        )
        async with await start_program(self._lease, order) as program:
            tasks = [asyncio.create_task(self._type(program)), asyncio.create_task(self._resize())]
            try:
                yield program
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def resized_by_signal(self) -> None:
        """Set the size of its terminal soon; the foreground program is notified. For a signal handler."""
        if self._loop is None:  # before it has begun
            self._resized.set()
        else:
            self._loop.call_soon_threadsafe(self._resized.set)

    async def _type(self, program: StreamedProgram) -> None:
        with contextlib.suppress(AgentEnvError, BrokenPipeError):  # its output says so, too
            while keys := await _typed(self._keyboard):
                await program.write(keys)
            self.hung_up = True
            await program.close()

    async def _resize(self) -> None:
        while await self._resized.wait():
            self._resized.clear()
            # The file is written by the bash's terminal itself, perhaps after this has begun.
            command = f'until [ -s {self._tty} ]; do sleep 0.05; done; exec <>"$(cat {self._tty})" && {self._size()}'
            order = checked_order(command=command, input=False, user=self._user, timeout_s=_RESIZE_S)
            with contextlib.suppress(AgentEnvError, OSError):  # then it keeps the size that it has
                async with await start_program(self._lease, order) as program:
                    await program.wait()

    def _size(self) -> str:
        size = os.get_terminal_size(self._keyboard)
        return f"stty rows {size.lines} cols {size.columns}"


class Modes:
    """Tracks the private modes (alternate screen, mouse, hidden cursor …) set by programs in a terminal. Pure."""

    def __init__(self) -> None:
        self._changed: dict[int, bool] = {}
        self._tail = b""

    def see(self, text: bytes) -> None:
        """Process text shown on the terminal; a sequence may be split in two."""
        text = self._tail + text
        for numbers, letter in _MODE.findall(text):
            for number in (int(each) for each in numbers.split(b";") if each):
                self._changed[number] = letter == b"h"
        self._tail = text[-_LONGEST_MODE:]

    def undo(self) -> bytes:
        """The text that restores a terminal."""
        wrong = [number for number, on in self._changed.items() if on != (number in _LINE_MODES)]
        parts = [f"\x1b[?{number}{'h' if number in _LINE_MODES else 'l'}" for number in wrong]
        return "".join(["\x1b[0m\x1b>", *parts]).encode()  # default colours and keypad


@contextlib.contextmanager
def _raw(keyboard: int, screen: int, modes: Modes) -> Iterator[None]:
    before = termios.tcgetattr(keyboard)
    try:
        tty.setraw(keyboard, termios.TCSADRAIN)
        yield
    finally:
        with contextlib.suppress(OSError, termios.error):  # the terminal itself may be gone
            _show(screen, modes.undo())
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _on_resize(resized: Callable[[], None]) -> Iterator[None]:
    former = signal.signal(signal.SIGWINCH, lambda *_: resized())
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, former)


async def _typed(keyboard: int) -> bytes:
    """Typed bytes; empty when the terminal hung up."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(keyboard, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(keyboard)
    try:
        return os.read(keyboard, _PIECE_BYTES)
    except OSError:
        return b""


def _show(screen: int, text: bytes) -> None:
    rest = memoryview(text)
    while rest:
        rest = rest[os.write(screen, rest) :]
