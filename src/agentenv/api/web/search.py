"""``web_search`` with a configurable provider: SearXNG, Brave, Tavily, or any HTTP API that answers JSON."""

from __future__ import annotations

import asyncio
import html
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Any, Final, Protocol, Self

import aiohttp
from pydantic import BaseModel, Field

from agentenv.api.tool_server.secrets import Secrets
from agentenv.api.tool_server.settings import SearchDialect, SearchSettings
from agentenv.api.tool_server.tool import ExternalTool, external_tool
from agentenv.backoff import pause_s
from agentenv.errors import ConnectionLostError, InfraError, PoolClosedError

DIALECTS: Final[Mapping[str, SearchDialect]] = {
    # https://docs.searxng.org/dev/search_api: formats other than html must be on in its settings.yml
    "searxng": SearchDialect(url="http://searxng.invalid/search", fields={"format": "json"}),
    # https://api-dashboard.search.brave.com/api-reference/web/search/get
    "brave": SearchDialect(
        url="https://api.search.brave.com/res/v1/web/search",
        count_field="count",
        key_header=("X-Subscription-Token", "{key}"),
        results="web.results",
        snippet="description",
    ),
    # https://docs.tavily.com/documentation/api-reference/endpoint/search
    "tavily": SearchDialect(
        url="https://api.tavily.com/search",
        method="POST",
        query_field="query",
        count_field="max_results",
        key_header=("Authorization", "Bearer {key}"),
    ),
}

_TRIES: Final = 3
_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 8.0
_MARKS: Final = re.compile(r"<[^>]{1,40}>")


class SearchResult(BaseModel):
    """One result, plain text."""

    title: str
    url: str
    snippet: str


class SearchProvider(Protocol):
    """A web search provider; pass your own to :class:`SearchTool`."""

    async def search(self, query: str, count: int) -> list[SearchResult]:
        """At most ``count`` results, best first. Raises: InfraError when the provider fails: never the model's
        fault."""


@dataclass(frozen=True)
class _Busy:
    failure_text: str
    wait_s: float


class HttpSearch:
    """Queries a provider over HTTP; an async context manager. Retries briefly when the provider is busy or the
    connection is cut."""

    def __init__(self, settings: SearchSettings, secrets: Secrets) -> None:
        dialect = settings.dialect or DIALECTS[settings.provider]
        self._dialect = dialect.model_copy(update={"url": _endpoint(settings)} if settings.url else {})
        self._name = settings.provider
        self._headers = {"Accept": "application/json"}
        if settings.key is not None and dialect.key_header is not None:
            name, text = dialect.key_header
            self._headers[name] = text.replace("{key}", secrets.value(settings.key))
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(headers=self._headers, cookie_jar=aiohttp.DummyCookieJar())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def ended(self, trajectory: str) -> None:
        """Does nothing: there is no state."""

    async def search(self, query: str, count: int) -> list[SearchResult]:
        """At most ``count`` results.

        Raises: ConnectionLostError: the provider stayed unreachable or busy. InfraError: it refused the request
        (its key, say), or its answer has an unexpected form.
        """
        failure = ""
        for attempt in range(_TRIES):
            try:
                answer = await self._request(query, count)
            except (aiohttp.ClientError, OSError) as error:
                failure, wait_s = f"{type(error).__name__}: {error}", 0.0
            else:
                if isinstance(answer, list):
                    return answer[:count]
                failure, wait_s = answer.failure_text, answer.wait_s
            if attempt + 1 < _TRIES:
                wait_s = max(wait_s, pause_s(_PAUSE_S, _LONGEST_PAUSE_S, attempt + 1))
                await asyncio.sleep(min(wait_s, _LONGEST_PAUSE_S))
        raise ConnectionLostError(f"the search provider {self._name} failed {_TRIES} times: {failure}")

    async def _request(self, query: str, count: int) -> list[SearchResult] | _Busy:
        """The results, or a sign that the request may be repeated."""
        if self._session is None or self._session.closed:
            raise PoolClosedError("the tool server is closed")
        dialect = self._dialect
        sent: dict[str, Any] = {**dialect.fields, dialect.query_field: query}
        if dialect.count_field is not None:
            sent[dialect.count_field] = min(count, dialect.most)
        given: dict[str, Any] = {"params": sent} if dialect.method == "GET" else {"json": sent}
        async with self._session.request(dialect.method, dialect.url, allow_redirects=False, **given) as answer:
            raw = await answer.read()
            if answer.status == 429 or answer.status >= 500:
                waits = answer.headers.get("Retry-After", "")
                return _Busy(f"HTTP {answer.status}", float(waits) if waits.isdigit() else 0.0)
            if answer.status != 200:
                failure_text = raw[:300].decode("utf-8", "replace")
                raise InfraError(
                    f"the search provider {self._name} refused the request: HTTP {answer.status}: {failure_text}",
                    next_step="check key and url in the tool server's [search]",
                )
        return _hits(raw, dialect, self._name)


class SearchTool:
    """``web_search`` over a provider; without a provider every call is refused with the reason."""

    def __init__(self, provider: SearchProvider | None) -> None:
        self._provider = provider

    def tool(self) -> ExternalTool:
        """The tool."""
        missing = "no search provider is configured on the tool server ([search] in its config)"
        return external_tool(
            self.web_search,
            timeout_s=60.0,
            concurrent=8,
            repeatable=True,
            unavailable="" if self._provider is not None else missing,
        )

    async def web_search(
        self,
        query: Annotated[str, Field(min_length=1, max_length=400, description="What to search for.")],
        count: Annotated[int, Field(ge=1, le=20, description="Maximum number of results.")] = 8,
    ) -> dict[str, Any]:
        """Search the web. Returns titles, URLs and snippets; read a page with web_extract."""
        assert self._provider is not None  # unavailable otherwise
        hits = await self._provider.search(query, count)
        return {"query": query, "results": [hit.model_dump() for hit in hits]}


def _endpoint(settings: SearchSettings) -> str:
    """The given URL; a bare SearXNG address gets its /search."""
    url = settings.url or ""
    if settings.provider == "searxng" and not url.rstrip("/").endswith("/search"):
        return url.rstrip("/") + "/search"
    return url


def _hits(raw: bytes, dialect: SearchDialect, name: str) -> list[SearchResult]:
    try:
        found = json.loads(raw)
        for key in dialect.results.split("."):
            found = found.get(key, []) if isinstance(found, dict) else []
        if not isinstance(found, list):
            raise TypeError(f"{dialect.results} is not a list")
        return [_hit(entry, dialect) for entry in found if isinstance(entry, dict) and entry.get(dialect.link)]
    except (ValueError, TypeError, RecursionError) as error:
        raise InfraError(f"the search provider {name} sent an unexpected response: {error}") from error


def _hit(entry: Mapping[str, Any], dialect: SearchDialect) -> SearchResult:
    title, snippet = (_plain(entry.get(field)) for field in (dialect.title, dialect.snippet))
    return SearchResult(title=title[:500], url=str(entry[dialect.link])[:2_000], snippet=snippet[:2_000])


def _plain(value: Any) -> str:
    """Text without the highlighting marks of some providers."""
    return html.unescape(_MARKS.sub("", str(value or ""))).strip()
