"""What sessions take of the memory of the server: a budget per slot while output is unread, nothing once closed."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentenv.sandbox.server.slot_sessions import SlotSessions
from agentenv.sessions.head_tail import Rolling, seam
from agentenv.sessions.output_window import OutputWindow
from agentenv.sessions.terminal import Terminal
from agentenv.sessions.unread import Unread
from agentenv.wire.sessions import ProcessArguments, TerminalArguments
from tests.unit.sessions.session_box import BoxSessions

MIB = 1024 * 1024
ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
PRINTS = "head -c 200000 /dev/zero | tr '\\0' x; head -c 200000 /dev/zero | tr '\\0' y >&2; sleep 600"


class _Kept:
    """A holder that keeps what it is told to."""

    def __init__(self, unread: Unread) -> None:
        self.unread = unread
        self.dropped_bytes = self.kept_bytes = 0

    def keep(self, count: int) -> None:
        self.kept_bytes += count
        self.unread.holds(self, self.kept_bytes)

    def shed(self) -> None:
        self.dropped_bytes += self.kept_bytes
        self.kept_bytes = 0
        self.unread.holds(self, 0)


def test_beyond_the_budget_the_oldest_is_dropped() -> None:
    unread = Unread(100)
    first, second, third = _Kept(unread), _Kept(unread), _Kept(unread)
    first.keep(60)
    second.keep(30)
    third.keep(20)
    assert (first.kept_bytes, first.dropped_bytes, second.kept_bytes, third.kept_bytes) == (0, 60, 30, 20)
    first.keep(50)
    assert unread.total_bytes == 100
    first.keep(1)  # what the second keeps is the oldest now
    assert (first.kept_bytes, second.kept_bytes, third.kept_bytes, unread.total_bytes) == (51, 0, 20, 71)
    second.keep(1_000)  # more than all of it: there is nothing else left to drop
    assert (unread.total_bytes, len(unread._held), second.dropped_bytes) == (0, 0, 1_030)


def test_a_log_that_was_dropped_counts_what_is_gone() -> None:
    rolling = Rolling(1_000, unread=Unread(500))
    rolling.feed(b"a" * 400)
    assert rolling.read(0, 1_000) == ("a" * 400, 0, 400, False)
    rolling.feed(b"b" * 200)
    assert (rolling.dropped_bytes, rolling.total_bytes) == (600, 600)
    rolling.feed(b"c" * 10)
    assert rolling.read(0, 1_000) == ("c" * 10, 600, 610, False)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed here is freed because nobody refers to it any more, not because a collector came by."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _reachable_budget(sessions: SlotSessions) -> Unread:
    found = sessions._terminals._unread
    assert isinstance(found, Unread)
    return found


async def _with_unread_output(workspace: Path, count: int) -> tuple[BoxSessions, Unread]:
    sessions = BoxSessions(workspace, ENV, MIB)
    loop = asyncio.get_running_loop()

    async def start(number: int) -> None:
        terminal: dict[str, Any] = {"session": f"s{number}", "command": PRINTS, "timeout_s": 0, "pty": number % 2 == 0}
        await sessions.call(TerminalArguments(**terminal), loop.time() + 60)
        process: dict[str, Any] = {"action": "start", "command": PRINTS, "pty": number % 2 == 0}
        await sessions.call(ProcessArguments(**process), loop.time() + 60)

    await asyncio.gather(*(start(number) for number in range(count)))
    unread = _reachable_budget(sessions)
    until_s = loop.time() + 60
    while unread.total_bytes < count * 500_000 and loop.time() < until_s:
        await asyncio.sleep(0.05)
    return sessions, unread


async def test_what_is_closed_leaves_nothing(tmp_path: Path, no_collector: None) -> None:
    """Round after round, as trajectories come and go: each freed with its slot, without a collector's help."""
    for turn in range(3):
        workspace = tmp_path / str(turn)
        workspace.mkdir()
        sessions, unread = await _with_unread_output(workspace, 4)
        assert unread.total_bytes >= 4 * 500_000
        kept = [
            weakref.ref(found)
            for found in gc.get_objects()
            if isinstance(found, (Terminal, OutputWindow, Rolling)) and found._unread is unread
        ]
        assert len(kept) >= 4 + 6 + 4
        sessions.close()
        assert (unread.total_bytes, len(unread._held)) == (0, 0)
        del sessions
        await asyncio.sleep(0.1)  # timers of a throttled reader
        assert [ref() for ref in kept if ref() is not None] == []
        del kept


async def test_a_slot_that_reads_nothing_keeps_to_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unread.__init__, "__defaults__", (MIB,))
    sessions, unread = await _with_unread_output(tmp_path, 0)
    loop = asyncio.get_running_loop()
    command = "head -c 400000 /dev/zero | tr '\\0' x"
    for number in range(6):
        named = {"session": f"s{number}", "command": command}
        await sessions.call(TerminalArguments(**{**named, "timeout_s": 0}), loop.time() + 60)
        until_s = loop.time() + 30
        terminal = sessions._terminals._terminals[f"s{number}"]
        while terminal.busy and await terminal.changes.until(until_s):
            assert unread.total_bytes <= MIB
    answers = []
    for number in range(6):
        more = TerminalArguments(session=f"s{number}", command="")
        answers.append((await sessions.call(more, loop.time() + 60)).fields)
    for fields in answers:
        dropped = fields.get("stdout_dropped_bytes", 0)
        missing = seam(dropped) if dropped else ""
        assert missing in fields.get("stdout", "")
        assert len(fields.get("stdout", "")) - len(missing) + dropped == 400_000
        assert fields["exit_code"] == 0
    assert answers[0]["truncated"]
    assert answers[0]["stdout"] == seam(400_000)
    assert len(answers[5]["stdout"]) == 400_000
    sessions.close()
