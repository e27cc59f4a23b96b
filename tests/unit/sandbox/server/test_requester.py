"""Whose leases the sender of a request can use: its run's, and all of them with the control token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast
from unittest.mock import MagicMock

import pytest

from agentenv.errors import AgentEnvError, LeaseLostError
from agentenv.sandbox.server.container import Container, Requester
from agentenv.sandbox.server.context import ServerContext
from agentenv.sandbox.server.slot_states import State
from agentenv.sandbox.slot_loss import LossReason
from agentenv.wire.leases import ActionRequest, LeaseKey, LeaseRequest, RenewRequest, SealSlot, Tags


def _leased(run: str) -> tuple[Container, LeaseKey]:
    """A container whose only slot is leased, and the key."""
    context = MagicMock(reply_memory=16, index={})
    context.poller.loop = asyncio.get_running_loop()
    context.supervisor.silent_s.return_value = 0.0
    container = Container(1, cast("ServerContext", context))
    container.slot(0).state = State.free
    request = LeaseRequest(slot=0, trajectory="t", ttl_s=60, request_id="r" * 16, tags=Tags(run=run))
    return container, container.slot(0).grant(request).key


@pytest.mark.parametrize(("run", "renews"), [("a", True), (None, True), ("b", False), ("", False)])
async def test_a_run_keeps_its_own_leases(run: str | None, renews: bool) -> None:
    container, key = _leased("a")
    reply = Requester(container, run).renew(RenewRequest(keys=(key,), ttl_s=60))
    assert (reply.renewed, reply.stale) == (((0,), ()) if renews else ((), (0,)))
    container.close()


@pytest.mark.parametrize(("renewing", "kept"), [("gone", {"b", "c"}), (None, {"c"})])
async def test_checkpoints_of_runs_that_are_gone_make_room(renewing: str | None, kept: set[str]) -> None:
    container, _ = _leased("a")
    for checkpoint, run in (("b", "gone"), ("c", "a")):
        container.checkpoints.made(checkpoint, run, asyncio.get_running_loop().time() - 1e6)
    Requester(container, renewing).renew(RenewRequest(keys=(), ttl_s=60))
    container.make_room()
    drop = cast("MagicMock", container.context.supervisor.drop)
    assert {"b", "c"} - {call.args[0] for call in drop.call_args_list} == kept
    container.close()


async def test_why_a_lease_was_lost_is_for_its_own_run() -> None:
    container, key = _leased("a")
    container.slot(0).lost(LossReason.ended, "its agent ended")
    wanted = RenewRequest(keys=(key,), ttl_s=60)
    assert [loss.error for loss in Requester(container, "a").renew(wanted).lost] == [LeaseLostError.code]
    assert Requester(container, None).renew(wanted).lost == Requester(container, "a").renew(wanted).lost
    assert Requester(container, "b").renew(wanted).lost == ()
    container.close()


async def _outcome(action: Awaitable[object]) -> str:
    try:
        return repr(await action)
    except AgentEnvError as error:
        return repr(error)


USES: dict[str, Callable[[Requester, LeaseKey], Awaitable[object]]] = {
    "release": lambda requester, key: requester.release(key),
    "seal": lambda requester, key: requester.act(ActionRequest(key=key, action=SealSlot(), request_id="s")),
    "uploads": lambda requester, key: asyncio.to_thread(requester.uploads, key, "c"),
    "in_flight": lambda requester, key: asyncio.to_thread(requester.in_flight, key, "c"),
    "io_and_env": lambda requester, key: asyncio.to_thread(requester.io_and_env, key),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("lost", [False, True], ids=["leased", "lost"])
async def test_another_runs_key_is_answered_as_one_with_a_wrong_secret(
    use: str, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentenv.sandbox.server.slot.RELEASE_S", 0.01)
    container, key = _leased("a")
    if lost:
        container.slot(0).lost(LossReason.ended, "its agent ended")
    forged = key.model_copy(update={"secret": "x" * 32})
    assert await _outcome(USES[use](Requester(container, "b"), key)) == await _outcome(
        USES[use](Requester(container, "a"), forged)
    )
    assert (container.slot(0).lease is None) is lost
    container.close()


@pytest.mark.parametrize("change", [{"slot": 99}, {"epoch": 99}])
async def test_a_key_of_nothing_is_stale_for_every_run(change: dict[str, int]) -> None:
    container, key = _leased("a")
    request = RenewRequest(keys=(key.model_copy(update=change),), ttl_s=60)
    for run in ("a", "b", None):
        reply = Requester(container, run).renew(request)
        assert (reply.renewed, reply.stale) == ((), (request.keys[0].slot,))
    container.close()
