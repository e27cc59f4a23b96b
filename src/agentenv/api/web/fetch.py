"""Fetches pages from allowed hosts only; each redirect is checked, size and time are bounded."""

from __future__ import annotations

import asyncio
import codecs
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Self

import aiohttp
from yarl import URL

from agentenv.api.tool_server.settings import NetworkSettings
from agentenv.api.tool_server.tool import ToolFailure
from agentenv.api.web.network import AllowList, GuardedResolver
from agentenv.errors import PoolClosedError

_REDIRECTS: Final = (301, 302, 303, 307, 308)
_CHUNK_BYTES: Final = 64 * 1024
_TEXTUAL: Final = ("json", "xml", "javascript", "yaml", "toml", "x-sh", "sql", "x-www-form-urlencoded", "csv")


@dataclass(frozen=True)
class Page:
    """One response. ``url`` is the last one of the redirects; ``truncated``: there was more after ``body``."""

    url: str
    status: int
    content_type: str
    charset: str | None
    body: bytes
    truncated: bool

    @property
    def textual(self) -> bool:
        """Whether the body is text."""
        kind = self.content_type
        return not kind or kind.startswith("text/") or any(each in kind for each in _TEXTUAL)

    @property
    def html(self) -> bool:
        """Whether the body is a web page."""
        return self.content_type in ("text/html", "application/xhtml+xml")

    def text(self) -> str:
        """The body, decoded as declared by the server or as UTF-8; invalid bytes become U+FFFD."""
        try:
            name = codecs.lookup(self.charset or "utf-8").name
        except LookupError:
            name = "utf-8"
        return self.body.decode(name, "replace")


class WebFetcher:
    """An HTTP client under an allow list; an async context manager without state per trajectory."""

    def __init__(self, settings: NetworkSettings, allowed: AllowList) -> None:
        self._settings = settings
        self._allowed = allowed
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(resolver=GuardedResolver(self._allowed), use_dns_cache=False, limit=100)
        self._session = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False, max_line_size=16_384
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def ended(self, trajectory: str) -> None:
        """Does nothing: there are no cookies and no cache."""

    async def fetch(self, url: str, method: Literal["GET", "HEAD"] = "GET") -> Page:
        """Fetch a page, following redirects.

        Raises: InvalidArgumentsError: not an http(s) URL. PolicyRefusalError: the host, its address, or a
        redirect's is not allowed. ToolFailure: it is unreachable, breaks off, redirects too often, or takes too
        long.
        """
        target = self._allowed.judged(url)
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                for _ in range(self._settings.max_redirects + 1):
                    answer = await self._request(target, method)
                    if isinstance(answer, Page):
                        return answer
                    target = self._allowed.judged(str(answer))
        except TimeoutError as error:
            raise ToolFailure(f"{_host(target)} did not answer within {self._settings.timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ToolFailure(f"{_host(target)} cannot be reached: {_reason(error)}") from error
        raise ToolFailure(f"{url} redirects more than {self._settings.max_redirects} times", keep=True)

    async def _request(self, url: URL, method: str) -> Page | URL:
        """The page, or the URL it redirects to."""
        if self._session is None or self._session.closed:
            raise PoolClosedError("the tool server is closed")
        headers = {"User-Agent": self._settings.user_agent, "Accept": "text/html,*/*;q=0.8"}
        headers |= self._allowed.headers_for(url)
        async with self._session.request(method, url, headers=headers, allow_redirects=False) as answer:
            if answer.status in _REDIRECTS and (location := answer.headers.get("Location")):
                try:
                    return url.join(URL(location))
                except ValueError as error:
                    raise ToolFailure(f"{_host(url)} redirects to nowhere: {location[:200]}", keep=True) from error
            body, truncated = await self._body(answer)
            return Page(
                url=str(url.with_fragment(None)),
                status=answer.status,
                content_type=answer.content_type if "Content-Type" in answer.headers else "",
                charset=answer.charset,
                body=body,
                truncated=truncated,
            )

    async def _body(self, answer: aiohttp.ClientResponse) -> tuple[bytes, bool]:
        body = bytearray()
        limit = self._settings.max_bytes
        while chunk := await answer.content.read(_CHUNK_BYTES):  # decompressed: a small bomb ends here, too
            body += chunk
            if len(body) > limit:
                answer.close()
                return bytes(body[:limit]), True
        return bytes(body), False


def _host(url: URL) -> str:
    return url.authority or str(url)


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "no such host"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not valid"
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or "no connection"
    return type(error).__name__ if not str(error) else f"{type(error).__name__}: {error}"[:300]
