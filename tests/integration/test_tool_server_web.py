"""http_fetch, web_extract and web_search against servers on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from agentenv.api.assembly import tool_server
from agentenv.api.tool_server.secrets import Secrets
from agentenv.api.tool_server.settings import ToolServerSettings
from agentenv.api.web.search import SearchResult
from agentenv.wire.calls import CallResult
from tests.integration.web_of_tests import Web, allowing, answering, bomb, echo, flood, redirecting, saying, silence
from tests.unit.api.tool_server_box import ask, lines, member, taping

KEY = "the-key-of-the-provider"


@pytest.fixture
async def site() -> AsyncIterator[Web]:
    async with Web(flood=flood, bomb=bomb, silence=silence, echo=echo) as running:
        running.pages["/"] = "<title>Start</title><main><h1>Hello</h1><p>Read <a href='/next'>on</a>.</p></main>"
        yield running


async def called(settings: ToolServerSettings, tool: str, **arguments: Any) -> CallResult:
    async with tool_server(settings) as server:
        return await ask(server, tool, **arguments)


def content(result: CallResult) -> dict[str, Any]:
    assert isinstance(result.content, dict), result
    return result.content


async def test_fetch_says_what_the_server_said(site: Web) -> None:
    site.pages["/data"] = answering({"a": "ü"}, status=418)
    async with tool_server(allowing(site)) as server:
        data = content(await ask(server, "http_fetch", url=site.url("/data")))
        head = content(await ask(server, "http_fetch", url=site.url("/echo"), method="HEAD"))
        missing = content(await ask(server, "http_fetch", url=site.url("/gone")))
    assert (data["status"], data["content_type"], json.loads(data["text"])) == (418, "application/json", {"a": "ü"})
    assert head["text"] == ""
    assert (missing["status"], missing["text"]) == (404, "no such page")


async def test_texts_are_read_in_parts(site: Web) -> None:
    site.pages["/long"] = saying("0123456789" * 10)
    async with tool_server(allowing(site)) as server:
        first = content(await ask(server, "http_fetch", url=site.url("/long"), limit=60))
        rest = content(await ask(server, "http_fetch", url=site.url("/long"), offset=first["next_offset"]))
    assert (first["total_chars"], first["next_offset"], rest["next_offset"]) == (100, 60, None)
    assert first["text"] + rest["text"] == "0123456789" * 10


async def test_charsets_and_what_is_no_text(site: Web) -> None:
    site.pages["/latin"] = saying("Grüße".encode("latin-1"), "text/plain; charset=latin-1")
    site.pages["/odd"] = saying("Grüße", "text/plain; charset=no-such-thing")
    site.pages["/png"] = saying(b"\x89PNG", "image/png")
    async with tool_server(allowing(site)) as server:
        for path in ("/latin", "/odd"):
            assert content(await ask(server, "http_fetch", url=site.url(path)))["text"] == "Grüße"
        for tool in ("http_fetch", "web_extract"):
            image = await ask(server, tool, url=site.url("/png"))
            assert (image.fault, image.exit_code) == ("none", 1)
            assert "image/png (4 bytes), not text" in image.stderr


@pytest.mark.parametrize("path", ["/flood", "/bomb"])
async def test_size_is_bounded_also_of_what_is_packed(site: Web, path: str) -> None:
    result = await called(allowing(site, network={"max_bytes": 10_000}), "http_fetch", url=site.url(path))
    assert content(result)["total_chars"] == 10_000
    assert content(result)["truncated"] is True


async def test_time_is_bounded(site: Web) -> None:
    result = await called(allowing(site, network={"timeout_s": 0.2}), "http_fetch", url=site.url("/silence"))
    assert (result.fault, result.exit_code) == ("none", 1)
    assert "did not answer within 0.2 s" in result.stderr


async def test_redirects_are_followed_and_each_is_judged(site: Web) -> None:
    async with Web() as other, tool_server(allowing(site)) as server:
        other.pages["/"] = "secret"
        site.pages["/to"] = redirecting("/relative?a=1")
        site.pages["/relative"] = saying("arrived")
        site.pages["/out"] = redirecting(other.url())
        site.pages["/inside"] = redirecting("http://169.254.169.254/latest")
        site.pages["/file"] = redirecting("file:///etc/passwd")
        site.pages["/round"] = redirecting("/round", 307)
        arrived = content(await ask(server, "http_fetch", url=site.url("/to")))
        assert (arrived["url"], arrived["text"]) == (site.url("/relative?a=1"), "arrived")
        for path in ("/out", "/inside"):
            refused = await ask(server, "http_fetch", url=site.url(path))
            assert (refused.fault, refused.error) == ("policy", "refused"), refused
        assert (await ask(server, "http_fetch", url=site.url("/file"))).fault == "model"
        endless = await ask(server, "http_fetch", url=site.url("/round"))
        assert "more than 5 times" in endless.stderr
        assert other.asked == []


async def test_a_listed_name_that_leads_to_loopback_is_refused(site: Web) -> None:
    settings = ToolServerSettings.model_validate({"network": {"allow": [{"host": "localhost", "ports": [site.port]}]}})
    result = await called(settings, "http_fetch", url=f"http://localhost:{site.port}/")
    assert (result.fault, result.error) == ("policy", "refused")
    assert "not a public address" in result.message
    assert site.asked == []


async def test_what_cannot_be_reached_is_data(site: Web) -> None:
    async with Web() as gone:
        settings = allowing(gone)
    result = await called(settings, "http_fetch", url=gone.url())
    assert (result.fault, result.exit_code) == ("none", 1)
    assert "cannot be reached" in result.stderr


async def test_no_proxy_or_cookie_of_ours_is_used(site: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    site.pages["/cookie"] = saying("x", "text/plain", 200, **{"Set-Cookie": "a=b"})
    async with tool_server(allowing(site)) as server:
        await ask(server, "http_fetch", url=site.url("/cookie"))
        told = content(await ask(server, "http_fetch", url=site.url("/echo")))
    assert "Cookie" not in told["text"]


async def test_credentials_of_a_rule_reach_the_host_and_never_the_policy(site: Web) -> None:
    rule = {"host": "127.0.0.1", "ports": [site.port], "headers": {"Authorization": "Bearer {key}"}}
    settings = ToolServerSettings.model_validate({"network": {"allow": [rule]}})
    async with tool_server(settings, secrets=Secrets({"key": KEY})) as server:
        result = await ask(server, "http_fetch", url=site.url("/echo"))
    assert site.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in result.model_dump_json()
    assert "Bearer [secret:key]" in content(result)["text"]


async def test_a_secret_cannot_be_read_in_parts(site: Web) -> None:
    rule = {"host": "127.0.0.1", "ports": [site.port], "headers": {"Authorization": "Bearer {key}"}}
    settings = ToolServerSettings.model_validate({"network": {"allow": [rule]}})
    async with tool_server(settings, secrets=Secrets({"key": KEY})) as server:
        whole = content(await ask(server, "http_fetch", url=site.url("/echo")))["text"]
        parts = [
            content(await ask(server, "http_fetch", url=site.url("/echo"), offset=at, limit=7))["text"]
            for at in range(0, len(whole), 7)
        ]
    assert "".join(parts) == whole
    assert KEY not in whole


async def test_several_pages_can_be_read_at_once(site: Web) -> None:
    """As models trained on other harnesses ask for them; one that is gone does not hide the others."""
    site.pages["/next"] = "<title>Next</title><main><h1>Second</h1><p>Text.</p></main>"
    async with tool_server(allowing(site)) as server:
        one = content(await ask(server, "web_extract", urls=[site.url()]))
        urls = [site.url(), site.url("/gone"), site.url("/next")]
        all_three = content(await ask(server, "web_extract", urls=urls))["text"]
        too_many = await ask(server, "web_extract", urls=[site.url()] * 6)
        schema: Any = next(tool.parameters for tool in server.describe().tools if tool.name == "web_extract")
    assert one["text"] == content(await called(allowing(site), "web_extract", url=site.url()))["text"]
    assert [line for line in all_three.splitlines() if line.startswith("# http")] == [f"# {url}" for url in urls]
    assert "HTTP 404" in all_three
    assert "Second" in all_three
    assert "at most 5 items" in too_many.message
    assert schema["properties"]["url"]["type"] == "string"
    assert "urls" not in schema["properties"]


async def test_extract_reads_the_page(site: Web) -> None:
    async with tool_server(allowing(site)) as server:
        read = content(await ask(server, "web_extract", url=site.url()))
        missing = await ask(server, "web_extract", url=site.url("/gone"))
    assert (read["title"], read["text"]) == ("Start", f"# Hello\n\nRead [on]({site.url('/next')}).")
    assert (missing.fault, missing.exit_code) == ("none", 1)
    assert "answered HTTP 404" in missing.stderr


async def test_a_page_made_to_tangle_the_parser_costs_only_its_own_call(
    site: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentenv.api.web.tools._READING_S", 1.0)
    site.pages["/tangle"] = "<a " * 400_000
    async with tool_server(allowing(site)) as server:
        tangled = asyncio.create_task(ask(server, "web_extract", scope=member(1), url=site.url("/tangle")))
        quick = content(await ask(server, "http_fetch", url=site.url()))
        result = await tangled
    assert quick["status"] == 200
    assert (result.fault, result.exit_code) == ("none", 1)
    assert "too nested" in result.stderr


async def test_a_recorded_web_is_replayed_without_one(site: Web, tmp_path: Any) -> None:
    for mode in ("record", "replay"):
        settings = allowing(site, cassettes={"mode": mode, "directory": str(tmp_path)})
        async with tool_server(settings) as server:
            for n in range(3):
                read = content(await ask(server, "web_extract", scope=member(n), url=site.url()))
                assert read["title"] == "Start"
                assert (await ask(server, "web_extract", scope=member(n), url=site.url("/gone"))).exit_code == 1
            new = await ask(server, "http_fetch", url=site.url(f"/new-{mode}"))
            assert new.fault == ("none" if mode == "record" else "policy")
            elsewhere = await ask(server, "http_fetch", url="http://elsewhere.example/")
            assert (elsewhere.fault, "not on the tool server's allow list" in elsewhere.message) == ("policy", True)
    assert sorted(site.asked) == ["/", "/gone", "/new-record"]
    (cassette,) = tmp_path.iterdir()
    assert len(lines(cassette)) == 4


# -- search --------------------------------------------------------------------------------------------

HITS = {"title": "A <strong>title</strong> &amp; more", "url": "http://a.example/", "snippet": "words"}


def provider(name: str, site: Web, **more: Any) -> ToolServerSettings:
    key = {} if name == "searxng" else {"key": "search"}
    return ToolServerSettings.model_validate({"search": {"provider": name, "url": site.url("/api"), **key, **more}})


async def searched(settings: ToolServerSettings, **arguments: Any) -> CallResult:
    async with tool_server(settings, secrets=Secrets({"search": KEY})) as server:
        return await ask(server, "web_search", **{"query": "what & why", **arguments})


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("searxng", {"results": [{**HITS, "content": "words"}]}),
        ("brave", {"web": {"results": [{**HITS, "description": "words"}]}}),
        ("tavily", {"results": [{**HITS, "content": "words", "score": 0.9}]}),
    ],
)
async def test_providers_are_asked_in_their_own_way(site: Web, name: str, reply: Any) -> None:
    site.pages["/api"] = site.pages["/api/search"] = answering(reply)
    result = await searched(provider(name, site), count=3)
    hit = {"title": "A title & more", "url": "http://a.example/", "snippet": "words"}
    assert content(result) == {"query": "what & why", "results": [hit]}
    if name == "searxng":
        assert site.asked == ["/api/search?format=json&q=what+%26+why"]
    elif name == "brave":
        assert site.asked == ["/api?q=what+%26+why&count=3"]
        assert site.headers[0]["X-Subscription-Token"] == KEY
    else:
        assert json.loads(site.bodies[0]) == {"query": "what & why", "max_results": 3}
        assert site.headers[0]["Authorization"] == f"Bearer {KEY}"


async def test_a_dialect_of_ones_own(site: Web) -> None:
    site.pages["/api"] = answering(
        {"data": {"hits": [{"name": "n", "href": "u", "summary": "s"}, {"name": "no link"}]}}
    )
    dialect = {
        "url": site.url("/api"), "query_field": "query", "results": "data.hits",
        "title": "name", "link": "href", "snippet": "summary",
    }  # fmt: skip
    settings = ToolServerSettings.model_validate({"search": {"provider": "custom", "dialect": dialect}})
    assert content(await searched(settings))["results"] == [{"title": "n", "url": "u", "snippet": "s"}]


async def test_fewer_than_were_sent_are_returned(site: Web) -> None:
    site.pages["/api/search"] = answering({"results": [{"url": f"u{n}", "title": None} for n in range(20)]})
    assert [hit["url"] for hit in content(await searched(provider("searxng", site), count=2))["results"]] == [
        "u0",
        "u1",
    ]


@pytest.mark.parametrize(
    ("status", "reply", "code", "asked"),
    [
        (401, {"error": f"bad key {KEY}"}, "infra", 1),
        (403, {}, "infra", 1),
        (429, {}, "connection_lost", 3),
        (503, {}, "connection_lost", 3),
        (200, "no object", "infra", 0),
    ],
)
async def test_a_failing_provider_is_ours_and_tried_again_where_that_may_help(
    site: Web, monkeypatch: pytest.MonkeyPatch, status: int, reply: Any, code: str, asked: int
) -> None:
    monkeypatch.setattr("agentenv.api.web.search._PAUSE_S", 0.01)
    page = answering(reply, status=status, **{"Retry-After": "0"}) if asked else saying("<html>", "text/html")
    site.pages["/api"] = page
    result = await searched(provider("brave", site))
    assert (result.fault, result.error) == ("infra", code)
    assert KEY not in result.message
    assert len(site.asked) == max(asked, 1)


async def test_a_busy_provider_is_asked_again(site: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.api.web.search._PAUSE_S", 0.01)

    async def busy_once(request: web.Request) -> web.StreamResponse:
        return await answering({"web": {"results": []}}, 200 if len(site.asked) > 1 else 502)(request)

    site.pages["/api"] = busy_once
    assert content(await searched(provider("brave", site)))["results"] == []


async def test_without_a_provider_search_refuses_and_says_why() -> None:
    result = await called(ToolServerSettings(), "web_search", query="x")
    assert (result.fault, result.error) == ("policy", "refused")
    assert "no search provider is configured" in result.message


async def test_a_provider_in_python(tmp_path: Any) -> None:
    class Own:
        async def search(self, query: str, count: int) -> list[SearchResult]:
            return [SearchResult(title=query, url="u", snippet=str(count))]

    async with tool_server(taping(tmp_path), search=Own()) as server:
        result = content(await ask(server, "web_search", query="q"))
    assert result["results"] == [{"title": "q", "url": "u", "snippet": "8"}]
