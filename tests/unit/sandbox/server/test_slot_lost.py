"""How a lease ends in the sandbox server: what runs in a slot can bring it about, so it is no free new attempt."""

from __future__ import annotations

import asyncio
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from agentenv.agent.culprit import worth_another
from agentenv.deadlines import KILL_DEADLINE_S, SEAL_S
from agentenv.errors import AgentEnvError, LeaseLostError, SlotDestroyedError
from agentenv.sandbox.control_protocol import SlotReady
from agentenv.sandbox.limit_watch import MEMORY_ABOVE, PROCESSES_ABOVE, LimitFiles
from agentenv.sandbox.server.context import ServerContext
from agentenv.sandbox.server.slot import Slot
from agentenv.sandbox.server.slot_states import State
from agentenv.sandbox.slot_loss import LossReason
from agentenv.sandbox.supervisor.slot_lifecycle import _SEAL_PATIENCE_S
from agentenv.sandbox.supervisor.slot_process import HELLO_DEADLINE_S
from agentenv.wire.leases import LeaseRequest
from agentenv.wire.states import SlotState


def _leased(supervisor: Any) -> Slot:
    context = MagicMock(reply_memory=16, supervisor=supervisor)
    context.poller.loop = asyncio.get_running_loop()
    slot = Slot(0, cast("ServerContext", context))
    slot.state = State.free
    slot.grant(LeaseRequest(slot=0, trajectory="t", ttl_s=60, request_id="r" * 16))
    return slot


async def test_a_seal_that_takes_too_long_ends_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.sandbox.server.slot.SEAL_S", 0.01)
    supervisor = MagicMock()
    slot = _leased(supervisor)
    assert slot.lease is not None
    key = slot.lease.key
    with pytest.raises(LeaseLostError, match="not sealed within") as lost:
        await slot.seal(key)
    assert not worth_another(lost.value, acted=True)
    assert (slot.state, slot.reported) == (State.reset_due, SlotState.resetting)
    with pytest.raises(LeaseLostError, match="not sealed within"):
        slot.admit(key)
    supervisor.reset.assert_not_called()
    slot.ready(SlotReady(0, 0, None, kept=True, limits=LimitFiles()), {"": MagicMock()})
    supervisor.reset.assert_called_once_with(0, 0)  # made anew over the workspace after all: nobody has that now
    assert slot.state is State.resetting
    slot.close()


def test_a_seal_is_waited_for_longer_than_the_supervisor_takes() -> None:
    assert SEAL_S > KILL_DEADLINE_S + 5 + _SEAL_PATIENCE_S + 2 * HELLO_DEADLINE_S - 1


@pytest.mark.parametrize(
    ("above", "error"),
    [(MEMORY_ABOVE, LeaseLostError), (PROCESSES_ABOVE, SlotDestroyedError), ("", SlotDestroyedError)],
)
async def test_a_slot_is_not_lost_for_want_of_processes_above_it(above: str, error: type[AgentEnvError]) -> None:
    """A fork that was refused, perhaps a neighbour's, kills no agent: memory may."""
    slot = _leased(MagicMock())
    assert slot.lease is not None
    key = slot.lease.key
    runner = MagicMock()
    runner.io.limits.take_above.return_value = above
    slot.calls._runners, slot.calls.any_ran = {"": runner}, True
    slot.lost(LossReason.silent, "a killed call did not end")
    assert type(slot.why_lost(key)) is error
    slot.close()
