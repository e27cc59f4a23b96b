"""A bash of a slot on this terminal: passes keys, output and window sizes, and restores the terminal afterwards.

In the slot, ``script`` gives the bash a terminal and relays it over pipes of a background process, byte for byte
(the tools' own PTYs normalise line ends for models, which breaks full-screen programs). There is no stream: output
is polled, often while there is activity and rarely otherwise.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import secrets
import select
import shlex
import signal
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from agentenv.errors import InfraError
from agentenv.wire.calls import CallResult

Call = Callable[[str, Mapping[str, Any]], CallResult]
"""A function that makes one call of a tool in the slot. Raises InfraError."""

MOST_BYTES: Final = 200_000
"""Output requested at once: everything that is kept of a background process."""
PIECE_BYTES: Final = 4_096
"""Typed (or pasted) bytes sent in one call: output is shown between calls."""
_PAUSES: Final = ((0.5, 0.005), (10.0, 0.02))
"""Polling intervals: (quiet for less than this, poll again after this)."""
_IDLE_PAUSE_S: Final = 0.06
_FALLBACK_TERM: Final = "xterm-256color"
_MODE: Final = re.compile(r"\x1b\[\?([\d;]+)([hl])")
_LONGEST_MODE: Final = 32
_CURSOR_MODE: Final = 25
_LINE_MODES: Final = frozenset({7, _CURSOR_MODE})
"""Private modes that are on by default in a terminal: line wrap and a visible cursor."""
_BELL: Final = "\a"


def can_attach(call: Call) -> bool:
    """Whether the slot has ``script`` and ``stty``, as every Debian does."""
    return call("bash", {"command": "type script stty"}).exit_code == 0


def attach(call: Call, keyboard: int, screen: int) -> int:
    """Run until the slot's bash ends, or this terminal goes away (129); return the bash's exit code.

    ``keyboard`` and ``screen`` are descriptors of a terminal, which is restored afterwards whatever happens. Call
    it in the main thread: it handles SIGWINCH. Raises: InfraError, and what signal handlers raise.
    """
    remote = Remote(call, os.get_terminal_size(keyboard))
    modes = Modes()
    with _raw(keyboard, screen, modes), _resized() as resized:
        shown_s = time.monotonic()
        while True:
            if resized and resized.pop():
                resized.clear()
                remote.resize(os.get_terminal_size(keyboard))
            typed = _typed(keyboard, pause_s(time.monotonic() - shown_s))
            if typed == b"":
                return 128 + signal.SIGHUP
            beep = typed is not None and not remote.type(typed)
            text, code = remote.more()
            modes.see(text)
            _show(screen, text + _BELL * beep)
            if code is not None and not text:
                return code
            if text or typed:
                shown_s = time.monotonic()


def pause_s(quiet_s: float) -> float:
    """How long to wait for a key before output is polled again, when nothing has happened for this long."""
    return next((pause for bound_s, pause in _PAUSES if quiet_s < bound_s), _IDLE_PAUSE_S)


class Remote:
    """The bash in the slot. Its files there have a unique name."""

    def __init__(self, call: Call, size: os.terminal_size) -> None:
        self._call = call
        self._tty = f"/tmp/.agentenv-tty-{secrets.token_hex(4)}"  # noqa: S108 - inside the slot, whose /tmp is its own
        self._keys = codecs.getincrementaldecoder("utf-8")("replace")
        shell = (
            f"tty >{self._tty}; {_sized(size)}; infocmp >/dev/null 2>&1 || export TERM={_FALLBACK_TERM}; "
            r"exec env PS1='slot:\w\$ ' bash --norc -i"
        )
        started = self._process(
            action="start",
            command=f"exec script -qe -c {shlex.quote(shell)} /dev/null",
            env={"TERM": os.environ.get("TERM", _FALLBACK_TERM)},
        )
        self._name = str(_content(started)["process"]["process"])

    def type(self, keys: bytes) -> bool:
        """Send these bytes; False when it does not take all of them."""
        text = self._keys.decode(keys)
        if not text:
            return True  # the rest of a character is still to come
        result = self._call("process", {"action": "write", "process": self._name, "input": text})
        return result.fault == "none" and _content(result).get("written_bytes") == len(text.encode())

    def more(self) -> tuple[str, int | None]:
        """New output since the last poll, and its exit code once it has ended."""
        result = self._process(action="poll", process=self._name, limit=MOST_BYTES)
        return result.stdout, result.exit_code

    def resize(self, size: os.terminal_size) -> None:
        """Set the size of its terminal; the foreground program is notified."""
        self._call("bash", {"command": f'exec <>"$(cat {self._tty})" && {_sized(size)}'})

    def _process(self, **arguments: Any) -> CallResult:
        result = self._call("process", arguments)
        if result.fault != "none":
            raise InfraError(f"the shell in the slot has ended: {result.message}")
        return result


def _sized(size: os.terminal_size) -> str:
    return f"stty rows {size.lines} cols {size.columns}"


def _content(result: CallResult) -> dict[str, Any]:
    return result.content if isinstance(result.content, dict) else {}


class Modes:
    """Tracks the private modes (alternate screen, mouse, hidden cursor …) set by programs in a terminal. Pure."""

    def __init__(self) -> None:
        self._changed: dict[int, bool] = {}
        self._tail = ""

    def see(self, text: str) -> None:
        """Process text shown on the terminal; a sequence may be split in two."""
        text = self._tail + text
        for numbers, letter in _MODE.findall(text):
            for number in (int(each) for each in numbers.split(";") if each):
                self._changed[number] = letter == "h"
        self._tail = text[-_LONGEST_MODE:]

    def undo(self) -> str:
        """The text that restores a terminal."""
        wrong = [number for number, on in self._changed.items() if on != (number in _LINE_MODES)]
        parts = [f"\x1b[?{number}{'h' if number in _LINE_MODES else 'l'}" for number in wrong]
        return "".join(["\x1b[0m\x1b>", *parts])  # default colours and keypad


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
def _resized() -> Iterator[list[bool]]:
    """A list that is not empty once the window's size has changed."""
    changed: list[bool] = []
    former = signal.signal(signal.SIGWINCH, lambda *_: changed.append(True))
    try:
        yield changed
    finally:
        signal.signal(signal.SIGWINCH, former)


def _typed(keyboard: int, wait_s: float) -> bytes | None:
    """Typed bytes; None if none came in time, empty when the terminal hung up."""
    ready, _, _ = select.select([keyboard], [], [], wait_s)
    if not ready:
        return None
    try:
        return os.read(keyboard, PIECE_BYTES)
    except OSError:
        return b""


def _show(screen: int, text: str) -> None:
    rest = text.encode("utf-8", "surrogateescape")
    while rest:
        rest = rest[os.write(screen, rest) :]
