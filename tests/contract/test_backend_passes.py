"""Rights: what the control token opens, what a run's pass opens, and whose leases."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from agentenv.containers.control import ContainerControl
from agentenv.errors import PolicyRefusalError
from agentenv.sandbox.server.access import ROUTES, Who
from agentenv.wire.calls import Batch, CallKey, Cancel, Forget, Result, server_message
from agentenv.wire.leases import EndRequest, LeaseRequest, RenewRequest, SealSlot, Tags
from agentenv.wire.passes import make_pass
from agentenv.wire.server import ErrorReply
from agentenv.wire.states import SlotState
from tests.contract.conftest import Client
from tests.contract.thief import refused_everywhere
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUN, OTHER = "team.a/exp7", "team.b"
ADMITTED = {
    "nobody": {Who.anybody},
    "wrong": {Who.anybody},
    "forged": {Who.anybody},
    "run": {Who.anybody, Who.run},
    "other": {Who.anybody, Who.run},
    "control": set(Who),
}
"""Which routes each sender may use."""


def _bearers(token: str) -> dict[str, str | None]:
    return {
        "nobody": None,
        "wrong": "x" * 32,
        "forged": make_pass("x" * 32, RUN),
        "run": make_pass(token, RUN),
        "other": make_pass(token, OTHER),
        "control": token,
    }


@asynccontextmanager
async def _as_run(container: Client, run: str) -> AsyncIterator[Client]:
    """A client that has only the run's pass."""
    async with Client.open(dataclasses.replace(container.handle, token=make_pass(container.handle.token, run))) as one:
        yield one


@pytest.mark.parametrize("sender", ADMITTED)
async def test_each_route_admits_whom_the_table_names(container: Client, sender: str) -> None:
    bearer = _bearers(container.handle.token)[sender]
    headers = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        for route, who in ROUTES.items():
            method, path = route.split()
            url = container.handle.base_url + path.format(call="c", field="stdin", slot=0, checkpoint="0" * 32, layer=0)
            async with http.request(method, url, data=b"{") as reply:
                if who in ADMITTED[sender]:  # not read: a watch does not end
                    assert reply.status not in (401, 403), route
                    continue
                assert reply.status == (403 if sender in ("run", "other") else 401), route
                assert ErrorReply.model_validate_json(await reply.read()).error == "refused", route


async def test_a_run_uses_its_lease_with_its_pass_alone(container: Client) -> None:
    key = await container.lease(tags=Tags(run=RUN))
    async with _as_run(container, RUN) as run:
        assert (await run.run(key, "echo mine")).stdout == "mine\n"
        assert (await run.control.renew(RenewRequest(keys=(key,), ttl_s=60))).renewed == (0,)
        assert (await run.control.act(key, SealSlot())).state is SlotState.leased
        assert (await run.control.release(key)).state is SlotState.free


async def test_a_run_does_not_make_its_lease_last_longer_without_a_renewal(container: Client) -> None:
    """A day would keep the slot for as long after the run has died; who granted the lease has decided otherwise."""

    async def state() -> SlotState:
        return (await container.control.slots()).slots[0].state

    async def over() -> bool:
        return await state() is SlotState.free

    key = await container.lease(ttl_s=1.5, tags=Tags(run=RUN))
    async with _as_run(container, RUN) as run:
        await run.control.renew(RenewRequest(keys=(key,), ttl_s=86_400))
    await eventually(over)
    key = await container.lease(ttl_s=30, tags=Tags(run=RUN))
    await container.control.renew(RenewRequest(keys=(key,), ttl_s=60))
    assert await state() is SlotState.leased
    await container.control.release(key)


async def test_a_run_may_not_lease_nor_end_nor_look_around(container: Client) -> None:
    key = await container.lease(tags=Tags(run=RUN))
    async with _as_run(container, RUN) as run:
        with pytest.raises(PolicyRefusalError, match="a pass does not allow POST /v1/leases"):
            await run.control.lease(LeaseRequest(slot=1, trajectory="t", ttl_s=60, request_id="r" * 16))
        with pytest.raises(PolicyRefusalError, match="use the farm service"):
            await run.control.end(EndRequest(slot=0, epoch=key.epoch))
        with pytest.raises(PolicyRefusalError):
            await run.control.slots()
    assert [slot.state for slot in (await container.control.slots()).slots].count(SlotState.leased) == 1


@pytest.mark.parametrize("tags", [Tags(run=RUN), Tags()], ids=["another run's", "nobody's"])
async def test_a_leaked_key_is_of_no_use_to_another_run(container: Client, tags: Tags) -> None:
    key = await container.lease(tags=tags)
    async with _as_run(container, OTHER) as thief:
        await refused_everywhere(thief, key)
    assert (await container.run(key, "ls -A")).stdout == "", "nothing ran, and the lease is as it was"


async def test_a_leaked_call_can_be_neither_read_nor_cancelled_nor_forgotten(container: Client) -> None:
    key = await container.lease(tags=Tags(run=RUN))
    command = "until [ -e go ]; do sleep 0.05; done; echo answer"
    call = container.call(key, command, timeout_s=60)
    calls = (CallKey(id=call.id, lease=key),)
    running = asyncio.create_task(container.run(key, command, timeout_s=60, id=call.id))

    async def begun() -> bool:
        return (await container.control.slots()).slots[0].running_calls == 1

    await eventually(begun)
    async with _as_run(container, OTHER) as thief:
        asked = [result async for result in thief.results(call)]
        assert [(result.error, result.stdout) for result in asked] == [("protocol", "")], "as with a wrong secret"
        async with thief.session.ws_connect(thief.handle.base_url + "/v1/stream") as stream:
            await stream.send_str(Cancel(calls=calls).model_dump_json())
            await stream.send_str(Forget(calls=calls).model_dump_json())
            # Messages of one stream are processed in order: once this one is answered, so were those.
            await stream.send_str(Batch(calls=(call,)).model_dump_json())
            async with asyncio.timeout(30):
                while not isinstance(server_message.validate_json(await stream.receive_str()), Result):
                    pass
    await container.run(key, "touch go", tool="terminal")
    result = await running
    assert (result.cancelled, result.stdout) == (False, "answer\n")


async def test_a_pass_is_of_one_container(container: Client) -> None:
    other = dataclasses.replace(container.handle, token=make_pass("of another container", RUN))
    async with aiohttp.ClientSession() as http:
        with pytest.raises(PolicyRefusalError, match="missing or wrong"):
            await ContainerControl(other, http).info()
