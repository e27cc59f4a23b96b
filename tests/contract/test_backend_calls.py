"""Calls on the wire: order, streaming, reply memory, the boot rule, cancelling."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest

from agentenv.wire.calls import Accepted, Batch, CallKey, Cancel, Failure, Forget, Result, server_message
from tests.contract.conftest import Client
from tests.contract.executor.farm import UNTIL_GO
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


@contextlib.asynccontextmanager
async def _stream(container: Client) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    async with container.session.ws_connect(container.handle.base_url + "/v1/stream") as stream:
        yield stream


async def _next(stream: aiohttp.ClientWebSocketResponse) -> Accepted | Result | Failure:
    return server_message.validate_json(await stream.receive_str(timeout=DEADLINE_S))


async def test_calls_of_a_slot_run_in_order_and_slots_do_not_wait_for_each_other(container: Client) -> None:
    slow, quick = await container.lease(0), await container.lease(1)
    calls = [container.call(slow, f"{UNTIL_GO}; sleep 0.6; echo first"), container.call(slow, "echo second")]
    calls += [container.call(quick, f"echo {n}") for n in range(3)]
    order = []
    async for result in container.results(*calls):
        order.append(result)
        if len(order) == 3:
            await container.run(slow, "touch go", tool="terminal")
    assert [result.stdout.strip() for result in order] == ["0", "1", "2", "first", "second"]
    assert order[-1].queue_s > 0.5


async def test_asking_again_never_runs_twice(container: Client) -> None:
    key = await container.lease()
    call = container.call(key, "echo ran >> log; sleep 0.3; wc -l < log")

    async def ask() -> str:
        (result,) = [result async for result in container.results(call)]
        return result.stdout.strip()

    assert set(await asyncio.gather(ask(), ask(), ask())) == {"1"}
    assert await ask() == "1"


async def test_a_cut_connection_loses_no_call(container: Client) -> None:
    key = await container.lease()
    call = container.call(key, "echo ran >> log; sleep 0.5; wc -l < log")
    async with _stream(container) as stream:
        await stream.send_str(Batch(batch=3, calls=(call,)).model_dump_json())
        assert await _next(stream) == Accepted(batch=3)
    results = [result async for result in container.results(call)]
    assert [result.stdout for result in results] == ["1\n"]


async def test_an_unknown_call_of_another_boot_is_not_run(container: Client) -> None:
    key = await container.lease()
    result = await container.run(key, "touch ran", boot="another")
    assert (result.fault, result.error) == ("infra", "call_lost")
    assert (await container.run(key, "ls")).stdout == ""


async def test_cancel_ends_running_and_waiting_calls(container: Client) -> None:
    key = await container.lease()
    calls = (container.call(key, "sleep 300", 400), container.call(key, "echo never"))
    async with _stream(container) as stream:
        await stream.send_str(Batch(calls=calls).model_dump_json())
        await _next(stream)
        await stream.send_str(Cancel(calls=tuple(CallKey(id=call.id, lease=key) for call in calls)).model_dump_json())
        for _ in calls:
            answer = await _next(stream)
            assert isinstance(answer, Result)
            assert answer.result.cancelled
    assert (await container.run(key, "echo free")).stdout == "free\n"


async def test_cancelling_and_forgetting_the_unknown_is_no_error(container: Client) -> None:
    key = await container.lease()
    async with _stream(container) as stream:
        await stream.send_str(Cancel(calls=(CallKey(id="no-such-call", lease=key),)).model_dump_json())
        await stream.send_str(Forget(calls=(CallKey(id="no-such-call", lease=key),)).model_dump_json())
        await stream.send_str(Batch(calls=(container.call(key, "echo fine"),)).model_dump_json())
        await _next(stream)
        answer = await _next(stream)
    assert isinstance(answer, Result)
    assert answer.result.stdout == "fine\n"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"type":"unknown"}', '{"type":"batch","calls":[{}]}'])
async def test_a_malformed_message_is_refused_and_the_stream_lives(container: Client, text: str) -> None:
    key = await container.lease()
    async with _stream(container) as stream:
        await stream.send_str(text)
        assert isinstance(await _next(stream), Failure)
        await stream.send_str(Batch(calls=(container.call(key, "echo fine"),)).model_dump_json())
        assert isinstance(await _next(stream), Accepted)
        assert isinstance(await _next(stream), Result)
