"""``http_fetch`` and ``web_extract``: reading the web, through the allow list."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Annotated, Final, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, PlainSerializer, WithJsonSchema

from agentenv.api.tool_server.tool import ExternalTool, ToolFailure, external_tool
from agentenv.api.web.fetch import Page, WebFetcher
from agentenv.api.web.readable import Readable
from agentenv.config import launch_environment

_READING_S: Final = 20.0

Url = Annotated[str, Field(min_length=1, max_length=8_192, description="Absolute http:// or https:// URL.")]
MOST_PAGES: Final = 5


def _listed(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _unlisted(urls: tuple[str, ...]) -> str | tuple[str, ...]:
    return urls[0] if len(urls) == 1 else urls


Pages = Annotated[
    tuple[Url, ...],
    Field(min_length=1, max_length=MOST_PAGES, validation_alias=AliasChoices("url", "urls")),
    BeforeValidator(_listed),
    PlainSerializer(_unlisted),
    WithJsonSchema({"type": "string", "minLength": 1, "description": "Absolute http:// or https:// URL."}),
]
"""One URL, as the schema says. Models trained on other harnesses send a list, as ``urls``."""
Offset = Annotated[int, Field(ge=0, description="First character of the text to return, to continue reading.")]
Limit = Annotated[int, Field(ge=1, le=100_000, description="Maximum number of characters of the text.")]


class WebText(BaseModel):
    """Reply of both tools. ``next_offset``: where to continue, if there is more."""

    url: str
    status: int
    content_type: str = ""
    title: str = ""
    text: str
    total_chars: int
    next_offset: int | None = None
    truncated: bool = False
    """The page itself exceeded the size limit for fetching."""


class WebTools:
    """The tools over one fetcher. ``unavailable``: why they refuse calls; empty if they do not.

    ``redact`` removes secrets from a whole text before a part of it is returned: a page may echo a secret, and a
    choice of parts could split it so that it is not recognised.
    """

    def __init__(
        self, fetcher: WebFetcher, unavailable: str = "", redact: Callable[[str], str] = lambda text: text
    ) -> None:
        self._fetcher = fetcher
        self._redact = redact
        self._unavailable = unavailable

    def tools(self) -> tuple[ExternalTool, ...]:
        """Both tools."""
        return tuple(
            external_tool(
                function, name=name, timeout_s=60.0, concurrent=16, repeatable=True, unavailable=self._unavailable
            )
            for name, function in (("web_extract", self.web_extract), ("http_fetch", self.http_fetch))
        )

    async def web_extract(self, url: Pages, offset: Offset = 0, limit: Limit = 20_000) -> WebText:
        """Read a web page as Markdown: its main text with links and tables, without navigation and scripts."""
        if len(url) == 1:
            return await self._extract(url[0], offset, limit)
        parts = [await self._headed(each, offset, max(1, limit // len(url))) for each in url]
        text = "\n\n".join(parts)
        return WebText(url=" ".join(url), status=200, text=text, total_chars=len(text))

    async def _headed(self, url: str, offset: int, limit: int) -> str:
        """One of several pages; one that cannot be read does not hide the others."""
        try:
            read = await self._extract(url, offset, limit)
        except ToolFailure as failure:
            return f"# {url}\n\n{failure}"
        more = f"\n\n[{read.total_chars} characters; next_offset {read.next_offset}]" if read.next_offset else ""
        return f"# {url}\n\n{read.text}{more}"

    async def _extract(self, url: str, offset: int, limit: int) -> WebText:
        page = await self._fetcher.fetch(url)
        _refuse_failed(page)
        _refuse_binary(page)
        if not page.html:
            return self._part(page, "", page.text(), offset, limit, page.truncated)
        read = await _read_apart(page)
        return self._part(page, read.title, read.text, offset, limit, page.truncated or read.truncated)

    async def http_fetch(
        self, url: Url, method: Literal["GET", "HEAD"] = "GET", offset: Offset = 0, limit: Limit = 20_000
    ) -> WebText:
        """Fetch a URL and return the response body unchanged (JSON, HTML source, plain text) and its status."""
        page = await self._fetcher.fetch(url, method)
        _refuse_binary(page)
        return self._part(page, "", page.text(), offset, limit, page.truncated)

    def _part(self, page: Page, title: str, whole: str, offset: int, limit: int, truncated: bool) -> WebText:
        text = self._redact(whole)
        more = offset + limit < len(text)
        return WebText(
            url=page.url,
            status=page.status,
            content_type=page.content_type,
            title=title,
            text=text[offset : offset + limit],
            total_chars=len(text),
            next_offset=offset + limit if more else None,
            truncated=truncated,
        )


async def _read_apart(page: Page) -> Readable:
    """The readable part of the page, extracted by a separate process, which is ended whatever the page does to it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "agentenv.api.web.readable",
        page.url,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=launch_environment(),
    )
    try:
        async with asyncio.timeout(_READING_S):
            said, _ = await process.communicate(page.text().encode("utf-8", "replace"))
    except TimeoutError as error:
        raise _unreadable(page) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise _unreadable(page)
    return Readable(**json.loads(said))


def _unreadable(page: Page) -> ToolFailure:
    return ToolFailure(f"{page.url} is too large or too nested to convert to text; http_fetch returns its source")


def _refuse_failed(page: Page) -> None:
    if page.status >= 400:
        settled = page.status < 500 and page.status != 429
        raise ToolFailure(f"{page.url} answered HTTP {page.status}", keep=settled)


def _refuse_binary(page: Page) -> None:
    if page.body and not page.textual:
        raise ToolFailure(f"{page.url} is {page.content_type} ({len(page.body)} bytes), not text", keep=True)
