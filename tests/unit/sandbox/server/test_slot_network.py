"""A slot whose network is changed: what is left when the supervisor's answer is late, or comes to nobody."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast
from unittest.mock import MagicMock

import pytest

from agentenv.errors import LeaseLostError, SandboxUnavailableError, SlotDestroyedError
from agentenv.sandbox.server import slot as module
from agentenv.sandbox.server.context import ServerContext
from agentenv.sandbox.server.leases import Lease
from agentenv.sandbox.server.slot import Slot
from agentenv.sandbox.server.slot_states import State
from agentenv.wire.leases import LeaseRequest
from agentenv.wire.network import NetworkPolicy
from agentenv.wire.roots import RootSpec

if TYPE_CHECKING:
    from agentenv.sandbox.server.poller import Poller
    from agentenv.sandbox.server.supervisor_link import SupervisorLink

POLICY = NetworkPolicy("allow", ("example.org",))
ASKED = LeaseRequest(slot=0, trajectory="t", ttl_s=30, request_id="r" * 16)


async def leased() -> tuple[Slot, Lease, list[tuple[object, ...]]]:
    """A slot of an image with a lease, under a supervisor that answers nothing; and the resets it was asked for."""
    resets: list[tuple[object, ...]] = []
    supervisor = SimpleNamespace(
        remember=lambda *_: None, connect=lambda *_: None, reset=lambda *asked: resets.append(asked)
    )
    poller = cast("Poller", MagicMock(loop=asyncio.get_running_loop()))
    slot = Slot(0, ServerContext(poller, cast("SupervisorLink", supervisor), {}, 1000, 10, spare_shells=False))
    slot.state = State.free
    lease = slot.grant(ASKED)
    lease.root = RootSpec("sha256:" + "0" * 64)
    slot.calls.any_ran = True
    return slot, lease, resets


async def test_a_change_that_takes_too_long_ends_the_lease_and_is_no_free_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SEAL_S", 0.05)
    slot, lease, resets = await leased()
    with pytest.raises(SlotDestroyedError, match="network was not changed"):
        await slot.connect(lease.key, POLICY)
    assert (slot.lease, slot.state, resets) == (None, State.resetting, [(0, 0)])
    slot.connected(0, {}, "")  # late: it changes nothing
    with pytest.raises(SlotDestroyedError):
        await slot.connect(lease.key, POLICY)


async def test_a_request_that_is_cancelled_leaves_its_answer_to_nobody() -> None:
    slot, lease, _ = await leased()
    first, second = (asyncio.create_task(slot.connect(lease.key, POLICY)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    slot.connected(0, {}, "of the first")
    assert not second.done()
    slot.connected(0, {}, "")
    await second


async def test_a_lease_ends_although_a_request_of_it_was_cancelled() -> None:
    slot, lease, resets = await leased()
    cancelled, waiting = (asyncio.create_task(slot.connect(lease.key, POLICY)) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    slot.failed(1, "it is not clean")
    with pytest.raises(LeaseLostError):
        await waiting
    assert slot.lease is None
    assert resets == []


async def test_a_restarted_server_knows_the_network() -> None:
    slot, lease, _ = await leased()
    kept = MagicMock()
    slot._context.supervisor.remember = kept  # type: ignore[method-assign]
    asked = asyncio.create_task(slot.connect(lease.key, POLICY))
    await asyncio.sleep(0)
    slot.connected(0, {}, "")
    await asked
    taken_over = Lease.from_memory(0, kept.call_args.args[2], 0.0)
    assert taken_over.root is not None
    assert taken_over.root.network == POLICY


async def test_a_network_that_cannot_be_had_is_told() -> None:
    slot, lease, _ = await leased()
    asked = asyncio.create_task(slot.connect(lease.key, POLICY))
    await asyncio.sleep(0)
    slot.connected(0, {}, "no proxy")
    with pytest.raises(SandboxUnavailableError, match="no proxy"):
        await asked
