"""A slot's life in the supervisor: what may not stop the loop, and what a failed start leaves."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentenv.errors import AgentEnvError, SandboxUnavailableError
from agentenv.sandbox.slot_loss import LossReason
from agentenv.sandbox.supervisor import network, slot_lifecycle
from agentenv.sandbox.supervisor.plain_slot import PlainSlot
from agentenv.sandbox.supervisor.reaper import Reaper
from agentenv.sandbox.supervisor.slot_lifecycle import SlotLifecycle, SlotServices, is_shortage
from agentenv.sandbox.supervisor.slot_process import SlotProcess, SlotSetup
from agentenv.wire.states import SlotPhase


class Reports:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def ready(self, slot: SlotLifecycle) -> None:
        self.heard.append("ready")

    def failed(self, slot: SlotLifecycle) -> None:
        self.heard.append(f"failed: {slot.reason}")

    def not_frozen(self, slot: SlotLifecycle, reason: str, *, ended: bool = False) -> None:
        self.heard.append(f"not frozen: {reason}")

    def connected(self, slot: SlotLifecycle, env: dict[str, str], reason: str) -> None:
        self.heard.append(f"connected: {reason}")

    def refused(self, slot: SlotLifecycle, error: AgentEnvError) -> None:
        self.heard.append(f"refused: {error.message}")

    def lost(self, slot: SlotLifecycle, loss: LossReason, reason: str) -> None:
        self.heard.append(f"lost: {loss}")


def _life(reports: Reports) -> SlotLifecycle:
    setup = cast("SlotSetup", SimpleNamespace(plan=lambda _: None))
    return SlotLifecycle(SlotServices(setup, cast("Reaper", None), reports, asyncio.Semaphore(1), None), 0)


async def test_discarding_a_large_workspace_does_not_stop_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    waited: list[bool] = []
    monkeypatch.setattr(PlainSlot, "discard", lambda *_: waited.append(over.wait(20)))
    discarding = asyncio.create_task(_life(Reports())._discard())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    over.set()  # said by the loop while the kernel is at it
    await discarding
    assert waited == [True]


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EPERM])
async def test_a_workspace_that_does_not_go_is_never_taken_for_gone(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(PlainSlot, "discard", refuse)
    with pytest.raises(OSError, match=os.strerror(number)):
        await _life(Reports())._discard()


def test_a_shortage_is_told_from_a_failure() -> None:
    def said(words: str, cause: Exception | None = None) -> SandboxUnavailableError:
        error = SandboxUnavailableError(words)
        error.__cause__ = cause
        return error

    short: list[Exception] = [
        OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        TimeoutError(),
        said("bwrap: Creating new namespace failed: Resource temporarily unavailable"),
        said("the slot ended before its agent sent HELLO (killed by SIGKILL)"),
        said("the agent sent nothing for 10 s", TimeoutError()),
    ]
    broken: list[Exception] = [
        OSError(errno.EPERM, os.strerror(errno.EPERM)),
        said("bwrap: Unknown option --disable-userns"),
        said("the agent's first message was PONG 0"),
    ]
    assert [is_shortage(error) for error in short] == [True] * len(short)
    assert [is_shortage(error) for error in broken] == [False] * len(broken)


async def _started(life: SlotLifecycle, monkeypatch: pytest.MonkeyPatch, failures: list[Exception]) -> int:
    """Begin the slot; each start fails with the next of ``failures``, after the last it is let be. How many began."""
    began = 0
    never = asyncio.Event()

    async def prepare(_: object) -> None:
        return None

    async def start(*_: object) -> SlotProcess:
        nonlocal began
        began += 1
        if failures:
            raise failures.pop(0)
        await never.wait()
        raise AssertionError

    monkeypatch.setattr(PlainSlot, "start", start)
    monkeypatch.setattr(PlainSlot, "prepare", prepare)
    monkeypatch.setattr(PlainSlot, "discard", lambda *_: None)
    monkeypatch.setattr(slot_lifecycle, "_FIRST_PAUSE_S", 0.001)
    wanted = len(failures) + 1
    life.begin()
    async with asyncio.timeout(20):
        while began < wanted and life.phase is not SlotPhase.quarantined:
            await asyncio.sleep(0.001)
    return began


async def test_a_start_is_tried_for_as_long_as_something_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = Reports()
    life = _life(reports)
    failures: list[Exception] = [OSError(errno.EAGAIN, "no process") for _ in range(6)]
    assert await _started(life, monkeypatch, failures) == 7
    assert (life.phase, reports.heard) == (SlotPhase.starting, [])


async def test_a_start_that_fails_for_good_quarantines(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = Reports()
    failures: list[Exception] = [SandboxUnavailableError("bwrap: Unknown option") for _ in range(9)]
    assert await _started(_life(reports), monkeypatch, failures) == 3
    assert reports.heard == ["failed: could not be started: bwrap: Unknown option"]


async def test_a_mistake_of_ours_quarantines_instead_of_going_unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = Reports()
    assert await _started(_life(reports), monkeypatch, [ValueError("a mistake")]) == 1
    assert reports.heard == ["failed: internal error in the supervisor: ValueError('a mistake')"]


async def test_a_network_that_is_late_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = tmp_path / "pid"

    def tool(*_: object) -> None:
        told.write_text(str(os.getpid()))
        time.sleep(100)
        os._exit(0)

    monkeypatch.setattr(network, "closed_networks", lambda _: [])
    monkeypatch.setattr(network, "_close_routes", lambda *_: os._exit(0))
    monkeypatch.setattr(network, "_become_tool", tool)

    async def late(*_: Any) -> None:
        async with asyncio.timeout(20):
            while not told.exists() or not told.read_text():
                await asyncio.sleep(0.01)
        raise TimeoutError

    monkeypatch.setattr(network, "readable", late)
    reaper = Reaper(asyncio.get_running_loop())
    try:
        setup = cast("SlotSetup", SimpleNamespace(spec=None, tree=SimpleNamespace(jail=None)))
        with pytest.raises(TimeoutError):
            await network.attach(setup, cast("SlotProcess", SimpleNamespace(slot=0)), reaper, "tool")
        with pytest.raises(ProcessLookupError):
            os.kill(int(told.read_text()), 0)
    finally:
        reaper.close()
