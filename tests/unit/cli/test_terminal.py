"""The terminal of ``agentenv shell``: what it undoes, and what it is like when a slot has died."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import signal
import termios
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from agentenv.cli import terminal as terminal_module
from agentenv.cli.terminal import Modes, attach, can_attach
from agentenv.containers.transfer import TransferLease
from agentenv.errors import ConnectionLostError, LeaseLostError
from agentenv.wire.programs import ProgramOrder
from tests.waiting import DEADLINE_S

Start = Callable[["Program"], list[ProgramOrder]]
LEASE = cast("TransferLease", None)  # the programs of these tests have none


class Program:
    """A program that prints these pieces, and ends."""

    def __init__(self, *pieces: bytes, code: int = 0) -> None:
        self.stdout = SimpleNamespace(read=self._read)
        self.stderr = SimpleNamespace(read=self._end)
        self._pieces = list(pieces)
        self._code = code
        self.closed = asyncio.Event()

    async def _read(self, _: int) -> bytes:
        return self._pieces.pop(0) if self._pieces else await self._end(_)

    async def _end(self, _: int) -> bytes:
        return b""

    async def wait(self) -> int:
        return self._code

    async def close(self) -> None:
        self.closed.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@pytest.fixture
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as one:
        yield one


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Makes this program what is started in a slot, and returns what it is started with."""

    def use(program: Program) -> list[ProgramOrder]:
        orders: list[ProgramOrder] = []

        async def start(_: Any, order: ProgramOrder) -> Program:
            orders.append(order)
            return program

        monkeypatch.setattr(terminal_module, "start_program", start)
        return orders

    return use


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
        assert select.select([keys], [], [], DEADLINE_S)[0], found
        found += os.read(keys, 1000)
    return found


def test_programs_modes_are_undone_and_no_others() -> None:
    modes = Modes()
    modes.see(b"\x1b[?1049h\x1b[?25l text \x1b[?2004h\x1b[?1000;1006h")
    modes.see(b"\x1b[?2004l\x1b[?7")
    modes.see(b"l\x1b[31m")
    undone = modes.undo().decode()
    for back in ("[?1049l", "[?25h", "[?1000l", "[?1006l", "[?7h", "[0m"):
        assert f"\x1b{back}" in undone
    assert "2004" not in undone


def test_a_terminal_nobody_changed_is_not_switched() -> None:
    modes = Modes()
    modes.see(b"plain \x1b[1mtext\x1b[m \x1b[?1049h and back \x1b[?1049l\x1b[?25l\x1b[?25h")
    assert "?" not in modes.undo().decode()


def test_the_exit_code_comes_after_all_output(
    terminal: tuple[int, int], portal: BlockingPortal, started: Start
) -> None:
    keys, line = terminal
    orders = started(Program(b"one", b"\xfftwo", code=3))
    assert attach(portal, LEASE, line, line, "app") == 3
    assert shown(keys, b"two").startswith(b"one\xfftwo")
    assert [order.user for order in orders] == ["app"]


@pytest.mark.parametrize("pieces", [(b"\x1b[?1049h",), (b"\x1b[?10", b"49h")])
def test_a_dying_slot_leaves_the_terminal_in_order(
    pieces: tuple[bytes, ...], terminal: tuple[int, int], portal: BlockingPortal, started: Start
) -> None:
    keys, line = terminal
    before, handler = termios.tcgetattr(line), signal.getsignal(signal.SIGWINCH)
    seen: list[bool] = []

    class Dying(Program):
        async def _end(self, _: int) -> bytes:
            seen.append(termios.tcgetattr(line) != before)
            raise LeaseLostError("the container is gone")

    started(Dying(*pieces))
    with pytest.raises(LeaseLostError, match="gone"):
        attach(portal, LEASE, line, line)
    assert seen == [True]
    assert termios.tcgetattr(line) == before
    assert signal.getsignal(signal.SIGWINCH) is handler
    assert shown(keys, b"\x1b[?1049l")


def test_a_terminal_that_hangs_up_ends_it(portal: BlockingPortal, started: Start) -> None:
    keys, line = pty.openpty()

    class Left(Program):
        async def _end(self, _: int) -> bytes:
            os.close(keys)
            await self.closed.wait()
            raise ConnectionLostError("it was closed")

    started(Left())
    assert attach(portal, LEASE, line, line) == 128 + signal.SIGHUP
    os.close(line)


@pytest.mark.parametrize(("code", "possible"), [(0, True), (1, False)])
async def test_a_slot_without_script_has_lines_only(code: int, possible: bool, started: Start) -> None:
    started(Program(code=code))
    assert await can_attach(LEASE) is possible
