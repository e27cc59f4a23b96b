"""The page's routes: what needs a token, the headers that protect the page, and readers that do not read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, MutableMapping
from typing import Any

import httpx
import pytest

from agentenv.api.farm_server import page_routes
from agentenv.api.farm_server.access import ROUTES, Access
from agentenv.api.farm_server.app import farm_app
from agentenv.api.farm_server.farm import Farm
from agentenv.api.farm_server.page_routes import LineStream, UnreadError
from agentenv.api.farm_server.settings import OpenPages
from agentenv.errors import ConnectionLostError
from agentenv.farm_client.access import page_url
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.watched_link import WatchedLink
from tests.farm_crowd import crowd
from tests.farm_service import KEYS, token

PAGE = ("/", "/page.css", "/page.js")


def client(farm: Farm, **public: bool) -> httpx.AsyncClient:
    app = farm_app(farm, Access(KEYS, public=OpenPages(**public)))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://farm")


def bearer(run: str = "*", scope: Any = "run") -> dict[str, str]:
    return {"Authorization": f"Bearer {token(run, scope)}"}


@pytest.fixture
def farm() -> Farm:
    farm = Farm(FakeBackend())
    crowd(farm, 2, 6, ("a", "b"))
    farm.leads = True
    return farm


@pytest.fixture
async def http(farm: Farm) -> AsyncIterator[httpx.AsyncClient]:
    async with client(farm) as made:
        yield made


@pytest.mark.parametrize("path", PAGE)
async def test_the_page_needs_no_token_and_holds_no_data(http: httpx.AsyncClient, path: str) -> None:
    reply = await http.get(path)
    assert reply.status_code == 200
    assert "crowd-1" not in reply.text
    policy = reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert reply.headers["Referrer-Policy"] == "no-referrer"


async def test_the_page_asks_nobody_else(http: httpx.AsyncClient) -> None:
    for path in PAGE:
        addresses = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", (await http.get(path)).text)
        assert [one for one in addresses if "www.w3.org/2000/svg" not in one] == []
    page = (await http.get("/")).text
    assert set(re.findall(r'(?:src|href)="([^"]*)"', page)) == {"data:,", "page.css", "page.js", "#runs-title"}
    assert " style=" not in page
    assert not re.search(r"\son\w+=", page)


@pytest.mark.parametrize("path", ["/v1/sight", "/v1/sight/changes", "/metrics", "/v1/leases/c/0/1/tail"])
async def test_data_needs_a_token(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(path)).status_code == 401


async def test_every_scope_may_look_and_only_some_may_read_outputs(http: httpx.AsyncClient) -> None:
    assert ROUTES["GET /v1/leases/{container}/{slot}/{epoch}/tail"] == "look"
    path = "/v1/leases/crowd-100/0/3/tail"
    assert (await http.get("/v1/sight", headers=bearer(scope="read"))).status_code == 200
    assert (await http.get(path, headers=bearer(scope="read"))).status_code == 403


@pytest.mark.parametrize(
    ("run", "lease"),
    [
        ("b", "crowd-100/0/3"),
        ("a", "crowd-100/0/4"),
        ("a", "crowd-100/99/3"),
        ("a", "nowhere/0/3"),
        ("*", "crowd-100/5/3"),
    ],
)
async def test_the_tail_of_a_lease_that_is_not_the_tokens_is_not_there(
    http: httpx.AsyncClient, run: str, lease: str
) -> None:
    reply = await http.get(f"/v1/leases/{lease}/tail", headers=bearer(run))
    assert reply.status_code == 404
    assert "no lease" in reply.json()["message"]


async def test_metrics_are_open_by_setting(farm: Farm) -> None:
    async with client(farm, metrics=True) as open_to_all:
        reply = await open_to_all.get("/metrics")
    assert reply.status_code == 200
    assert "agentenv_farm_leader 1.0" in reply.text
    assert reply.headers["Content-Type"].startswith("text/plain")


async def test_a_standby_answers_for_itself_only_with_metrics(farm: Farm) -> None:
    farm.leads, farm.leader_url = False, "http://leader"
    async with client(farm) as http:
        assert "agentenv_farm_leader 0.0" in (await http.get("/metrics", headers=bearer())).text
        assert (await http.get("/health")).json()["leader_url"] == "http://leader"
        assert (await http.get("/v1/sight")).headers["Location"] == "http://leader/v1/sight"
        for page in ("/", "/page.js", "/page.css"):  # the page takes its token along, which a redirection would lose
            assert (await http.get(page)).status_code == 200


class Lines:
    """Lines without end, of which somebody waits to hear that they are over."""

    def __init__(self) -> None:
        self.closed = False

    async def come(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"{}\n"
        finally:
            self.closed = True

    async def answer(self) -> LineStream:
        return await LineStream.of(self.come())


async def test_a_reader_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_routes, "UNREAD_S", 0.05)
    lines = Lines()

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    with pytest.raises(UnreadError):
        await (await lines.answer()).stream_response(send)
    assert lines.closed


async def test_a_reader_that_has_gone_before_the_answer_leaves_nothing_behind() -> None:
    lines = Lines()

    async def send(_: MutableMapping[str, Any]) -> None:
        raise OSError("it has gone")

    with pytest.raises(OSError, match="it has gone"):
        await (await lines.answer()).stream_response(send)
    assert lines.closed


async def test_what_is_refused_is_refused_before_the_answer_begins() -> None:
    async def refused() -> AsyncGenerator[bytes, None]:
        raise ConnectionLostError("of the test")
        yield b""

    with pytest.raises(ConnectionLostError):
        await LineStream.of(refused())


async def test_tails_are_bounded_and_one_that_ends_makes_room(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_routes, "MAX_TAILS", 1)
    begun, going = asyncio.Event(), asyncio.Event()

    async def lines(*_: object) -> AsyncGenerator[bytes, None]:
        begun.set()
        yield b"{}\n"
        await going.wait()

    link: Any = object.__new__(WatchedLink)
    monkeypatch.setattr(WatchedLink, "tail", lines)
    farm.manager.links["crowd-100"] = link
    async with client(farm) as http:
        path = "/v1/leases/crowd-100/0/3/tail"
        first = asyncio.create_task(http.get(path, headers=bearer()))
        await asyncio.wait_for(begun.wait(), 60)
        reply = await http.get(path, headers=bearer())
        assert (reply.status_code, "Retry-After" in reply.headers) == (429, True)
        going.set()
        assert (await first).text == "{}\n"
        assert (await http.get(path, headers=bearer())).text == "{}\n"


def test_the_token_is_in_the_part_of_the_address_that_is_not_sent() -> None:
    assert page_url("https://farm:8700/", "a.b.c") == "https://farm:8700/#token=a.b.c"
