"""A bash in a slot on this terminal: keys go there, bytes come back, sizes follow, and the terminal is put in order.

In the slot, ``script`` gives the bash a terminal and relays it over pipes of a background process, byte for byte
(the tools' own PTYs make line ends plain for models, which full-screen programs do not survive). There is no
stream: output is asked for, often while something happens and rarely while nothing does.
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
"""One call of a tool in the slot. Raises InfraError."""

MOST_BYTES: Final = 200_000
"""Of output asked for at once: all that is kept of a background process."""
PIECE_BYTES: Final = 4_096
"""Of what is typed (or pasted) in one call: output is shown between pieces."""
_PAUSES: Final = ((0.5, 0.005), (10.0, 0.02))
"""Quiet for less than so long: ask again after so long."""
_IDLE_PAUSE_S: Final = 0.06
_FALLBACK_TERM: Final = "xterm-256color"
_MODE: Final = re.compile(r"\x1b\[\?([\d;]+)([hl])")
_LONGEST_MODE: Final = 32
_CURSOR_MODE: Final = 25
_LINE_MODES: Final = frozenset({7, _CURSOR_MODE})
"""Private modes that are on in a terminal nobody has changed: it wraps lines, and shows its cursor."""
_BELL: Final = "\a"


def can_attach(call: Call) -> bool:
    """Whether the slot has what it takes: ``script`` and ``stty``, which every Debian has."""
    return call("bash", {"command": "type script stty"}).exit_code == 0


def attach(call: Call, keyboard: int, screen: int) -> int:
    """Until the slot's bash ends, or this terminal goes away (129); the bash's exit code.

    ``keyboard`` and ``screen`` are descriptors of a terminal, which is as it was afterwards whatever happened.
    Call it in the main thread: it listens to SIGWINCH. Raises: InfraError, and what signal handlers raise.
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
    """How long to wait for a key before output is asked for again, when nothing has happened for so long."""
    return next((pause for bound_s, pause in _PAUSES if quiet_s < bound_s), _IDLE_PAUSE_S)


class Remote:
    """The bash in the slot. Its files there are of one name nobody else uses."""

    def __init__(self, call: Call, size: os.terminal_size) -> None:
        self._call = call
        self._tty = f"/tmp/.agentenv-tty-{secrets.token_hex(4)}"  # noqa: S108 - inside the slot, whose /tmp is its own
        self._keys = codecs.getincrementaldecoder("utf-8")("replace")
        shell = (
            f"tty >{self._tty}; {_sized(size)}; infocmp >/dev/null 2>&1 || export TERM={_FALLBACK_TERM}; "
            r"exec env PS1='slot:\w\$ ' bash --norc -i"
        )
        started = self._asked(
            action="start",
            command=f"exec script -qe -c {shlex.quote(shell)} /dev/null",
            env={"TERM": os.environ.get("TERM", _FALLBACK_TERM)},
        )
        self._name = str(_content(started)["process"]["process"])

    def type(self, keys: bytes) -> bool:
        """Give it these; False when it does not take them all."""
        text = self._keys.decode(keys)
        if not text:
            return True  # the rest of a character is still to come
        result = self._call("process", {"action": "write", "process": self._name, "input": text})
        return result.fault == "none" and _content(result).get("written_bytes") == len(text.encode())

    def more(self) -> tuple[str, int | None]:
        """What it has shown since the last time, and its exit code once it has ended."""
        result = self._asked(action="poll", process=self._name, limit=MOST_BYTES)
        return result.stdout, result.exit_code

    def resize(self, size: os.terminal_size) -> None:
        """Its terminal is of this size now; the program in front of it is told."""
        self._call("bash", {"command": f'exec <>"$(cat {self._tty})" && {_sized(size)}'})

    def _asked(self, **arguments: Any) -> CallResult:
        result = self._call("process", arguments)
        if result.fault != "none":
            raise InfraError(f"the shell in the slot has ended: {result.message}")
        return result


def _sized(size: os.terminal_size) -> str:
    return f"stty rows {size.lines} cols {size.columns}"


def _content(result: CallResult) -> dict[str, Any]:
    return result.content if isinstance(result.content, dict) else {}


class Modes:
    """Which private modes (the other screen, mouse, no cursor …) programs have set in a terminal. Pure."""

    def __init__(self) -> None:
        self._changed: dict[int, bool] = {}
        self._tail = ""

    def see(self, text: str) -> None:
        """Text a terminal shows; a sequence may be in two parts."""
        text = self._tail + text
        for numbers, letter in _MODE.findall(text):
            for number in (int(each) for each in numbers.split(";") if each):
                self._changed[number] = letter == "h"
        self._tail = text[-_LONGEST_MODE:]

    def undo(self) -> str:
        """What puts a terminal in order again."""
        wrong = [number for number, on in self._changed.items() if on != (number in _LINE_MODES)]
        parts = [f"\x1b[?{number}{'h' if number in _LINE_MODES else 'l'}" for number in wrong]
        return "".join(["\x1b[0m\x1b>", *parts])  # plain colours, plain keypad


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
    """A list that is not empty when the window's size has changed."""
    changed: list[bool] = []
    former = signal.signal(signal.SIGWINCH, lambda *_: changed.append(True))
    try:
        yield changed
    finally:
        signal.signal(signal.SIGWINCH, former)


def _typed(keyboard: int, wait_s: float) -> bytes | None:
    """Keys; None when none came in time, empty when the terminal hung up."""
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
