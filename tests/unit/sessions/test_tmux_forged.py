"""What a slot writes in place of tmux costs the server little: lines by the portion, few questions, no big numbers."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentenv.errors import UnknownSessionError
from agentenv.sessions.tmux import _BURST, LINES_PER_TURN, WORK_PER_S, LineReader, Tmux, TmuxSetup
from agentenv.sessions.unread import Unread
from tests.unit.sessions.session_box import WAIT_S, BoxHost
from tests.waiting import DEADLINE_S, until

MIB = 1024 * 1024


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[BoxHost]:
    """Its tmux says and reads nothing."""
    programs, workspace = tmp_path / "bin", tmp_path / "workspace"
    programs.mkdir()
    workspace.mkdir()
    (programs / "tmux").write_text("#!/bin/sh\nexec sleep 600\n")
    (programs / "tmux").chmod(0o755)
    opened = BoxHost(workspace, {"PATH": f"{programs}:/usr/bin:/bin"})
    yield opened
    opened.close()


@pytest.fixture
async def tmux(host: BoxHost) -> AsyncIterator[Tmux]:
    made = Tmux(host, TmuxSetup("s", None, host.workspace, {}, 24, 80, record=True), Unread())
    await until(lambda: made._readers, WAIT_S)
    yield made
    made.close()


class Lines:
    """What a reader hands over."""

    def __init__(self, work: float) -> None:
        self.portions: list[bytes] = []
        self._work = work

    def take(self, portion: bytes) -> float:
        self.portions.append(portion)
        return self._work

    @property
    def all(self) -> bytes:
        return b"".join(self.portions)


async def test_lines_come_by_the_portion_and_all_of_them(host: BoxHost) -> None:
    ours, theirs = os.pipe()
    os.write(theirs, sent := b"".join(b"%d\n" % number for number in range(10_000)) + b"end")
    os.close(theirs)
    lines = Lines(0)
    reader = LineReader(host, ours, lines.take, most_bytes_per_s=MIB)
    turns = 0
    async with asyncio.timeout(60):
        while not lines.all.endswith(b"end"):
            before = len(lines.portions)
            await asyncio.sleep(0)
            assert len(lines.portions) <= before + 1, "a portion a turn"
            turns += 1
    assert lines.all == sent
    assert max(portion.count(b"\n") for portion in lines.portions) == LINES_PER_TURN
    assert turns >= 10_000 // LINES_PER_TURN
    reader.close()


async def test_nothing_is_read_while_there_is_too_much_work(host: BoxHost) -> None:
    """Counted, not timed: what was handed over is what the time since allowed."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    lines = Lines(LINES_PER_TURN)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    reader = LineReader(host, ours, lines.take, most_bytes_per_s=100 * MIB)
    for _ in range(200):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(theirs, b"\n" * 65_536)
        await asyncio.sleep(0.01)
    allowed = _BURST + (loop.time() - began_s) * WORK_PER_S
    done = len(lines.portions) * LINES_PER_TURN
    assert _BURST <= done <= allowed + LINES_PER_TURN
    assert len(reader._rest) <= 65_536
    reader.close()
    os.close(theirs)


async def test_at_the_end_so_much_is_taken_as_is_done_at_once(host: BoxHost) -> None:
    ours, theirs = os.pipe()
    lines = Lines(0)
    reader = LineReader(host, ours, lines.take, most_bytes_per_s=MIB)
    os.write(theirs, b"\n" * 65_000)
    reader.drain()
    assert 8 * LINES_PER_TURN <= lines.all.count(b"\n") <= 10 * LINES_PER_TURN
    reader.close()
    with pytest.raises(BrokenPipeError):  # nobody reads it any more
        os.write(theirs, b"more\n")
    os.close(theirs)


async def test_pauses_without_end_make_one_question(tmux: Tmux) -> None:
    for _ in range(3):
        for number in range(100):
            tmux._came(b"%%pause %%%d\n" % number * 256 + b"%pause %x\n%pause\n")
        assert len(tmux._asked) <= 1
        await asyncio.sleep(0.25)
    async with asyncio.timeout(20):
        while not tmux._asked:
            await asyncio.sleep(0.01)
    assert len(tmux._asked) == 1
    assert tmux.recorder._bytes < 1_000
    tmux._came(b"%begin 1 1 1\n%end 1 1 1\n%pause %0\n")  # answered: the next pause is heard
    async with asyncio.timeout(20):
        while not tmux._asked:
            await asyncio.sleep(0.01)


async def test_a_tmux_that_never_answers_is_given_up(tmux: Tmux, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.sessions.tmux._ANSWER_S", 2 * DEADLINE_S)
    asked = [asyncio.ensure_future(tmux.command("x" * 5_000)) for _ in range(600)]
    await asyncio.wait(asked, timeout=DEADLINE_S)  # less than one of them would wait for its answer
    assert {type(one.exception()) for one in asked if one.done()} == {UnknownSessionError}
    assert all(one.done() for one in asked)
    assert (tmux.alive, len(tmux._asked), tmux._socket.unsent_bytes) == (False, 0, 0)


async def test_an_answer_with_no_line_or_no_number_is_data(tmux: Tmux) -> None:
    async def answered(lines: bytes) -> None:
        async with asyncio.timeout(20):
            while not tmux._asked:
                await asyncio.sleep(0)
        tmux._came(b"%begin 1 1 1\n" + lines + b"%end 1 1 1\n")

    for lines in (b"", b"0\t\xc2\xb2\t-1\t" + b"9" * 6_000 + b"\n"):
        state, _ = await asyncio.gather(tmux.state(), answered(lines))
        assert (state.state, state.exit_code, state.history_lines) == ("running", None, 0)
        idle, _ = await asyncio.gather(tmux.idle(), answered(lines))
        assert idle is True


async def test_a_line_that_is_no_tmuxs_is_not_recorded(tmux: Tmux) -> None:
    tmux._came(b"%output %0 " + b"\\000" * 100_000 + b"\n%output %0 kept\n")
    taken = tmux.take_recording()
    assert "kept" in taken
    assert len(taken) < 1_000
