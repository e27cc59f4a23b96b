"""The gateway over HTTP: routes, streams, failures, and requests that are sent again."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestClient, TestServer

from agentenv.agent.protocols import Completion, ContextOverflow
from agentenv.errors import ModelServerError
from agentenv.gateway.canonical import ModelRequest, RefusalError, Shown, shown
from agentenv.gateway.server import RETRIED, Gateway
from tests.waiting import until

USER = {"role": "user", "content": "go"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": [USER]},
    "/v1/responses": {"model": "m", "input": "go"},
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": [USER]},
    "/v1beta/models/m:generateContent": {"contents": [{"parts": [{"text": "go"}]}]},
}
COUNTED = {
    "/v1/responses/input_tokens": "/v1/responses",
    "/v1/messages/count_tokens": "/v1/messages",
    "/v1beta/models/m:countTokens": "/v1beta/models/m:generateContent",
}
"""Paths at which tokens are counted, and those whose requests have them."""
CHAT = "/v1/chat/completions"


class Policy:
    """Answers with the number of the turn, as soon as it may."""

    def __init__(self, *failures: Exception) -> None:
        self.asked: list[ModelRequest] = []
        self.refused: list[str] = []
        self.may = asyncio.Event()
        self.may.set()
        self._failures = list(failures)

    async def generate(self, request: ModelRequest, number: int) -> Shown:
        self.asked.append(request)
        asked = len(self.asked)
        await self.may.wait()
        if self._failures:
            raise self._failures.pop(0)
        return shown(request, Completion({"role": "assistant", "content": f"answer {asked}"}), number)

    def count(self, request: ModelRequest) -> int:
        return len(request.messages)

    def refuse(self, refusal: RefusalError) -> None:
        self.refused.append(refusal.message)


@asynccontextmanager
async def served(policy: Policy, **options: Any) -> AsyncIterator[TestClient[Any, Any]]:
    gateway = Gateway(policy, **options)
    async with TestClient(TestServer(gateway.application())) as client:
        yield client


def streamed(path: str) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request for a stream."""
    if path.endswith(":generateContent"):
        return path.replace(":generateContent", ":streamGenerateContent?alt=sse"), BODIES[path]
    return path, {**BODIES[path], "stream": True}


async def ask(client: TestClient[Any, Any], path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    async with client.post(path, json=body or BODIES[path], headers=headers) as reply:
        return reply.status, await reply.text()


@pytest.mark.parametrize("path", BODIES)
async def test_each_dialect_is_answered_as_a_body_and_as_a_stream(path: str) -> None:
    policy = Policy()
    async with served(policy) as client:
        status, text = await ask(client, path)
        assert status == 200
        assert "answer 1" in json.dumps(json.loads(text))
        at, body = streamed(path)
        async with client.post(at, json=body) as reply:
            assert reply.status == 200
            assert reply.content_type == "text/event-stream"
            assert "answer 2" in await reply.text()
    assert [request.stream for request in policy.asked] == [False, True]


FAILURES: list[tuple[Callable[[], Exception], int, str]] = [
    (lambda: ContextOverflow("9 tokens"), 400, "prompt is too long: 9 tokens"),
    (lambda: ModelServerError("no route"), 503, "the model's server failed"),
    (lambda: RefusalError("the rollout is over", status=403), 403, "the rollout is over"),
    (lambda: ZeroDivisionError("oops"), 500, "ZeroDivisionError: oops"),
]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("failure", "status", "text"), FAILURES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_has_its_status(
    path: str, failure: Callable[[], Exception], status: int, text: str, stream: bool
) -> None:
    async with served(Policy(failure())) as client:
        found, told = await ask(client, *(streamed(path) if stream else (path, BODIES[path])))
        assert found == status
        assert text in json.loads(told)["error"]["message"]
        if status == 400 and path in ("/v1/chat/completions", "/v1/responses"):
            assert json.loads(told)["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "sign"), list(zip(BODIES, (": waiting", ": waiting", "event: ping", "\n"), strict=True))
)
@pytest.mark.parametrize("fails", [False, True])
async def test_a_slow_stream_shows_that_it_lives(path: str, sign: str, fails: bool) -> None:
    policy = Policy(*([ModelServerError("no route")] if fails else []))
    policy.may.clear()
    at, body = streamed(path)
    async with served(policy, quiet_s=0.01) as client, client.post(at, json=body) as reply:
        assert (await reply.content.readuntil(b"\n\n")).decode().startswith(sign)
        policy.may.set()
        assert ("no route" if fails else "answer 1") in await reply.text()


async def test_a_request_that_is_sent_again_gets_its_answer() -> None:
    policy = Policy()
    async with served(policy) as client:
        policy.may.clear()
        first, second = (asyncio.ensure_future(ask(client, CHAT, **more)) for more in ({}, {RETRIED: "1"}))
        await until(lambda: len(policy.asked) == 1)
        policy.may.set()
        assert (await first)[1] == (await second)[1] == (await ask(client, CHAT, **{RETRIED: "2"}))[1]
        assert "answer 2" in (await ask(client, CHAT))[1]


async def test_equal_requests_at_once_get_an_answer_each() -> None:
    policy = Policy()
    async with served(policy) as client:
        policy.may.clear()
        both = [asyncio.ensure_future(ask(client, CHAT)) for _ in range(2)]
        await until(lambda: len(policy.asked) == 2)
        policy.may.set()
        answers = await asyncio.gather(*both)
    assert {json.loads(text)["choices"][0]["message"]["content"] for _, text in answers} == {"answer 1", "answer 2"}


async def test_whoever_lost_its_connection_gets_its_answer_without_saying_so() -> None:
    policy = Policy()
    policy.may.clear()
    gateway = Gateway(policy)
    async with TestClient(TestServer(gateway.application())) as client:
        async with ClientSession() as other:
            lost = asyncio.ensure_future(other.post(client.make_url(CHAT), json=BODIES[CHAT]))
            await until(lambda: len(policy.asked) == 1)
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)
        await until(lambda: all(turn.lost for turns in gateway._turns.values() for turn in turns))
        policy.may.set()
        assert "answer 1" in (await ask(client, CHAT))[1]
        assert "answer 2" in (await ask(client, CHAT))[1]


async def test_a_failed_turn_is_made_again() -> None:
    async with served(Policy(ModelServerError("no route"))) as client:
        assert (await ask(client, CHAT))[0] == 503
        assert "answer 2" in (await ask(client, CHAT, **{RETRIED: "1"}))[1]


@pytest.mark.parametrize(("raw", "status"), [(b"{", 400), (b"[" * 100_000, 400), (b"\xff", 400), (b"[]", 400)])
@pytest.mark.parametrize("path", [*BODIES, *COUNTED])
async def test_a_body_that_is_no_request_is_refused(path: str, raw: bytes, status: int) -> None:
    async with served(Policy()) as client, client.post(path, data=raw) as reply:
        assert reply.status == status
        told = (await reply.json())["error"]
        assert told.get("type", told.get("status")) in ("invalid_request_error", "INVALID_ARGUMENT")


@pytest.mark.parametrize("path", [*BODIES, *COUNTED])
async def test_too_large_a_body_is_refused(path: str) -> None:
    async with served(Policy(), max_request_bytes=100) as client, client.post(path, data=b" " * 101) as reply:
        assert reply.status == 413
        assert "more than 100 bytes" in (await reply.json())["error"]["message"]


async def test_a_body_that_is_not_encoded_as_its_header_says_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    policy, encoded = Policy(), {"Content-Encoding": "gzip"}
    async with served(policy) as client, client.post(CHAT, data=b"none", headers=encoded) as reply:
        assert reply.status == 400
        assert "the body cannot be read" in (await reply.json())["error"]["message"]
    assert len(policy.refused) == 1
    assert "Error handling request" not in caplog.text


async def test_others_are_answered_while_a_large_request_is_read() -> None:
    async with served(Policy()) as client:
        shares: list[float] = []
        while len(shares) < 3 and not any(share < 0.5 for share in shares):  # again where the machine stood still
            shares.append(await _longest_wait_beside_a_large_request(client))
    assert min(shares) < 0.5


async def _longest_wait_beside_a_large_request(client: TestClient[Any, Any]) -> float:
    """Of one small request after another, as a share of the time until the large one is answered."""
    began_s = time.monotonic()
    large = asyncio.create_task(
        client.post(CHAT, data=io.BytesIO(b'{"messages": [' + b"0," * (4 * 1024 * 1024) + b"0]}"))
    )
    waits_s = []
    while not large.done():
        asked_s = time.monotonic()
        assert (await ask(client, CHAT))[0] == 200
        waits_s.append(time.monotonic() - asked_s)
    assert large.result().status == 400
    return max(waits_s) / (time.monotonic() - began_s)


async def test_the_body_of_an_answered_request_is_not_kept() -> None:
    async with served(Policy()) as client:
        tracemalloc.start()
        try:
            for number in range(4):
                body = json.dumps({**BODIES[CHAT], "user": str(number) * 4 * 1024 * 1024}).encode()
                async with client.post(CHAT, data=io.BytesIO(body)) as reply:
                    assert reply.status == 200
                del body
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] < 8 * 1024 * 1024
        finally:
            tracemalloc.stop()


async def test_models_tokens_and_what_is_not_served() -> None:
    async with served(Policy()) as client:
        async with client.get("/v1/models") as reply:
            assert [model["id"] for model in (await reply.json())["data"]] == ["policy"]
        async with client.get("/v1/models/some/name") as reply:
            assert (await reply.json())["id"] == "some/name"
        async with client.get("/v1beta/models") as reply:
            assert [model["name"] for model in (await reply.json())["models"]] == ["models/policy"]
        for path, asked in COUNTED.items():
            status, text = await ask(client, path, BODIES[asked])
            assert (status, list(json.loads(text).values())[-1]) == (200, 1)
        async with client.post("/v1/embeddings", json={}) as reply:
            assert reply.status == 404
            assert "/v1/embeddings" in (await reply.json())["error"]["message"]


async def test_turns_under_way_end_with_the_application() -> None:
    policy = Policy()
    policy.may.clear()
    async with served(policy) as client:
        waiting = asyncio.ensure_future(ask(client, CHAT))
        await until(lambda: len(policy.asked) == 1)
    await asyncio.gather(waiting, return_exceptions=True)
    assert not [task for task in asyncio.all_tasks() if "_made" in repr(task)]


async def test_a_stream_that_is_not_asked_for_as_events_is_a_list() -> None:
    async with served(Policy()) as client:
        path = "/v1beta/models/org/some:tag:streamGenerateContent"
        async with client.post(path, json=BODIES["/v1beta/models/m:generateContent"]) as reply:
            assert reply.content_type == "application/json"
            (answer,) = await reply.json()
    assert answer["modelVersion"] == "org/some:tag"
    assert answer["candidates"][0]["content"]["parts"] == [{"text": "answer 1"}]
