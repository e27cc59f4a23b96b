"""A slot that is lost while its container lives: whoever asks, at whatever time, is told the same culprit."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from agentenv.containers.control import ContainerControl
from agentenv.containers.handle import ContainerHandle
from agentenv.containers.programs import checked_order, start_program
from agentenv.errors import SlotDestroyedError
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.backends.fake import FakeBackend
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.calls import Batch, CallKey, Cancel, Forget, Result
from agentenv.wire.leases import RenewRequest, SealSlot
from agentenv.wire.states import SlotState
from tests.contract.conftest import Client, Maker, controlled, yard_of
from tests.contract.test_backend_calls import _next, _stream
from tests.waiting import until


async def destroy(backend: ContainerBackend, handle: ContainerHandle, slot: int) -> None:
    """End the slot's first process, as what runs in it could by some way we do not know."""
    if isinstance(backend, FakeBackend):
        await backend.destroy_slot(handle.id, slot)
        return
    async with ContainerControl(handle) as control:
        name = (await control.info()).container
    found = {int(pid.name): _parent(pid) for pid in Path("/proc").iterdir() if _is_agent(pid, f"/{name}/slot-{slot}\n")}
    agents = [pid for pid, parent in found.items() if parent not in found]  # its child looks like it until it executes
    assert len(agents) == 1, f"agents of slot {slot} of {name}: {found}"
    os.kill(agents[0], signal.SIGKILL)


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _is_agent(process: Path, cgroup: str) -> bool:
    if not process.name.isdigit():
        return False
    try:
        command = (process / "cmdline").read_bytes()
        return command.startswith(b"/run/agentenv/slotagent\0") and cgroup in (process / "cgroup").read_text()
    except OSError:
        return False


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's containers have cgroups to find a slot's agent by")
async def test_a_destroyed_slot_is_the_policy_s_doing_whoever_asks(make: Maker) -> None:
    pool, backend = await make.pool(slots=2)
    lease, other = await pool.lease("destroyer"), await pool.lease("other")
    async with Client.open(controlled(pool, lease)) as client:
        running = asyncio.create_task(client.run(lease.key, "echo begun > begun; sleep 1000", timeout_s=400))
        neighbour = asyncio.create_task(client.run(other.key, "sleep 1; echo alive"))
        await until(lambda: not running.done())
        while (await client.control.slots()).slots[lease.key.slot].running_calls < 1:
            await asyncio.sleep(0.01)
        await destroy(backend, lease.container, lease.key.slot)
        result = await asyncio.wait_for(running, 60)
        assert (result.fault, result.error) == ("policy", "slot_destroyed")
        late = await client.run(lease.key, "true")
        assert (late.fault, late.error) == ("policy", "slot_destroyed")
        async with _stream(client) as stream:  # everybody's: what is told of one slot does not end it
            unknown = CallKey(id="no-such-call", lease=lease.key)
            await stream.send_str(Forget(calls=(unknown,)).model_dump_json())
            await stream.send_str(Cancel(calls=(unknown,)).model_dump_json())
            await stream.send_str(Batch(calls=(client.call(other.key, "echo fine"),)).model_dump_json())
            await _next(stream)
            answer = await _next(stream)
            assert isinstance(answer, Result)
            assert answer.result.stdout == "fine\n"
        reply = await client.control.renew(RenewRequest(keys=(lease.key,), ttl_s=5))
        assert [(loss.slot, loss.error) for loss in reply.lost] == [(lease.key.slot, "slot_destroyed")]
        with pytest.raises(SlotDestroyedError):
            await client.control.act(lease.key, SealSlot())
        assert (await client.control.release(lease.key)).slot == lease.key.slot, "no error: its epoch has ended"
        assert (await neighbour).stdout == "alive\n"
    assert isinstance(await asyncio.wait_for(lease.wait_lost(), 60), SlotDestroyedError)
    assert lease.lost is not None
    assert lease.lost.fault == "policy"
    assert pool.statistics().faults["slot_destroyed"] == 1
    await other.release()
    await lease.release()
    await until(lambda: pool.statistics().slots.get(SlotState.free, 0) == 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's containers have cgroups to find a slot's agent by")
async def test_a_session_whose_slot_was_destroyed_says_so(make: Maker) -> None:
    pool, backend = await make.pool(slots=1)
    async with ToolExecutor(pool, ToolCatalog.builtin()) as executor, executor.open("destroyer") as session:
        await session.call("bash", {"command": "true"})
        running = asyncio.create_task(session.call("bash", {"command": "sleep 1000"}, timeout_s=100))
        await asyncio.sleep(0)
        name = session.lease.container.id
        async with Client.open(yard_of(pool).links[name].handle) as client:
            while (await client.control.slots()).slots[0].running_calls < 1:
                await asyncio.sleep(0.01)
        await destroy(backend, session.lease.container, session.lease.key.slot)
        with pytest.raises(SlotDestroyedError):
            await asyncio.wait_for(running, 60)
        with pytest.raises(SlotDestroyedError):
            await session.call("bash", {"command": "true"})
        with pytest.raises(SlotDestroyedError):
            await session.seal()
        assert (executor.tally.infra_faults, executor.tally.policy_faults) == (0, 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's containers have cgroups to find a slot's agent by")
async def test_a_streamed_program_whose_slot_was_destroyed_says_so(make: Maker) -> None:
    pool, backend = await make.pool(slots=1)
    async with ToolExecutor(pool, ToolCatalog.builtin()) as executor, executor.open("destroyer") as session:
        # Nothing else has run in the slot: a streamed program is the policy's doing as much as a call.
        order = checked_order(command="echo begun; sleep 1000")
        async with asyncio.timeout(100), await start_program(session.lease, order) as program:
            assert await program.stdout.readline() == b"begun\n"
            await destroy(backend, session.lease.container, session.lease.key.slot)
            with suppress(SlotDestroyedError):  # its pipes have ended, perhaps before that is known
                assert not await program.stdout.read()
            with pytest.raises(SlotDestroyedError):
                await program.wait()
