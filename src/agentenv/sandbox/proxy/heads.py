"""Heads of HTTP requests and responses as a proxy reads and rewrites them. Pure, strict.

What is forwarded is rewritten from what was parsed, so that the next server cannot read another request out of it
than the one that was judged.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from agentenv.errors import InvalidArgumentsError, ProtocolError
from agentenv.wire.addresses import Address, host

MAX_HEAD_BYTES: Final = 32 * 1024
_TOKEN: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # noqa: S105 - RFC 9110, 5.6.2
_LINE: Final = re.compile(rf"({_TOKEN}) ([\x21-\x7e\x80-\xff]+) HTTP/1\.([01])")
_FIELD: Final = re.compile(rf"({_TOKEN}):[ \t]*([^\x00\r\n]*?)[ \t]*")
_STATUS: Final = re.compile(r"HTTP/1\.[01] ([1-5]\d\d)(?: [^\x00\r\n]*)?")
_TARGET: Final = re.compile(r"http://([^/?#]*)([^#]*)", re.IGNORECASE)
_AUTHORITY: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?")
_LENGTH: Final = re.compile(r"[0-9]{1,18}")
_HOP_BY_HOP: Final = frozenset(
    {"connection", "keep-alive", "proxy-connection", "proxy-authorization", "proxy-authenticate", "te", "upgrade"}
)
"""RFC 9110, 7.6.1. Transfer-Encoding and Trailer stay: bodies are forwarded as they come."""
_REASONS: Final = {
    400: "Bad Request",
    403: "Forbidden",
    408: "Request Timeout",
    502: "Bad Gateway",
    503: "Service Unavailable",
}

Fields = list[tuple[str, str]]


class Framing(Enum):
    """How the end of a body is found if its head has no length."""

    CHUNKED = "chunked"
    UNTIL_CLOSED = "until closed"


Body = int | Framing
"""A body's length in bytes, or how its end is found."""


@dataclass(frozen=True)
class Request:
    """A request to be forwarded. ``head`` is empty for a tunnel (CONNECT)."""

    host: str | Address
    port: int
    method: str = "CONNECT"
    head: bytes = b""
    body: Body = 0

    @property
    def tunnel(self) -> bool:
        """Whether bytes are passed both ways unread, once the connection is there."""
        return self.method == "CONNECT"


@dataclass(frozen=True)
class Response:
    """A response's head for the client, and the body that follows it."""

    status: int
    head: bytes
    body: Body


def parse_request(head: bytes) -> Request:
    """Parse a request's head, with the empty line at its end. Raises InvalidArgumentsError, in words for a model."""
    lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    line = _LINE.fullmatch(lines[0])
    if line is None:
        raise InvalidArgumentsError("This is an HTTP proxy, and the request is not HTTP/1.1.")
    method, target, minor = line.groups()
    fields = _fields(lines[1:])
    if method == "CONNECT":
        wanted, port = _authority(target, None)
        return Request(wanted, port)
    absolute = _TARGET.fullmatch(target)
    if absolute is None:
        raise InvalidArgumentsError(
            "This is an HTTP proxy: it takes http:// URLs, and CONNECT host:port for everything else (https, git, ssh)."
        )
    wanted, port = _authority(absolute[1], 80)
    path = absolute[2] if absolute[2].startswith("/") else f"/{absolute[2]}"
    body = _request_body(fields)
    kept = [(name, value) for name, value in _end_to_end(fields) if name.lower() != "host"]
    first = f"{method} {path} HTTP/1.{minor}"
    written = _written(first, [("Host", _written_host(wanted, port)), *kept])
    return Request(wanted, port, method, written, body)


def parse_response(head: bytes, method: str) -> Response:
    """Parse the head of the response to a request of that method. The client learns that the connection ends with
    it. Raises ProtocolError when it is not an HTTP/1.1 response."""
    lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    status = _STATUS.fullmatch(lines[0])
    try:
        fields = _fields(lines[1:])
    except InvalidArgumentsError as error:
        raise ProtocolError(f"its response is malformed: {error.message}") from error
    if status is None:
        raise ProtocolError("it does not answer in HTTP/1.1")
    code = int(status[1])
    kept = [(name, value) for name, value in fields if name.lower() not in _HOP_BY_HOP]
    body = 0 if method == "HEAD" or code < 200 or code in (204, 304) else _response_body(fields)
    return Response(code, _written(lines[0], kept, closes=code >= 200), body)


def answer(status: int, message: str) -> bytes:
    """A whole response of the proxy's own: one sentence or two as text."""
    body = f"{message}\n".encode()
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nX-Agentenv-Proxy: {status}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def _fields(lines: Sequence[str]) -> Fields:
    found = [_FIELD.fullmatch(line) for line in lines]
    if not all(found):
        raise InvalidArgumentsError("A header line is malformed.")
    return [(field[1], field[2]) for field in found if field is not None]


def _end_to_end(fields: Fields) -> Fields:
    """Without those that are for this connection only."""
    named = {
        token.strip().lower() for name, value in fields if name.lower() == "connection" for token in value.split(",")
    }
    dropped = _HOP_BY_HOP | (named - {"host", "content-length", "transfer-encoding"})
    return [(name, value) for name, value in fields if name.lower() not in dropped]


def _request_body(fields: Fields) -> Body:
    """RFC 9112, 6.3; anything that two servers could read differently is refused."""
    lengths, codings = _framing(fields)
    if codings:
        if codings != ["chunked"] or lengths:
            raise InvalidArgumentsError("Of transfer encodings, only chunked is forwarded, without a Content-Length.")
        return Framing.CHUNKED
    if not lengths:
        return 0
    if len(lengths) > 1 or not _LENGTH.fullmatch(min(lengths)):
        raise InvalidArgumentsError("The Content-Length is malformed.")
    return int(min(lengths))


def _response_body(fields: Fields) -> Body:
    """RFC 9112, 6.3. What is doubtful ends with the connection, as it does for the client."""
    lengths, codings = _framing(fields)
    if codings:
        return Framing.CHUNKED if codings == ["chunked"] else Framing.UNTIL_CLOSED
    known = len(lengths) == 1 and _LENGTH.fullmatch(min(lengths))
    return int(min(lengths)) if known else Framing.UNTIL_CLOSED


def _framing(fields: Fields) -> tuple[set[str], list[str]]:
    """The different Content-Lengths, and the transfer codings."""
    lengths = {value for name, value in fields if name.lower() == "content-length"}
    return lengths, [value.lower() for name, value in fields if name.lower() == "transfer-encoding"]


def _authority(text: str, default_port: int | None) -> tuple[str | Address, int]:
    if "@" in text:
        raise InvalidArgumentsError("The URL must not contain a user name or password.")
    split = _AUTHORITY.fullmatch(text)
    port = int(split[2]) if split and split[2] else default_port
    if split is None or port is None or not 1 <= port <= 65535:
        raise InvalidArgumentsError(
            f"{text[:300]!r} is not a host and port; names in other scripts are written as xn--."
        )
    return host(split[1]), port


def _written_host(wanted: str | Address, port: int) -> str:
    name = f"[{wanted}]" if ":" in str(wanted) else str(wanted)
    return name if port == 80 else f"{name}:{port}"


def _written(first: str, fields: Fields, *, closes: bool = True) -> bytes:
    lines = [first, *(f"{name}: {value}" for name, value in fields), *(["Connection: close"] * closes), "", ""]
    return "\r\n".join(lines).encode("latin-1")
