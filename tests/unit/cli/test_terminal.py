"""The terminal of ``agentenv shell``: what it undoes, how often it asks, and what it is like when a slot has died."""

from __future__ import annotations

import os
import pty
import select
import signal
import termios
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from agentenv.cli.terminal import Modes, attach, can_attach, pause_s
from agentenv.errors import InfraError, LeaseLostError
from agentenv.wire.calls import CallResult


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """(the side that types, the terminal)"""
    keys, line = pty.openpty()
    yield keys, line
    for fd in (keys, line):
        os.close(fd)


def shown(keys: int, text: bytes) -> bytes:
    """What the terminal shows, up to (and with) this text: a PTY may give it in parts."""
    found = b""
    while text not in found:
        assert select.select([keys], [], [], 20)[0], found
        found += os.read(keys, 1000)
    return found


def slot(poll: Callable[[], CallResult]) -> Callable[[str, Mapping[str, Any]], CallResult]:
    """A slot in which a process starts, takes input, and is polled."""

    def call(_: str, arguments: Mapping[str, Any]) -> CallResult:
        if arguments.get("action") == "poll":
            return poll()
        written = len(str(arguments.get("input", "")).encode())
        return CallResult(id="-", content={"process": {"process": "p1"}, "written_bytes": written})

    return call


def test_programs_modes_are_undone_and_no_others() -> None:
    modes = Modes()
    modes.see("\x1b[?1049h\x1b[?25l text \x1b[?2004h\x1b[?1000;1006h")
    modes.see("\x1b[?2004l\x1b[?7")
    modes.see("l\x1b[31m")
    undone = modes.undo()
    for back in ("[?1049l", "[?25h", "[?1000l", "[?1006l", "[?7h", "[0m"):
        assert f"\x1b{back}" in undone
    assert "2004" not in undone


def test_a_terminal_nobody_changed_is_not_switched() -> None:
    modes = Modes()
    modes.see("plain \x1b[1mtext\x1b[m \x1b[?1049h and back \x1b[?1049l\x1b[?25l\x1b[?25h")
    assert "?" not in modes.undo()


def test_output_is_asked_for_ever_less_often_when_nothing_happens() -> None:
    pauses = [pause_s(quiet_s) for quiet_s in (0.0, 1.0, 60.0)]
    assert pauses == sorted(set(pauses))
    assert pauses[0] <= 0.01
    assert pauses[-1] <= 0.1


def test_the_exit_code_comes_after_all_output(terminal: tuple[int, int]) -> None:
    keys, line = terminal
    rest = iter(["one", "two", ""])
    code = attach(slot(lambda: CallResult(id="-", stdout=next(rest), exit_code=3)), line, line)
    assert code == 3
    assert shown(keys, b"two").startswith(b"onetwo")


@pytest.mark.parametrize("how", ["raised", "told"])
def test_a_dying_slot_leaves_the_terminal_in_order(how: str, terminal: tuple[int, int]) -> None:
    keys, line = terminal
    before, handler = termios.tcgetattr(line), signal.getsignal(signal.SIGWINCH)
    seen: list[bool] = []

    def poll() -> CallResult:
        if not seen:
            seen.append(termios.tcgetattr(line) != before)
            return CallResult(id="-", stdout="\x1b[?1049h")
        if how == "raised":
            raise LeaseLostError("the container is gone")
        return CallResult(id="-", fault="model", error="unknown_session", message="no such process")

    with pytest.raises(InfraError, match=r"gone|has ended"):
        attach(slot(poll), line, line)
    assert seen == [True]
    assert termios.tcgetattr(line) == before
    assert signal.getsignal(signal.SIGWINCH) is handler
    assert shown(keys, b"\x1b[?1049l")


def test_a_terminal_that_hangs_up_ends_it() -> None:
    keys, line = pty.openpty()

    def poll() -> CallResult:
        nonlocal keys
        if keys >= 0:
            os.close(keys)
            keys = -1
        return CallResult(id="-")

    assert attach(slot(poll), line, line) == 128 + signal.SIGHUP
    os.close(line)


@pytest.mark.parametrize(("code", "possible"), [(0, True), (1, False)])
def test_a_slot_without_script_has_lines_only(code: int, possible: bool) -> None:
    assert can_attach(lambda *_: CallResult(id="-", exit_code=code)) is possible
