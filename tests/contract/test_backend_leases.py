"""Leases as a container keeps them, and what it answers to those who have none."""

from __future__ import annotations

import asyncio
import time
from uuid import uuid4

import aiohttp
import pytest

from agentenv.containers.control import ContainerControl
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import AgentEnvError, StaleLeaseError
from agentenv.wire.base import PROTOCOL_VERSION
from agentenv.wire.leases import EndRequest, LeaseKey, LeaseRequest, RenewRequest, SealSlot, Tags
from agentenv.wire.server import ErrorReply, Health
from agentenv.wire.states import SlotState
from tests.contract.conftest import Client
from tests.waiting import DEADLINE_S, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def _states(container: Client) -> list[SlotState]:
    return [report.state for report in (await container.control.slots()).slots]


async def test_the_handshake_says_what_it_is(container: Client) -> None:
    info = await container.control.info()
    assert (info.container, info.protocol, info.slots) == (container.handle.id, PROTOCOL_VERSION, 3)
    assert info.isolation == "full" or info.weaker, "less than full isolation without a word"


async def test_health_needs_no_token_and_nothing_else_goes_without(container: Client) -> None:
    async with aiohttp.ClientSession() as stranger:
        async with stranger.get(container.handle.base_url + "/health") as reply:
            assert Health.model_validate_json(await reply.text()).status == "ok"
        paths = ("GET /v1/info", "GET /v1/slots", "POST /v1/leases", "POST /v1/leases/renew", "POST /v1/leases/release",
                 "POST /v1/leases/act", "POST /v1/leases/end", "POST /v1/batch", "GET /v1/stream")  # fmt: skip
        for method, path in (one.split() for one in paths):
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                url = container.handle.base_url + path
                async with stranger.request(method, url, headers=headers, data=b"{}") as reply:
                    assert reply.status == 401, path
                    ErrorReply.model_validate_json(await reply.text())


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"slot": -1}', b'{"slot": 0, "unknown": 1}', b"\xff\xfe"])
async def test_malformed_bodies_are_refused_and_harm_nothing(container: Client, body: bytes) -> None:
    for path in ("/v1/leases", "/v1/leases/renew", "/v1/leases/release", "/v1/leases/act", "/v1/batch"):
        async with container.session.post(container.handle.base_url + path, data=body) as reply:
            assert reply.status == 400, path
            ErrorReply.model_validate_json(await reply.text())
    assert await _states(container) == [SlotState.free] * 3


async def test_the_same_request_again_finds_the_same_lease(container: Client) -> None:
    request = LeaseRequest(slot=1, trajectory="t", ttl_s=60, request_id=uuid4().hex)
    grants = await asyncio.gather(*(container.control.lease(request) for _ in range(5)))
    assert {grant.key.secret for grant in grants} == {grants[0].key.secret}
    reports = (await container.control.slots()).slots
    assert [report.state for report in reports] == [SlotState.free, SlotState.leased, SlotState.free]
    assert reports[1].trajectory == "t"
    assert grants[0].key.secret not in repr(reports)


async def test_tags_of_a_lease_are_reported_while_it_lasts(container: Client) -> None:
    tags = Tags(run="exp7", environment="repair", kind="eval", group="g", item="1")
    key = await container.lease(slot=1, tags=tags)
    await container.lease(slot=2)
    assert [report.tags for report in (await container.control.slots()).slots] == [None, tags, Tags()]
    await container.control.release(key)
    assert (await container.control.slots()).slots[1].tags is None


async def test_a_slot_has_one_lease(container: Client) -> None:
    key = await container.lease(slot=0)
    with pytest.raises(AgentEnvError):
        await container.lease(slot=0)
    assert (await container.run(key, "echo mine")).stdout == "mine\n"


async def test_a_slot_that_does_not_exist_is_refused(container: Client) -> None:
    with pytest.raises(AgentEnvError):
        await container.lease(slot=99)
    assert await _states(container) == [SlotState.free] * 3


async def test_a_wrong_secret_opens_nothing(container: Client) -> None:
    key = await container.lease()
    forged = LeaseKey(slot=0, epoch=key.epoch, secret="x" * 32)
    result = await container.run(forged, "echo stolen")
    assert (result.fault, result.error, result.stdout) == ("infra", "stale_lease", "")
    with pytest.raises(StaleLeaseError):
        await container.control.act(forged, SealSlot())
    reply = await container.control.renew(RenewRequest(keys=(forged,), ttl_s=60))
    assert (reply.renewed, reply.stale) == ((), (0,))
    with pytest.raises(StaleLeaseError):
        await container.control.release(forged)
    assert (await container.run(key, "echo mine")).stdout == "mine\n"


async def test_release_gives_a_clean_slot_of_a_new_epoch(container: Client) -> None:
    key = await container.lease()
    await container.run(key, "echo secret > left; mkdir -p a/b; (sleep 300 &)")
    assert (await container.control.release(key)).state is SlotState.free
    again = await container.lease()
    assert again.epoch > key.epoch
    assert (await container.run(again, "ls -A")).stdout == ""
    assert (await container.run(key, "echo old")).error == "stale_lease"


async def test_releasing_twice_is_no_error_and_ends_no_other_lease(container: Client) -> None:
    key = await container.lease()
    await container.control.release(key)
    again = await container.lease()
    assert (await container.control.release(key)).slot == 0
    assert (await container.run(again, "echo mine")).stdout == "mine\n"


async def test_renewal_keeps_a_lease_and_silence_ends_it(container: Client) -> None:
    kept = await container.lease(0, ttl_s=15)
    assert (await container.control.renew(RenewRequest(keys=(kept,), ttl_s=60))).renewed == (0,)
    silent = await container.lease(1, ttl_s=1.5)
    await asyncio.sleep(15.2)
    assert (await container.run(silent, "echo")).error == "stale_lease"
    assert (await container.run(kept, "echo alive")).stdout == "alive\n"
    reply = await container.control.renew(RenewRequest(keys=(kept, silent), ttl_s=60))
    assert (reply.renewed, reply.stale) == ((0,), (1,))

    async def free() -> bool:
        return (await _states(container))[1] is SlotState.free

    await eventually(free)


async def test_an_operator_ends_a_lease_by_its_epoch_alone(container: Client) -> None:
    key = await container.lease(slot=1)
    await container.run(key, "touch kept")
    ended = await container.control.end(EndRequest(slot=1, epoch=key.epoch))
    assert (ended.slot, ended.state) == (1, SlotState.free)
    with pytest.raises(StaleLeaseError):
        await container.control.act(key, SealSlot())
    following = await container.lease(slot=1)
    assert (await container.run(following, "ls")).stdout == ""
    # Asked for the epoch that has ended, it does nothing to the next.
    await container.control.end(EndRequest(slot=1, epoch=key.epoch))
    assert (await container.run(following, "echo mine")).stdout == "mine\n"


async def test_a_container_says_when_it_was_last_heard_from(container: Client) -> None:
    await asyncio.sleep(0.2)
    before_s = (await container.control.slots()).heard_s
    asked_s = time.monotonic()
    await container.control.renew(RenewRequest(keys=(), ttl_s=30))
    after_s = (await container.control.slots()).heard_s
    assert before_s is not None
    assert after_s is not None
    assert before_s >= 0.2
    assert after_s <= time.monotonic() - asked_s


async def test_a_report_says_for_how_long_a_slot_is_in_its_state(container: Client) -> None:
    before = (await container.control.slots()).slots[0].in_state_s
    key = await container.lease(slot=0)
    leased = (await container.control.slots()).slots[0].in_state_s
    assert before is not None
    assert leased is not None
    await container.run(key, "sleep 0.3")
    later = (await container.control.slots()).slots[0].in_state_s
    assert later is not None
    assert later - leased > 0.25


async def test_the_end_of_a_lease_ends_its_running_calls(container: Client) -> None:
    key = await container.lease()
    running = asyncio.create_task(container.run(key, "sleep 300", timeout_s=400))

    async def started() -> bool:
        return (await container.control.slots()).slots[0].running_calls == 1

    await eventually(started)
    await container.control.release(key)
    result = await asyncio.wait_for(running, 30)
    assert result.fault == "infra"


async def test_seal_ends_processes_and_keeps_the_workspace(container: Client) -> None:
    key = await container.lease()
    await container.run(key, "echo kept > file; (while sleep 0.05; do date +%N > beat; done) > /dev/null 2>&1 &")

    async def beating() -> bool:
        return (await container.run(key, "test -s beat")).exit_code == 0

    await eventually(beating)
    assert (await container.control.act(key, SealSlot())).state is SlotState.leased
    before = (await container.run(key, "cat beat")).stdout
    await container.run(key, "sleep 0.3")
    assert (await container.run(key, "cat beat file")).stdout == before + "kept\n"


async def test_a_stranger_at_the_port_is_told_from_a_container(container: Client) -> None:
    """A handle that points to nowhere fails typed, within its deadline."""
    nowhere = ContainerHandle("gone", 0, "http://127.0.0.1:9", "x", 1)
    async with ContainerControl(nowhere) as control:
        began = asyncio.get_running_loop().time()
        with pytest.raises(AgentEnvError, match="gone"):
            await control.slots(timeout_s=0.3)
        assert asyncio.get_running_loop().time() - began < DEADLINE_S


async def test_a_seal_asked_for_again_seals_once(container: Client) -> None:
    key = await container.lease()
    asked = {"key": key.model_dump(), "action": {"do": "seal"}, "request_id": "q" * 16}

    async def seal() -> int:
        async with container.session.post(container.handle.base_url + "/v1/leases/act", json=asked) as response:
            return response.status

    assert await seal() == 200
    seconds = f"98{uuid4().int % 10**9}"
    await container.run(key, f"sleep {seconds} > /dev/null 2>&1 &")
    state = f"pgrep -f 'sleep [9]{seconds[1:]}' > /dev/null && echo alive || echo dead"

    async def alive() -> bool:
        return (await container.run(key, state)).stdout == "alive\n"

    await eventually(alive)
    assert await seal() == 200, "the answer was lost, and the client asks again: under a verifier that works already"
    assert await alive()
    await container.control.act(key, SealSlot())
    assert (await container.run(key, state)).stdout == "dead\n"


async def test_a_late_copy_of_a_lease_request_leases_to_nobody(container: Client) -> None:
    request = LeaseRequest(slot=0, trajectory="t", ttl_s=60.0, request_id=uuid4().hex)
    grant = await container.control.lease(request)
    assert (await container.control.release(grant.key)).state == "free"
    with pytest.raises(StaleLeaseError):
        await container.control.lease(request)
    assert (await container.control.slots()).slots[0].state == "free"
