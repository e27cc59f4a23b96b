"""The watch over an event loop: what held it, for how long, and nothing where nothing did."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from agentenv.sandbox.loop_watch import STALL_S, LoopWatch

pytestmark = pytest.mark.timeout(0)  # it would set the signal that the watch uses


@pytest.fixture
def watch() -> Iterator[LoopWatch]:
    with LoopWatch("test") as watch:
        yield watch


def run(watch: LoopWatch, *held_s: float) -> None:
    async def main() -> None:
        watch.begin()
        for each_s in held_s:
            await asyncio.sleep(0.01)
            hold(each_s)
        await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=watch.new_loop) as runner:
        runner.run(main())


def hold(for_s: float) -> None:
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        pass


def test_the_longest_turn_is_told_with_its_place(watch: LoopWatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run(watch, 0.12, 0.3, 0.0)
    told = watch.stalls()
    assert told.count >= 2
    assert told.longest_s >= 0.3
    assert told.recent_s == told.longest_s
    assert told.stack.rstrip().endswith(("while time.monotonic() < until_s:", "pass", "hold(each_s)")), told.stack
    assert "in hold" in told.stack
    assert re.search(r"held for \d+\.\d{3} s", caplog.text)


def test_only_what_users_notice_is_a_warning(watch: LoopWatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run(watch, 0.1, 1.6)
    held_s = {
        record.levelno >= logging.WARNING: float(re.findall(r"held for (\S+) s", record.getMessage())[0])
        for record in caplog.records
    }
    assert held_s[True] >= 1.0
    assert 0.1 <= held_s.get(False, 1.0) <= 1.0
    for record in caplog.records:  # whole stacks only with warnings
        assert (record.getMessage().count("\n") > 1) == (record.levelno >= logging.WARNING), record.getMessage()


def test_what_blocks_in_c_is_told_too(watch: LoopWatch) -> None:
    async def main() -> None:
        watch.begin()
        await asyncio.sleep(0.01)
        sorted(range(3_000_000), key=lambda number: -number)
        time.sleep(0.2)
        await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=watch.new_loop) as runner:
        runner.run(main())
    assert watch.stalls().longest_s > 0.2
    assert "in main" in watch.stalls().stack


@pytest.mark.parametrize("handles_signals", [False, True])
def test_waiting_is_no_stall_and_an_idle_loop_is_not_woken(watch: LoopWatch, *, handles_signals: bool) -> None:
    async def main() -> int:
        if handles_signals:  # then every signal wakes it, the timer's as well
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
        watch.begin()
        await asyncio.sleep(0.1)
        woken = looks
        await asyncio.sleep(1)
        return looks - woken

    looks = 0
    see = watch._look

    def counted(number: int, frame: object) -> None:
        nonlocal looks
        looks += 1
        see(number, None)

    signal.signal(signal.SIGALRM, counted)
    with asyncio.Runner(loop_factory=watch.new_loop) as runner:
        assert runner.run(main()) <= 2  # once behind each of the turns it had, not twenty times a second
    assert watch.stalls().longest_s < 0.5, "a second of waiting is not counted"


def test_the_signal_is_given_back(watch: LoopWatch) -> None:
    with LoopWatch("inner") as inner:
        run(inner, 2 * STALL_S)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == watch._look


def test_children_have_no_timer() -> None:
    """It is this process's own: nothing that is started here is ended by SIGALRM."""
    code = "import signal, time; print(signal.getitimer(signal.ITIMER_REAL)); time.sleep(0.2)"
    with LoopWatch("test") as watch:
        watch.arm(0.05)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "(0.0, 0.0)\n")


def test_a_check_within_a_check_tells_what_both_interrupted(watch: LoopWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """When little is missing, the timer fires again before the check has returned."""

    def fires_at_once(_which: int, _after_s: float) -> None:
        watch.turn_began_s = time.monotonic() - 1
        watch._look(signal.SIGALRM, sys._getframe(1))

    monkeypatch.setattr(signal, "setitimer", fires_at_once)
    watch.begin()
    watch._look(signal.SIGALRM, sys._getframe())
    watch.turn_ended(1.0, time.monotonic())
    assert watch.stalls().stack.rstrip().endswith("watch._look(signal.SIGALRM, sys._getframe())")
