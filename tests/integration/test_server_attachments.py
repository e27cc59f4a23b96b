"""Large content beside the messages: received, handed to the slot, kept until it is forgotten, charged to its slot."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from agentenv.sandbox.server.call_queue import MAX_WAITING_BYTES
from agentenv.wire.base import LARGE_BYTES, MAX_FILE_BYTES
from agentenv.wire.leases import LeaseKey
from agentenv.wire.transfers import LEASE_HEADER
from tests.integration.server_client import Client
from tests.integration.server_stub import TOKEN, StubSupervisor
from tests.waiting import DEADLINE_S


@pytest.fixture
async def stub() -> AsyncIterator[StubSupervisor]:
    async with StubSupervisor(slots=2) as started:
        yield started


@pytest.fixture
async def client(stub: StubSupervisor) -> AsyncIterator[Client]:
    async with Client(stub.url, TOKEN) as opened:
        yield opened


@pytest.fixture
async def key(client: Client) -> AsyncIterator[LeaseKey]:
    async with client.leased() as leased:
        yield leased


async def held_bytes(client: Client, wanted: Callable[[int], bool]) -> int:
    async with asyncio.timeout(DEADLINE_S):
        while not wanted(held := (await client.statistics())["held_bytes"]):
            await asyncio.sleep(0.01)
    return held


async def test_an_argument_and_a_result_travel_beside_the_messages(client: Client, key: LeaseKey) -> None:
    content = secrets.token_bytes(3 * LARGE_BYTES + 1)
    write = client.call(key, "write_file", path="f")
    assert await client.put(write, "data", content) == (200, {"field": "data", "size_bytes": len(content)})
    await client.ask(write)
    assert (await client.result(write)).content == {"size_bytes": len(content), "created": True}
    read = client.call(key, "read_file", path="f", binary=True)
    await client.ask(read)
    async with asyncio.timeout(DEADLINE_S):
        while read["id"] not in client.results:
            await client.next_message()
    result = client.results.pop(read["id"])
    assert [(part.field, part.size_bytes) for part in result.attachments] == [("content.data", len(content))]
    assert await client.get(read, "content.data", skip=LARGE_BYTES) == (200, content[LARGE_BYTES:])
    whole = await client.whole(read, result)
    assert isinstance(whole.content, dict)
    assert base64.b64decode(str(whole.content["data"])) == content
    assert (await client.get(read, "content.data"))[0] == 409, "it was forgotten"
    assert (await client.statistics())["held_bytes"] == 0


async def test_standard_input_and_a_script_may_be_attached(client: Client, key: LeaseKey) -> None:
    call = client.call(key, command="wc -c")
    await client.put(call, "stdin", b"x" * 1_000_000)
    await client.ask(call)
    assert (await client.result(call)).stdout == "1000000\n"
    call = client.call(key)
    await client.put(call, "command", b"echo h\xc3\xa9 " + b"#" * LARGE_BYTES)
    await client.ask(call)
    assert (await client.result(call)).stdout == "hé\n"


@pytest.mark.parametrize(
    ("field", "content", "told"),
    [
        ("command", b"\xff" * LARGE_BYTES, "is not UTF-8"),
        ("nonsense", b"x", "nonsense"),
        ("cwd", b"/tmp", "duplicate argument"),
    ],
)
async def test_a_wrong_attachment_is_the_clients_fault(
    client: Client, key: LeaseKey, field: str, content: bytes, told: str
) -> None:
    call = client.call(key, command=None if field == "command" else "true", cwd="." if field == "cwd" else None)
    await client.put(call, field, content)
    await client.ask(call)
    result = await client.result(call)
    assert (result.fault, result.error) == ("infra", "protocol")
    assert told in result.message
    assert (await client.statistics())["held_bytes"] == 0


async def test_an_attachment_that_did_not_arrive_is_a_typed_failure(client: Client, key: LeaseKey) -> None:
    call = client.call(key, "write_file", path="f")
    call["attachments"] = [{"field": "text", "size_bytes": 10}]
    await client.ask(call)
    assert (await client.result(call)).error == "sandbox_unavailable"
    assert (await client.run(key, "echo fine")).stdout == "fine\n"


async def test_without_the_leases_key_nothing_is_taken_nor_given(client: Client, key: LeaseKey) -> None:
    read = client.call(key, command=f"head -c {2 * LARGE_BYTES} /dev/zero | tr '\\0' x")
    await client.ask(read)
    async with asyncio.timeout(DEADLINE_S):
        while read["id"] not in client.results:
            await client.next_message()
    other = await client.lease(1)
    for stranger in (other, key.model_copy(update={"secret": "0" * 32})):
        call = {**read, "lease": stranger.model_dump()}
        assert (await client.get(call, "stdout"))[0] == 409
        await client.send(client.named("forget", call))
    assert (await client.put({**read, "lease": key.model_dump() | {"secret": "0" * 32}}, "text", b"x"))[0] == 409
    assert (await client.get(read, "stdout"))[0] == 200
    await client.release(other)


async def test_a_call_is_cancelled_only_with_its_leases_key(
    stub: StubSupervisor, client: Client, key: LeaseKey
) -> None:
    other = await client.lease(1)
    running = client.call(key, command="until [ -e go ]; do sleep 0.02; done; echo done", timeout_s=60)
    await client.ask(running)
    await client.running(0, 1)
    async with Client(stub.url, TOKEN) as stranger:
        for lease in (other, key.model_copy(update={"secret": "0" * 32})):
            await stranger.send(stranger.named("cancel", {**running, "lease": lease.model_dump()}))
            await stranger.send(stranger.named("forget", {**running, "lease": lease.model_dump()}))
        assert (await stranger.run(other, "echo seen")).stdout == "seen\n"
    await client.run(key, "touch go", tool="terminal")
    result = await client.result(running)
    assert (result.cancelled, result.stdout) == (False, "done\n")
    await client.release(other)


async def test_a_late_copy_of_a_batch_does_not_take_the_answer_away(
    stub: StubSupervisor, client: Client, key: LeaseKey
) -> None:
    """It arrives over the connection that the client gave up, and that ends behind it."""
    call = client.call(key, command="sleep 1; echo done")
    async with Client(stub.url, TOKEN) as old:
        await client.ask(call)
        await client.next_message()
        await old.ask(call)
        await old.next_message()
        await old.cut()
    assert (await client.result(call)).stdout == "done\n"


async def test_a_broken_upload_goes_on_where_it_was_or_is_dropped(
    stub: StubSupervisor, client: Client, key: LeaseKey
) -> None:
    call = client.call(key, "write_file", path="f")
    port = int(stub.url.rpartition(":")[2])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    lease = json.dumps(call["lease"])
    head = f"PUT /v1/attachments/{call['id']}/text HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    writer.write(f"{head}{LEASE_HEADER}: {lease}\r\nContent-Length: 9000000\r\n\r\n".encode() + b"x" * 1_000_000)
    await held_bytes(client, lambda held: held == 1_000_000)
    writer.transport.abort()
    assert await client.put(call, "text", b"y", at=2_000_000) == (200, {"field": "text", "size_bytes": 1_000_000})
    assert await client.put(call, "text", b"y" * 10, at=999_990) == (200, {"field": "text", "size_bytes": 1_000_000})
    await client.ask({**call, "attachments": [{"field": "text", "size_bytes": 9_000_000}]})
    assert (await client.result(call)).error == "sandbox_unavailable", "nothing ran"
    again = client.call(key, "write_file", path="f", id=call["id"])
    again["attachments"] = [{"field": "text", "size_bytes": 1_000_000}]
    await client.ask(again)
    assert (await client.result(again)).exit_code == 0
    assert (await client.run(key, "tail -c 11 f")).stdout == "x" + "y" * 10
    dropped = client.call(key, "write_file", path="f")
    await client.put(dropped, "text", b"x" * 1_000_000)
    await client.send(client.named("forget", dropped))
    await held_bytes(client, lambda held: held == 0)


async def test_what_waits_in_one_slot_is_refused_to_its_own_calls_only(client: Client, key: LeaseKey) -> None:
    other = await client.lease(1)
    blocking = client.call(key, command="sleep 300", timeout_s=400)
    await client.ask(blocking)
    await client.running(0, 1)
    large = [client.call(key, "write_file", path="f") for _ in range(3)]
    for call in large[:2]:
        assert (await client.put(call, "data", bytes(MAX_FILE_BYTES - 1024)))[0] == 200
        await client.ask(call)
    status, told = await client.put(large[2], "data", bytes(MAX_FILE_BYTES))
    assert (status, told["error"]) == (503, "sandbox_unavailable")
    assert (await client.statistics())["held_bytes"] <= MAX_WAITING_BYTES
    neighbour = client.call(other, "write_file", path="f")
    assert (await client.put(neighbour, "data", bytes(1_000_000)))[0] == 200
    await client.ask(neighbour)
    assert (await client.result(neighbour)).exit_code == 0
    await client.send(client.named("cancel", blocking, *large[:2]))
    for call in (blocking, *large[:2]):
        assert (await client.result(call)).cancelled
    status, told = await client.put(client.call(key, "write_file"), "data", bytes(MAX_FILE_BYTES + 1))
    assert (status, told["error"]) == (409, "invalid_arguments")
    assert (await client.statistics())["held_bytes"] == 0
    await client.release(other)


async def test_a_large_answer_survives_a_cut_and_ends_with_its_lease(client: Client) -> None:
    key = await client.lease()
    await client.run(key, "head -c 40000000 /dev/zero > big")
    read = client.call(key, "read_file", path="big")
    await client.ask(read)
    await client.running(0, 0)
    await client.cut()
    await client.connect()
    await client.ask(read)
    whole = await client.result(read)
    assert isinstance(whole.content, dict)
    assert whole.content["text"] == "\0" * 40_000_000
    more = client.call(key, "read_file", path="big")
    await client.ask(more)
    await client.running(0, 0)
    await client.release(key)
    assert (await client.get(more, "content.text"))[0] == 409


async def test_a_call_is_not_begun_while_large_answers_wait_to_be_fetched(client: Client, key: LeaseKey) -> None:
    await client.run(key, "head -c 20000000 /dev/zero > big")
    calls = [client.call(key, "read_file", path="big") for _ in range(4)]
    await client.ask(*calls)
    async with asyncio.timeout(DEADLINE_S):
        while not client.results:
            await client.next_message()
    assert (await client.slot(0)).running_calls == 3
    for call in calls:
        assert len(str((await client.result(call)).content)) > 20_000_000


async def test_a_large_answer_does_not_stop_the_server(client: Client, key: LeaseKey) -> None:
    """Its JSON would be 200 MB. How long the server takes for an answer is compared with how long it takes when
    nothing else goes on."""
    await client.run(key, f"head -c {MAX_FILE_BYTES // 2} /dev/zero > big")

    async def longest_s(work: asyncio.Task[object]) -> float:
        longest = 0.0
        while not work.done():
            began = time.monotonic()
            async with client.http.get("/health") as reply:
                await reply.read()
            longest = max(longest, time.monotonic() - began)
        return longest

    async def answered(call: dict[str, Any]) -> None:
        while call["id"] not in client.results:
            await client.next_message()

    async def goes_on() -> bool:
        idle_s = await longest_s(asyncio.create_task(asyncio.sleep(1.0)))
        call = client.call(key, "read_file", path="big")
        await client.ask(call)
        busy_s = await longest_s(asyncio.create_task(answered(call)))
        assert client.results[call["id"]].content is not None
        await client.send(client.named("forget", call))
        return busy_s < 0.25 + 5 * idle_s

    # A busy machine may hold it up once; a server that encodes the answer in its loop holds itself up every time.
    for _ in range(5):
        if await goes_on():
            return
    pytest.fail("the server was held up by an answer every time")
