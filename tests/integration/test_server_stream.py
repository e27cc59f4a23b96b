"""The stream, against a real server over real slot agents: nothing is lost, nothing runs twice, nobody waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from agentenv.wire.calls import Accepted, Failure
from agentenv.wire.leases import LeaseKey
from tests.integration.server_client import Client
from tests.integration.server_stub import TOKEN, StubSupervisor, descriptors

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stub() -> AsyncIterator[StubSupervisor]:
    async with StubSupervisor(slots=3) as made:
        yield made


@pytest.mark.parametrize(
    ("text", "batch"),
    [
        ("", None),
        ("{", None),
        ("[]", None),
        ('{"type":"nonsense"}', None),
        ('{"type":"batch","batch":5,"calls":[{}]}', 5),
        ('{"type":"batch","batch":6,"calls":[],"more":1}', 6),
        ('{"type":"cancel","calls":[{"id":""}]}', None),
        ("[" * 100_000, None),
    ],
)
async def test_a_malformed_message_is_refused_and_the_stream_lives(
    client: Client, key: LeaseKey, text: str, batch: int | None
) -> None:
    await client.send(text)
    refused = await client.next_message()
    assert isinstance(refused, Failure)
    assert (refused.error, refused.batch) == ("protocol", batch)
    assert (await client.run(key, "echo alive")).stdout == "alive\n"


async def test_a_binary_message_is_refused_and_the_stream_lives(client: Client, key: LeaseKey) -> None:
    assert client.stream is not None
    await client.stream.send_bytes(b"{}")
    assert isinstance(await client.next_message(), Failure)
    assert (await client.run(key, "echo alive")).stdout == "alive\n"


async def test_a_wrong_call_fails_alone(client: Client, key: LeaseKey) -> None:
    calls = [
        client.call(key, "nonsense"),
        client.call(key, command=None),
        client.call(key, command="ok", nonsense=1),
        client.call(key.model_copy(update={"secret": "x" * 32}), command="true"),
        client.call(key, command="true", boot="another"),
        client.call(key, command="echo right"),
    ]
    await client.ask(*calls, batch=9)
    results = [await client.result(call) for call in calls]
    assert [(result.fault, result.error) for result in results] == [
        ("model", "unknown_tool"),
        ("infra", "protocol"),
        ("infra", "protocol"),
        ("infra", "stale_lease"),
        ("infra", "call_lost"),
        ("none", None),
    ]
    assert results[-1].stdout == "right\n"
    assert client.messages[0] == Accepted(batch=9)


async def test_asking_again_never_runs_a_call_twice(client: Client, key: LeaseKey) -> None:
    call = client.call(key, command="echo ran >> log; sleep 0.3; cat log")
    await client.ask(call)
    await client.ask(call)
    assert (await client.result(call)).stdout == "ran\n"
    await client.ask(call)
    assert (await client.result(call)).stdout == "ran\n"
    assert (await client.run(key, "cat log")).stdout == "ran\n"
    await client.send(client.named("forget", call, client.call(key)))
    client.results.pop(call["id"], None)  # the first two may have been answered one by one
    await client.ask(call)
    again = await client.result(call)
    assert (again.fault, again.error) == ("infra", "call_lost")
    assert (await client.run(key, "cat log")).stdout == "ran\n"


async def test_a_call_id_belongs_to_one_lease(client: Client, key: LeaseKey) -> None:
    other = await client.lease(1)
    call = client.call(key, command="echo mine")
    await client.ask(call)
    assert (await client.result(call)).stdout == "mine\n"
    await client.ask({**call, "lease": other.model_dump()})
    refused = await client.result(call)
    assert (refused.fault, refused.error, refused.stdout) == ("infra", "protocol", "")
    await client.release(other)


async def test_a_cut_stream_loses_nothing(client: Client, key: LeaseKey) -> None:
    calls = [client.call(key, command=f"echo {n} >> log; sleep 0.1; echo {n}") for n in range(4)]
    await client.ask(*calls)
    await client.result(calls[0])
    await client.cut()
    await client.connect()
    await client.ask(*calls)
    assert [(await client.result(call)).stdout for call in calls] == ["0\n", "1\n", "2\n", "3\n"]
    assert (await client.run(key, "cat log")).stdout == "0\n1\n2\n3\n"


async def test_cancel_ends_running_and_waiting_calls(client: Client, key: LeaseKey) -> None:
    running = client.call(key, command="echo began; touch began; sleep 100")
    waiting = client.call(key, command="touch never")
    await client.ask(running, waiting)
    await client.running(0, 2)
    await client.run(key, "until [ -e began ]; do sleep 0.02; done", tool="terminal")
    await client.send(client.named("cancel", waiting, running, client.call(key)))
    ended = await client.result(running)
    assert (ended.cancelled, ended.fault, ended.error, ended.stdout) == (True, "none", "cancelled", "began\n")
    assert ended.exit_code == 137
    assert (await client.result(waiting)).cancelled
    assert (await client.run(key, "ls never")).exit_code == 2


async def test_calls_of_one_slot_run_in_order_and_slots_do_not_wait_for_each_other(
    client: Client, key: LeaseKey
) -> None:
    other = await client.lease(1)
    slow = client.call(key, command="until [ -e go ]; do sleep 0.02; done; echo 0 >> log")
    after = [client.call(key, command=f"echo {n} >> log") for n in range(1, 20)]
    quick = client.call(other, command="echo quick")
    await client.ask(slow, *after, quick)
    await client.result(quick)
    assert slow["id"] not in client.results
    await client.run(key, "touch go", tool="terminal")
    for call in after:
        await client.result(call)
    assert (await client.run(key, "cat log")).stdout.split() == [str(n) for n in range(20)]
    await client.release(other)


async def test_a_client_that_does_not_read_holds_nobody_up_and_gets_everything(
    stub: StubSupervisor, client: Client, key: LeaseKey
) -> None:
    """Slots pause when the answers nobody takes have filled the reply memory; others go on."""
    other = await client.lease(1)
    lazy = [client.call(key, command="yes | head -c 1000000") for _ in range(40)]
    await client.ask(*lazy)
    async with Client(stub.url, TOKEN) as second:
        async with asyncio.timeout(30):
            before = -1
            while (left := (await second.slot(0)).running_calls) != before:
                before = left
                assert (await second.run(other, "echo quick")).stdout == "quick\n"
                await asyncio.sleep(0.5)
        assert left > 10, "the slot has paused"
    for call in lazy:
        assert len((await client.result(call)).stdout) == 1_000_000
    await client.release(other)


async def test_a_file_goes_there_and_back(client: Client, key: LeaseKey) -> None:
    text = "é\n" * 100_000
    written = await client.run(key, tool="write_file", path="a/b.txt", text=text)
    assert (written.fault, written.exit_code) == ("none", 0)
    read = await client.run(key, tool="read_file", path="a/b.txt")
    assert isinstance(read.content, dict)
    assert read.content["text"] == text
    missing = await client.run(key, tool="read_file", path="nowhere")
    assert (missing.fault, missing.exit_code, missing.content) == ("none", 2, None)
    assert "No such file" in missing.stderr
    written = await client.run(key, tool="write_file", path="/tmp/there", text="x")
    assert (written.fault, written.exit_code) == ("none", 0)
    wrong = await client.run(key, tool="write_file", path="x")
    assert (wrong.fault, wrong.error) == ("model", "invalid_arguments")


async def test_nothing_leaks_over_many_calls(stub: StubSupervisor, client: Client, key: LeaseKey) -> None:
    assert stub.server is not None
    background = "sleep 100 & until read -r name </proc/$!/comm && [ $name = sleep ]; do :; done"  # so pkill finds it
    commands = ["true", background, "exit 3", "kill -9 $$", "echo $BASH_VERSION"]
    for command in commands * 6:
        await client.run(key, command, timeout_s=5)
    await client.run(key, "pkill sleep; true")
    await client.info()  # the server closes an idle connection after 15 s
    before = await descriptors(stub.server.pid)
    for command in commands * 6:
        await client.run(key, command, stdin="x" if command == "true" else None, timeout_s=5)
    await client.run(key, "pkill sleep; true")
    await client.info()
    # A spare shell may be in the making at either moment: its three descriptors, not one for each call.
    assert abs(await descriptors(stub.server.pid) - before) <= 3


async def test_statistics_count(client: Client, key: LeaseKey) -> None:
    before = await client.statistics()
    await client.run(key, "true")
    await client.run(key, "sleep 5", timeout_s=0.05)
    await client.run(key, "true", nonsense=1)
    after = await client.statistics()
    assert after["calls"] - before["calls"] == 2
    assert after["calls_timed_out"] - before["calls_timed_out"] == 1
    assert after["calls_faulted"] - before["calls_faulted"] == 1
    assert (after["slots_leased"], after["calls_running"]) == (1, 0)


async def test_a_stream_that_dies_while_it_does_not_read_is_let_go(
    stub: StubSupervisor, client: Client, key: LeaseKey
) -> None:
    async with Client(stub.url, TOKEN) as lazy:
        calls = [lazy.call(key, command="yes | head -c 1000000") for _ in range(20)]
        await lazy.ask(*calls)
        async with asyncio.timeout(30):
            before = -1
            while (left := (await client.slot(0)).running_calls) != before:
                before = left
                await asyncio.sleep(0.5)
        await lazy.send(lazy.named("forget", lazy.call(key)))
        await lazy.send(lazy.named("forget", lazy.call(key)))
        assert (await client.statistics())["streams"] == 2
        await lazy.cut()
        async with asyncio.timeout(30):
            while (await client.statistics())["streams"] != 1:
                await asyncio.sleep(0.01)
    await client.ask(*calls)
    for call in calls:
        assert len((await client.result(call)).stdout) == 1_000_000
    assert (await client.statistics())["held_bytes"] == 0


async def test_a_secret_beyond_ascii_is_refused_like_any_other(client: Client, key: LeaseKey) -> None:
    call = client.call(key, command="echo mine")
    await client.ask(call)
    await client.result(call)
    await client.ask({**call, "lease": {**call["lease"], "secret": "é" * 32}})
    assert (await client.result(call)).error == "protocol"
    assert (await client.run(key.model_copy(update={"secret": "é" * 32}), "true")).error == "stale_lease"
