"""The fence: a container obeys the farm of the latest generation, and no other."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from uuid import uuid4

import pytest

from agentenv.containers.control import ContainerControl
from agentenv.errors import FencedError, StaleLeaseError
from agentenv.wire.leases import EndRequest, LeaseKey, LeaseRequest, RenewRequest, SealSlot, Tags
from agentenv.wire.passes import make_pass
from agentenv.wire.server import ErrorReply
from agentenv.wire.states import SlotState
from agentenv.wire.watch import GENERATION_HEADER
from tests.contract.conftest import Client

pytestmark = pytest.mark.asyncio(loop_scope="module")

_generations = itertools.count(10, 10)
"""The module's tests share a container, which never forgets a generation."""

CHANGES: dict[str, Callable[[ContainerControl, LeaseKey], Awaitable[object]]] = {
    "lease": lambda control, _: control.lease(_request(slot=1)),
    "renew": lambda control, key: control.renew(RenewRequest(keys=(key,), ttl_s=60)),
    "heartbeat": lambda control, _: control.renew(RenewRequest(keys=(), ttl_s=60)),
    "seal": lambda control, key: control.act(key, SealSlot()),
    "end": lambda control, key: control.end(EndRequest(slot=key.slot, epoch=key.epoch)),
    "release": lambda control, key: control.release(key),
}
"""What changes leases."""


def _request(slot: int, run: str = "") -> LeaseRequest:
    return LeaseRequest(slot=slot, trajectory="t", ttl_s=60, request_id=uuid4().hex, tags=Tags(run=run))


def _farm(container: Client, generation: int | None, *, guest: bool = False) -> ContainerControl:
    return ContainerControl(container.handle, container.session, generation=generation, guest=guest)


@pytest.mark.parametrize("change", CHANGES)
async def test_an_earlier_farm_and_one_without_a_generation_change_nothing(container: Client, change: str) -> None:
    generation = next(_generations)
    key = (await _farm(container, generation).lease(_request(slot=0))).key
    for control, told in ((_farm(container, generation - 1), "not this one of"), (_farm(container, None), "farm_url")):
        with pytest.raises(FencedError, match=told):
            await CHANGES[change](control, key)
    slots = (await container.control.slots()).slots
    assert [slot.state for slot in slots] == [SlotState.leased, SlotState.free, SlotState.free]
    assert (await container.run(key, "echo mine")).stdout == "mine\n"
    await CHANGES[change](_farm(container, generation), key)


@pytest.mark.parametrize("change", CHANGES)
async def test_a_later_farm_takes_over_whatever_it_asks_first(container: Client, change: str) -> None:
    generation = next(_generations)
    key = (await _farm(container, generation).lease(_request(slot=0))).key
    await CHANGES[change](_farm(container, generation + 1), key)
    with pytest.raises(FencedError):
        await _farm(container, generation).renew(RenewRequest(keys=(), ttl_s=60))


@pytest.mark.parametrize("change", CHANGES)
async def test_a_guest_leases_beside_the_farm(container: Client, change: str) -> None:
    generation = next(_generations)
    key = (await _farm(container, generation).lease(_request(slot=0))).key
    await CHANGES[change](_farm(container, None, guest=True), key)
    await _farm(container, generation).renew(RenewRequest(keys=(), ttl_s=60))


async def test_a_pass_is_never_fenced_and_fences_nobody(container: Client) -> None:
    generation = next(_generations)
    key = (await _farm(container, generation).lease(_request(slot=0, run="a"))).key
    headers = {"Authorization": f"Bearer {make_pass(container.handle.token, 'a')}"}
    for named in ({}, {GENERATION_HEADER: "0"}, {GENERATION_HEADER: str(generation + 1)}):
        body = RenewRequest(keys=(key,), ttl_s=60).model_dump_json()
        url = container.handle.base_url + "/v1/leases/renew"
        async with container.session.post(url, data=body, headers={**headers, **named}) as reply:
            assert reply.status == 200, await reply.text()
    await _farm(container, generation).release(key)


async def test_whoever_only_looks_is_not_fenced(container: Client) -> None:
    await _farm(container, next(_generations)).renew(RenewRequest(keys=(), ttl_s=60))
    for control in (_farm(container, None), _farm(container, 0)):
        assert len((await control.slots()).slots) == 3
        assert (await control.info()).slots == 3


async def test_a_refusal_comes_before_the_lease_is_looked_at(container: Client) -> None:
    generation = next(_generations)
    await _farm(container, generation).renew(RenewRequest(keys=(), ttl_s=60))
    unknown = LeaseKey(slot=0, epoch=10_000, secret="x" * 32)
    with pytest.raises(FencedError):
        await _farm(container, None).release(unknown)
    with pytest.raises(StaleLeaseError):
        await _farm(container, generation).release(unknown)


@pytest.mark.parametrize("header", ["", "-1", "x", "1.5", "9" * 40])
async def test_a_malformed_generation_is_refused(container: Client, header: str) -> None:
    url = container.handle.base_url + "/v1/leases/renew"
    body = RenewRequest(keys=(), ttl_s=60).model_dump_json()
    async with container.session.post(url, data=body, headers={GENERATION_HEADER: header}) as reply:
        assert reply.status == 400
        assert ErrorReply.model_validate_json(await reply.read()).error == "protocol"
