"""What a slot uses, and its limits: :meth:`agentenv.sdk.slot_tools.SlotTools.metrics`."""

from __future__ import annotations

import asyncio
import os

import pytest

from agentenv.executor.session import ToolSession
from agentenv.sdk.tool_context import ToolContext
from agentenv.wire.slot_metrics import SlotMetrics
from agentenv.wire.spec import MIB, SlotLimits

pytestmark = pytest.mark.asyncio(loop_scope="module")
USE = "head -c 50M /dev/zero > large; for ((n = 0; n < 100000; n++)); do :; done; for n in 1 2 3; do sleep 4321 & done"


async def test_what_a_slot_uses_is_told(session: ToolSession, request: pytest.FixtureRequest) -> None:
    box, kind = ToolContext(session), request.node.callspec.params["executor"]
    before = await box.metrics()
    assert (await session.call("bash", {"command": USE})).exit_code == 0
    after = await box.metrics()
    if "fake" in kind:  # which has no limits
        assert before == after == SlotMetrics()
        return
    assert before.storage_bytes is not None
    assert before.storage_bytes + 50 * MIB <= (after.storage_bytes or 0) < before.storage_bytes + 60 * MIB
    room_mib = 512 if "image" in kind else 1024
    assert 0.9 * room_mib * MIB < (after.storage_limit_bytes or 0) <= room_mib * MIB
    if os.geteuid() != 0:  # the machine may have no cgroups for an ordinary user
        return
    assert before.memory_bytes is not None
    assert before.memory_bytes + 45 * MIB <= (after.memory_bytes or 0) < 500 * MIB
    assert (after.memory_peak_bytes or 2**50) >= 50 * MIB
    assert after.memory_limit_bytes == SlotLimits().memory_bytes
    if before.cpu_s is not None:  # with cgroup v1 the machine may count it in a hierarchy of its own
        assert (after.cpu_s or 0) > before.cpu_s + 0.01
    assert (after.processes_limit, before.processes is not None) == (SlotLimits().processes, True)
    assert 3 <= (after.processes or 0) < 50


async def test_it_is_told_while_a_call_runs(session: ToolSession) -> None:
    call = asyncio.create_task(session.call("bash", {"command": "echo begun > begun; sleep 4321"}, timeout_s=4321))
    try:
        while (await session.call("terminal", {"command": "cat begun"})).stdout != "begun\n":
            await asyncio.sleep(0.05)
        async with asyncio.timeout(60):
            await ToolContext(session).metrics()
        assert not call.done()
    finally:
        call.cancel()
