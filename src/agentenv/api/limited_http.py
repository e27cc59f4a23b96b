"""uvicorn's HTTP with limits of what comes before a request is known: bytes and seconds of its headers."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentenv.api.door import HEADER_S

HEADER_BYTES: Final = 64 * 1024
"""Largest headers of a request, and largest trailers of its body."""

_log = logging.getLogger(__name__)
_log.setLevel(logging.ERROR)  # uvicorn warns of every request that is none: anybody could fill the disk


class LimitedHttp(HttpToolsProtocol):
    """Cuts a connection whose headers are larger than ``HEADER_BYTES`` (431) or take longer than ``HEADER_S``. What
    comes before the headers of a request, or after its answer, counts as headers."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.logger = _log
        self._header_bytes = 0
        self._loose_bytes = 0
        """Received since the parser last completed anything: the parser keeps what is incomplete."""
        self._moved = False
        self._due: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first headers are due."""
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is due any more."""
        self._headers_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse it, and count what the parser does not return."""
        if self._due is None and self.idle:
            self._expect_headers()
        self._moved = False
        super().data_received(data)
        self._loose_bytes = 0 if self._moved else self._loose_bytes + len(data)
        if self._loose_bytes > HEADER_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._header_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of its address."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request is known."""
        self._moved = True
        self._header_bytes = 0
        self._headers_came()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of its body."""
        self._moved = True
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """The parser failed; by :meth:`_count`, if the headers are too large."""
        if self._header_bytes > HEADER_BYTES:
            self._refuse()
        else:
            super().send_400_response(msg)

    def _count(self, more: int) -> None:
        self._header_bytes += more
        if self._header_bytes > HEADER_BYTES:
            raise OverflowError  # ends the parser

    def _expect_headers(self) -> None:
        self._due = self.loop.call_later(HEADER_S, self.transport.abort)

    def _headers_came(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _refuse(self) -> None:
        said = f"the headers are larger than {HEADER_BYTES} bytes".encode()
        head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\nconnection: close\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(said) + said)
        self.transport.close()
