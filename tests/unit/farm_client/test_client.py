"""Which address of a farm is used, and what is used when it fails."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentenv.errors import ConfigError, FarmUnreachableError
from agentenv.farm_client.client import FarmAddresses


async def test_one_address_after_the_other() -> None:
    addresses = FarmAddresses(["http://a:1/", "https://b:2"])
    assert await addresses.current() == "http://a:1"
    addresses.failed("http://elsewhere:1")
    assert addresses.url == "http://a:1"
    addresses.failed("http://a:1")
    assert await addresses.current() == "https://b:2"
    addresses.failed("https://b:2")
    assert addresses.url == "http://a:1"


async def test_a_leader_is_used_until_it_fails() -> None:
    addresses = FarmAddresses(["http://a:1", "http://b:2"])
    assert addresses.follow("http://leader:3/v1/asks?x=1")
    assert await addresses.current() == "http://leader:3"
    addresses.failed("http://leader:3")
    assert addresses.url == "http://b:2"


@pytest.mark.parametrize("location", ["", "/v1/asks", "ftp://x/y", "http://leader:3/v1/asks"])
async def test_a_token_is_sent_to_no_place_that_is_none_or_in_the_clear(location: str) -> None:
    addresses = FarmAddresses("https://a:1")
    assert not addresses.follow(location)
    assert addresses.url == "https://a:1"


async def test_services_are_looked_up_when_they_are_needed_and_when_one_has_failed() -> None:
    known = [["http://10.0.0.1:8700"], [], ["http://10.0.0.2:8700", "http://10.0.0.3:8700"]]
    asked = list[str]()

    def registered(service: str) -> list[str]:
        asked.append(service)
        return known.pop(0)

    addresses = FarmAddresses("nomad://agentenv-farm", registered=registered)
    assert (addresses.url, asked) == ("nomad://agentenv-farm", [])
    assert [await addresses.current() for _ in range(3)] == ["http://10.0.0.1:8700"] * 3
    addresses.failed("http://10.0.0.1:8700")
    with pytest.raises(FarmUnreachableError, match="has no service 'agentenv-farm'"):
        await addresses.current()
    assert await addresses.current() in ("http://10.0.0.2:8700", "http://10.0.0.3:8700")
    assert asked == ["agentenv-farm"] * 3


async def test_a_fixed_address_serves_while_nomad_does_not_answer() -> None:
    def registered(_: str) -> list[str]:
        raise FarmUnreachableError("Nomad is away")

    addresses = FarmAddresses(["nomad://farm", "http://a:1"], registered=registered)
    assert await addresses.current() == "http://a:1"
    with pytest.raises(FarmUnreachableError, match="Nomad is away"):
        await FarmAddresses("nomad://farm", registered=registered).current()


async def test_nomad_says_where_a_service_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[dict[str, Any]]()

    async def answer(request: web.Request) -> web.Response:
        seen.append({**request.query, "token": request.headers.get("X-Nomad-Token")})
        if request.match_info["name"] != "agentenv-farm":
            return web.Response(status=404, text="not found")
        registered = [
            {"Address": "10.0.0.1", "Port": 8700, "Tags": None},
            {"Address": "10.0.0.2", "Port": 8701, "Tags": ["https"]},
        ]
        return web.Response(text=json.dumps(registered), content_type="application/json")

    application = web.Application()
    application.router.add_get("/v1/service/{name}", answer)
    async with TestServer(application) as server:
        monkeypatch.setenv("NOMAD_ADDR", str(server.make_url("")).rstrip("/"))
        monkeypatch.setenv("NOMAD_TOKEN", "secret")
        monkeypatch.setenv("NOMAD_NAMESPACE", "training")
        addresses = FarmAddresses("nomad://agentenv-farm")
        assert await addresses.current() == "http://10.0.0.1:8700"
        assert seen == [{"namespace": "training", "token": "secret"}]
        addresses.failed("http://10.0.0.1:8700")
        assert await addresses.current() == "https://10.0.0.2:8701"
        with pytest.raises(FarmUnreachableError, match="no service 'other'"):
            await FarmAddresses("nomad://other").current()
    with pytest.raises(FarmUnreachableError, match="does not say where"):
        await FarmAddresses("nomad://agentenv-farm").current()


@pytest.mark.parametrize("url", ["", "farm:8700", "ftp://farm", "nomad://", "nomad://farm/path", "http://"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="farm_url"):
        FarmAddresses(url)
