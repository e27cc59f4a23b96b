"""Seals that fail: the supervisor's own slot and the server's own, with nothing but the processes left out."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from agentenv.errors import AgentEnvError, SandboxUnavailableError
from agentenv.sandbox.server import slot
from agentenv.sandbox.server.context import ServerContext
from agentenv.sandbox.server.poller import Poller
from agentenv.sandbox.server.slot import Slot
from agentenv.sandbox.server.slot_states import State
from agentenv.sandbox.server.supervisor_link import SupervisorLink
from agentenv.sandbox.slot_loss import LossReason
from agentenv.sandbox.supervisor.plain_slot import PlainSlot
from agentenv.sandbox.supervisor.slot_lifecycle import SlotLifecycle, SlotServices
from agentenv.wire.leases import LeaseRequest
from agentenv.wire.states import SlotPhase


class _Told:
    """What the supervisor says of a slot, straight to the server's."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def ready(self, slot: SlotLifecycle) -> None:
        raise AssertionError(f"{slot} was to fail")

    def failed(self, slot: SlotLifecycle) -> None:
        self._slot.failed(slot.epoch, slot.reason)

    def not_frozen(self, slot: SlotLifecycle, reason: str, *, ended: bool = False) -> None:
        raise AssertionError(f"{slot} was asked for no checkpoint: {reason}")

    def connected(self, slot: SlotLifecycle, env: dict[str, str], reason: str) -> None:
        raise AssertionError(f"{slot} was asked for no network: {env} {reason}")

    def refused(self, slot: SlotLifecycle, error: AgentEnvError) -> None:
        raise AssertionError(f"{slot} was asked for no root: {error}")

    def lost(self, _: SlotLifecycle, loss: LossReason, reason: str) -> None:
        self._slot.lost(loss, reason)


async def with_what_does_not_die() -> None:
    """Raises what the slot's holder is told."""

    async def kill() -> None:
        raise TimeoutError

    await _seal(kill)


async def with_what_takes_its_time() -> None:
    """Raises what the slot's holder is told when the seal is not done after a while."""

    async def kill() -> None:
        await asyncio.Event().wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot, "SEAL_S", 0.05)
        await _seal(kill)


async def with_a_full_slot() -> None:
    """Raises what the slot's holder is told when no process of a new agent has room in the slot's own memory limit."""

    async def kill() -> None:
        return None

    async def start(*_: object) -> None:
        raise SandboxUnavailableError("the agent's first message was nothing")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainSlot, "reopen", lambda *_: None)
        patch.setattr(PlainSlot, "start", start)
        limits = SimpleNamespace(begin=lambda: None, killed_by_own_limit=lambda: True)
        await _seal(kill, limits)


async def _seal(kill: Any, limits: Any = None) -> None:
    loop = asyncio.get_running_loop()
    supervisor = SimpleNamespace(remember=lambda *_: None, reset=lambda *_: None)
    poller = cast("Poller", MagicMock(loop=loop))
    slot = Slot(0, ServerContext(poller, cast("SupervisorLink", supervisor), {}, 1000, 10, spare_shells=False))
    slot.state = State.free
    lease = slot.grant(LeaseRequest(slot=0, trajectory="t", ttl_s=30, request_id="r" * 16))
    slot.calls.any_ran = True  # the model's commands ran here
    setup: Any = SimpleNamespace(plan=lambda _: None)
    life = SlotLifecycle(SlotServices(setup, cast("Any", None), _Told(slot), asyncio.Semaphore(1), None), 0)
    life.phase, life.process, life._limits = SlotPhase.ready, cast("Any", SimpleNamespace(kill=kill)), limits
    supervisor.seal = lambda *_: life.seal()
    try:
        await slot.seal(lease.key)
    finally:
        assert life._task is not None
        life._task.cancel()
        await asyncio.wait([life._task])
