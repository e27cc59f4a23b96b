"""Requests that a farm service must bear: too large, too slow, too many, badly named; and a standby's answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import pytest

from agentenv.api import serving
from agentenv.api.farm_server import news
from agentenv.api.farm_server.access import Access
from agentenv.api.farm_server.app import farm_app
from agentenv.api.farm_server.farm import Farm
from agentenv.api.farm_server.request_gate import MAX_REQUEST_BYTES, RequestGate
from agentenv.api.farm_server.settings import AskLimits
from agentenv.config import ContainerSettings, PoolSettings
from agentenv.errors import TooManyRequestsError
from agentenv.slots.backends.fake import FakeBackend
from agentenv.wire.farm import NewsLost
from agentenv.wire.server import ErrorReply
from tests.farm_service import KEYS, Served, served, token
from tests.waiting import DEADLINE_S, until

ONE: Final = PoolSettings(min_containers=1, max_containers=1)
BEARER: Final = {"Authorization": f"Bearer {token('exp7')}"}


def backend(slots: int = 2) -> FakeBackend:
    return FakeBackend(ContainerSettings(slots_per_container=slots))


@pytest.fixture
async def farm() -> AsyncIterator[Served]:
    async with served(backend(), ONE) as one:
        yield one


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def spoken(url: str, *pieces: bytes) -> tuple[int, dict[str, str], ErrorReply]:
    """Status, headers and error of the answer to what is said over a plain connection, which stays open."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        async with asyncio.timeout(DEADLINE_S):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, ErrorReply.model_validate_json(body)
    finally:
        writer.close()


def head(method: str = "POST", path: str = "/v1/asks", **headers: str) -> bytes:
    named = {"Host": "farm", "Content-Type": "application/json", **headers}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name.replace('_', '-')}: {value}" for name, value in named.items())]
    return "\r\n".join([*lines, "", ""]).encode()


# -- bodies ----------------------------------------------------------------------------------------------


async def test_a_body_announced_as_too_large_is_not_read(farm: Served) -> None:
    asked = head(Content_Length=str(MAX_REQUEST_BYTES + 1), **BEARER)
    status, _, error = await spoken(farm.url, asked)
    assert (status, error.error) == (413, "protocol")


async def test_a_body_that_becomes_too_large_is_not_read_on(farm: Served) -> None:
    """Without a length, as `curl -T -` sends it."""
    chunk = f"{MAX_REQUEST_BYTES + 1:x}\r\n".encode() + b" " * (MAX_REQUEST_BYTES + 1)
    status, headers, error = await spoken(farm.url, head(Transfer_Encoding="chunked", **BEARER), chunk)
    assert (status, error.error, headers["connection"]) == (413, "protocol", "close")


async def test_an_endless_body_ends_with_its_connection(farm: Served) -> None:
    parts = urlsplit(farm.url)
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(head(Transfer_Encoding="chunked", **BEARER))
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"

    async def pour() -> None:
        for _ in range(100):
            writer.write(chunk)
            await writer.drain()

    with pytest.raises(ConnectionError):
        await pour()
    writer.close()


async def test_without_a_token_no_body_is_waited_for(farm: Served) -> None:
    status, _, error = await spoken(farm.url, head(Content_Length="1000"))
    assert (status, error.error) == (401, "unauthorized")


async def test_a_body_has_to_come_in_time() -> None:
    farm = Farm(backend())
    farm.leads = True
    app = RequestGate(farm_app(farm, Access(KEYS)), farm, body_s=0.2)
    async with serving.served(app, "farm", host="127.0.0.1", port=0) as url:
        status, headers, error = await spoken(url, head(Content_Length="100", **BEARER), b"{")
    assert (status, headers["connection"]) == (408, "close")
    assert "did not arrive within 0.2 s" in error.message


@pytest.mark.parametrize("length", ["-1", "1e3", "9" * 40])
async def test_a_length_that_is_none_is_refused(farm: Served, length: str) -> None:
    parts = urlsplit(farm.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(head(Content_Length=length, **BEARER))
    answer = await asyncio.wait_for(reader.readline(), DEADLINE_S)
    assert answer.split()[1] in (b"400", b"413")
    writer.close()


# -- names -----------------------------------------------------------------------------------------------


async def test_a_request_keeps_its_name(farm: Served, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{farm.url}/v1/farm", headers={**BEARER, "X-Request-ID": "step-7.3_a"}) as reply:
        assert reply.headers["X-Request-ID"] == "step-7.3_a"
    async with http.get(f"{farm.url}/nowhere", headers={"X-Request-ID": "refused-too"}) as reply:
        assert (reply.status, reply.headers["X-Request-ID"]) == (404, "refused-too")


@pytest.mark.parametrize("name", ["", "x" * 101, "a b", "ü", '"><script>', "a;b"])
async def test_a_name_that_could_do_harm_is_replaced(farm: Served, http: aiohttp.ClientSession, name: str) -> None:
    async with http.get(f"{farm.url}/health", headers={"X-Request-ID": name}) as reply:
        assert reply.status == 200
        assert len(reply.headers["X-Request-ID"]) == 16


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "a\0", "a\u2028b", "x" * 300, "\ud800"])
async def test_names_that_would_break_a_line_are_refused(farm: Served, http: aiohttp.ClientSession, name: str) -> None:
    for ask in ({"trajectories": [name]}, {"trajectories": ["t"], "tags": {"group": name}}):
        body = json.dumps({"asks": [{"request_id": "r" * 16, **ask}]})
        headers = {**BEARER, "Content-Type": "application/json"}
        async with http.post(f"{farm.url}/v1/asks", data=body, headers=headers) as reply:
            assert (reply.status, (await reply.json())["error"]) == (400, "protocol")


@pytest.mark.parametrize("name", ["[bold]x[/]", "<script>alert(1)</script>", "\u202etxt.exe", "../../etc", "${HOME}"])
async def test_other_names_stay_text(farm: Served, http: aiohttp.ClientSession, name: str) -> None:
    asked = {"request_id": "r" * 16, "trajectories": [name], "tags": {"item": name}}
    body: dict[str, Any] = {"wait_s": 25, "asks": [asked]}
    async with http.post(f"{farm.url}/v1/asks", json=body, headers=BEARER) as reply:
        assert (await reply.json())["asks"][0]["state"] == "granted"
    async with http.get(f"{farm.url}/v1/leases", headers=BEARER, params={"tag": f"item:{name}"}) as reply:
        assert reply.content_type == "application/json"
        (lease,) = (await reply.json())["leases"]
        assert (lease["trajectory"], lease["tags"]["item"]) == (name, name)


# -- too many --------------------------------------------------------------------------------------------


async def test_who_asks_too_often_is_told_when_to_ask_again(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All asks are in one window, however long they take.
    monkeypatch.setattr("limits.storage.memory.time", SimpleNamespace(time=lambda: 1_000_500.0))
    access = Access(KEYS, limits=AskLimits(asks_per_s=0.01, burst=1))
    async with served(backend(), ONE, access=access) as farm:
        bodies = [{"asks": [{"request_id": f"an-ask-number-{number:03}", "trajectories": ["t"]}]} for number in (1, 2)]
        async with http.post(f"{farm.url}/v1/asks", json=bodies[0], headers=BEARER) as reply:
            assert reply.status == 200
        async with http.post(f"{farm.url}/v1/asks", json=bodies[1], headers=BEARER) as reply:
            error = ErrorReply.model_validate(await reply.json())
            assert (reply.status, error.error) == (429, "too_many_requests")
            assert error.retry_after_s is not None
            assert 0 < error.retry_after_s <= int(reply.headers["Retry-After"]) <= 201
        other = {"Authorization": f"Bearer {token('exp8')}"}
        async with http.post(f"{farm.url}/v1/asks", json=bodies[1], headers=other) as reply:
            assert reply.status == 200


async def test_a_pool_that_asks_too_often_waits_and_no_lease_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    access = Access(KEYS, limits=AskLimits(asks_per_s=5, burst=10))
    refused: list[TooManyRequestsError] = []
    limit = access.limit

    def counted(*asked: Any) -> None:
        try:
            limit(*asked)
        except TooManyRequestsError as error:
            refused.append(error)
            raise

    monkeypatch.setattr(access, "limit", counted)
    async with served(backend(40), ONE, access=access) as farm, farm.pool() as pool:
        for step in range(4):
            leases = await asyncio.gather(*(pool.lease(f"{step}-{number}") for number in range(10)))
            assert len(leases) == 10
        assert refused
        assert pool.statistics().faults == {}


async def test_streams_of_news_are_bounded_per_token(
    farm: Served, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(news, "MOST_STREAMS", 3)

    async def open_one(client: str, bearer: str) -> aiohttp.ClientResponse:
        headers = {"Authorization": f"Bearer {bearer}"}
        return await http.get(f"{farm.url}/v1/news", params={"client": client}, headers=headers)

    mine, others = token("exp7"), token("exp7")
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(await open_one(f"c{number}", mine)) for number in range(3)]
        for stream in opened:
            assert json.loads(await stream.content.readline())["type"] == "hello"
        async with await open_one("c3", mine) as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (429, "10")
        async with await open_one("c3", others) as another:
            assert another.status == 200
        opened[0].close()
        await until(lambda: farm.farm.news.streams(KEYS.verify(mine).jti) == 2)
        async with await open_one("c0", mine) as again:
            assert again.status == 200


async def test_a_client_that_does_not_read_its_news_is_sent_away(
    farm: Served, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its asks are dropped as those of a client that is gone, and its news are not kept."""
    monkeypatch.setattr(news, "MOST_UNREAD_BYTES", 100_000)
    room, lost = farm.farm.news, NewsLost(lease="c/0/1", error=ErrorReply(error="x", message="m" * 1000))
    parts = urlsplit(farm.url)
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(head("GET", "/v1/news?client=slow", **BEARER))
    await until(lambda: room.listens("exp7", "slow"))
    for _ in range(200):
        room.tell("exp7", "slow", lost)
    assert not room.listens("exp7", "slow")
    writer.close()


# -- a standby -------------------------------------------------------------------------------------------


@pytest.fixture
async def standby() -> AsyncIterator[str]:
    waiting = Farm(backend())
    waiting.leader_url = "http://leader:8700"
    async with serving.served(farm_app(waiting, Access(KEYS)), "farm", host="127.0.0.1", port=0) as url:
        yield url


@pytest.mark.parametrize(
    "path", ["/v1/leases?tag=a%0d%0aSet-Cookie:x", "/v1/%0d%0aX:%20y", "//evil.example/", "/%C3%BC"]
)
@pytest.mark.parametrize("bearer", [None, "garbage", token("exp7")])
async def test_a_standby_refers_to_the_leader_as_it_was_asked(standby: str, path: str, bearer: str | None) -> None:
    named = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
    status, headers, error = await spoken(standby, head("GET", path, **named))
    assert (status, headers["location"]) == (307, "http://leader:8700" + path)
    assert "set-cookie" not in headers
    assert bearer is None or bearer not in str(headers) + error.message


async def test_a_standby_answers_for_itself_what_concerns_its_process(
    standby: str, http: aiohttp.ClientSession
) -> None:
    async with http.get(f"{standby}/health") as reply:
        assert reply.status == 200
    async with http.get(f"{standby}/ready") as reply:
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")


async def test_a_standby_that_knows_no_leader_says_when_to_ask_again(http: aiohttp.ClientSession) -> None:
    app = farm_app(Farm(backend()), Access(KEYS))
    async with (
        serving.served(app, "farm", host="127.0.0.1", port=0) as url,
        http.get(f"{url}/v1/farm", headers=BEARER) as reply,
    ):
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        assert (await reply.json())["error"] == "closed"
