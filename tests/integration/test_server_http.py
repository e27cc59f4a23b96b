"""The wire, against a real server over real slot agents: what it accepts, refuses and survives."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from agentenv.metrics.scrape import parse
from agentenv.wire.base import MAX_MESSAGE_BYTES
from agentenv.wire.leases import LeaseKey
from agentenv.wire.server import ErrorReply, Health
from tests.integration.server_client import Client, sealing
from tests.integration.server_stub import TOKEN, StubSupervisor

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stub() -> AsyncIterator[StubSupervisor]:
    async with StubSupervisor(slots=3) as made:
        yield made


# -- HTTP


@pytest.mark.parametrize("header", [None, "", "Bearer ", "Bearer wrong", TOKEN, f"Basic {TOKEN}", "Bearer \xe9"])
async def test_without_the_token_nothing_but_health_answers(stub: StubSupervisor, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    async with aiohttp.ClientSession(stub.url, headers=headers) as http:
        async with http.get("/health") as reply:
            assert Health.model_validate_json(await reply.read()).status == "ok"
        for path in ("/metrics", "/v1/info", "/v1/slots", "/v1/statistics", "/v1/stream", "/nowhere"):
            async with http.get(path) as reply:
                assert reply.status == 401
                assert ErrorReply.model_validate_json(await reply.read()).error == "refused"
        async with http.post("/v1/batch", data=b"{}") as reply:
            assert reply.status == 401


async def test_metrics_tell_what_happened(client: Client, key: LeaseKey) -> None:
    async with client.http.get("/metrics") as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        samples = parse(await reply.text())
    assert samples.by("agentenv_sandbox_slots", "state")["leased"] == 1
    assert sum(samples.by("agentenv_sandbox_slots", "state").values()) == 3
    assert (samples.one("agentenv_sandbox_leases_granted_total") or 0) >= 1


async def test_unknown_paths_and_methods_are_typed_errors(client: Client) -> None:
    async with client.http.get("/v1/nowhere") as reply:
        assert reply.status == 404
        ErrorReply.model_validate_json(await reply.read())
    async with client.http.get("/v1/leases") as reply:
        assert reply.status == 405
        ErrorReply.model_validate_json(await reply.read())


@pytest.mark.parametrize(
    "path", ["/v1/leases", "/v1/leases/renew", "/v1/leases/release", "/v1/leases/act", "/v1/batch"]
)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"slot":-1}', b"[" * 100_000])
async def test_malformed_bodies_are_refused(client: Client, path: str, body: bytes) -> None:
    status, reply = await client.post(path, body)
    assert (status, reply["error"]) == (400, "protocol")
    assert reply["message"]


async def test_oversized_bodies_are_refused_before_they_are_read(client: Client) -> None:
    status, reply = await client.post("/v1/leases", b" " * (4 * 1024 * 1024 + 1))
    assert (status, reply["error"]) == (413, "refused")

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(MAX_MESSAGE_BYTES // 2**20 + 2):
            yield b" " * 2**20

    async with client.http.post("/v1/batch", data=endless()) as answer:
        assert answer.status == 413
        ErrorReply.model_validate_json(await answer.read())


async def test_a_batch_over_http_streams_each_result_as_its_own_line(client: Client, key: LeaseKey) -> None:
    other = await client.lease(1)
    slow = client.call(key, command="until [ -e go ]; do sleep 0.05; done; echo slow")
    fast = client.call(other, command="echo fast")
    wrong = client.call(key, "nonsense")
    body = json.dumps({"batch": 7, "calls": [slow, wrong, fast]})
    lines = []
    async with client.http.post("/v1/batch", data=body) as reply:
        assert reply.status == 200
        assert reply.content_type == "application/x-ndjson"
        async for line in reply.content:
            lines.append(json.loads(line))
            if lines[-1].get("result", {}).get("id") == fast["id"]:
                await client.run(key, "touch go", tool="terminal")
    assert lines[0] == {"type": "accepted", "batch": 7}
    assert [line["result"]["id"] for line in lines[1:]] == [wrong["id"], fast["id"], slow["id"]]
    assert [line["result"].get("stdout") for line in lines[1:]] == [None, "fast\n", "slow\n"]
    assert await client.release(other) == "free"


async def test_a_post_waits_for_its_calls_even_when_a_stream_asks_for_them_later(client: Client, key: LeaseKey) -> None:
    call = client.call(key, command="until [ -e go ]; do sleep 0.02; done; echo one")

    async def post() -> list[Any]:
        async with client.http.post("/v1/batch", data=json.dumps({"calls": [call, call]})) as reply:
            return [json.loads(line) async for line in reply.content]

    posted = asyncio.create_task(post())
    await client.running(0, 1)
    await client.ask(call)
    await client.run(key, "touch go", tool="terminal")
    assert (await client.result(call)).stdout == "one\n"
    lines = await posted
    assert [line["type"] for line in lines] == ["accepted", "result"]
    assert lines[1]["result"]["stdout"] == "one\n"


# -- leases


async def test_a_lease_is_granted_once_per_request(client: Client) -> None:
    first = await client.lease(2, request_id="r" * 20)
    again = await client.lease(2, request_id="r" * 20)
    assert again == first
    status, reply = await client.post("/v1/leases", {"slot": 2, "trajectory": "u", "ttl_s": 5, "request_id": "s" * 20})
    assert (status, reply["error"]) == (409, "stale_lease")
    assert "not free" in reply["message"]
    report = await client.slot(2)
    assert (report.state, report.trajectory) == ("leased", "t")
    assert 0 < (report.expires_in_s or 0) <= 300
    assert await client.release(first) == "free"
    assert await client.release(first) == "free", "an epoch that has ended is no error"
    assert (await client.slot(2)).epoch == first.epoch + 1


async def test_a_slot_that_is_not_there(client: Client, key: LeaseKey) -> None:
    body = {"slot": 99, "trajectory": "u", "ttl_s": 5, "request_id": "s" * 20}
    assert (await client.post("/v1/leases", body))[0] == 409
    call = client.call(key.model_copy(update={"slot": 99}), command="true")
    await client.ask(call)
    assert (await client.result(call)).error == "stale_lease"
    status, renewed = await client.post(
        "/v1/leases/renew", {"ttl_s": 9, "keys": [key.model_copy(update={"slot": 99}).model_dump(), key.model_dump()]}
    )
    assert renewed.pop("supervisor_silent_s") >= 0
    assert (status, renewed) == (200, {"renewed": [0], "stale": [99], "lost": []})


@pytest.mark.parametrize("change", [{"secret": "x" * 32}, {"epoch": 10_000}])
async def test_a_key_that_is_not_the_leases_is_refused_everywhere(
    client: Client, key: LeaseKey, change: dict[str, Any]
) -> None:
    wrong = key.model_copy(update=change)
    result = await client.run(wrong, "touch here")
    assert (result.fault, result.error) == ("infra", "stale_lease")
    for path, body in (("/v1/leases/release", wrong.model_dump()), ("/v1/leases/act", sealing(wrong))):
        status, reply = await client.post(path, body)
        assert (status, reply["error"]) == (409, "stale_lease")
    assert (await client.post("/v1/leases/renew", {"ttl_s": 9, "keys": [wrong.model_dump()]}))[1]["stale"] == [0]
    assert (await client.run(key, "ls")).stdout == "", "nothing ran, and the lease is as it was"


async def test_a_lease_without_heartbeat_ends_and_its_calls_with_it(client: Client) -> None:
    key = await client.lease(2)
    running, queued = client.call(key, command="sleep 100"), client.call(key, command="true")
    await client.ask(running, queued)
    await client.running(2, 2)
    assert (await client.renew(key, 0.3)) == [2]
    results = [await client.result(running), await client.result(queued)]
    assert [(result.fault, result.error) for result in results] == [("infra", "lease_lost")] * 2
    assert "heartbeat" in results[0].message
    assert (await client.run(key, "true")).error == "stale_lease"
    while (await client.slot(2)).state != "free":
        await asyncio.sleep(0.005)


async def test_a_lease_that_is_renewed_lives_on(client: Client) -> None:
    granted_s = time.monotonic()
    key = await client.lease(2, ttl_s=15)
    assert (await client.renew(key, 300)) == [2]
    await asyncio.sleep(granted_s + 15.2 - time.monotonic())
    assert (await client.run(key, "echo alive")).stdout == "alive\n"
    await client.release(key)


async def test_release_ends_running_calls_and_empties_the_workspace(client: Client) -> None:
    key = await client.lease(2)
    await client.run(key, "echo secret > kept")
    running = client.call(key, command="sleep 100")
    await client.ask(running)
    await client.running(2, 1)
    assert await client.release(key) == "free"
    assert (await client.result(running)).error == "lease_lost"
    key = await client.lease(2)
    assert (await client.run(key, "ls -A")).stdout == ""
    await client.release(key)


async def test_seal_kills_what_runs_and_keeps_the_workspace_and_the_lease(client: Client) -> None:
    key = await client.lease(2)
    await client.run(key, "echo kept > file; sleep 1000 & echo $! > pid")
    running, queued = client.call(key, command="sleep 100"), client.call(key, command="cat file")
    await client.ask(running, queued)
    await client.running(2, 2)
    sealed = {"slot": 2, "state": "leased", "checkpoint": ""}
    assert await client.post("/v1/leases/act", sealing(key)) == (200, sealed)
    cancelled = await client.result(running)
    assert (cancelled.cancelled, cancelled.fault) == (True, "none")
    assert (await client.result(queued)).stdout == "kept\n", "what waited runs in the sealed slot"
    assert await client.post("/v1/leases/act", sealing(key)) == (200, sealed), "asked again: sealed again"
    assert (await client.run(key, "pgrep sleep")).exit_code == 1
    await client.release(key)
