"""Heads of requests and responses: what is forwarded is written anew from what was judged."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import InvalidArgumentsError, ProtocolError
from agentenv.sandbox.proxy import heads
from agentenv.sandbox.proxy.heads import Framing


def head(*lines: str) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


@pytest.mark.parametrize(
    ("line", "host", "port", "first"),
    [
        ("GET http://a.org/x?y=http://b.org/ HTTP/1.1", "a.org", 80, "GET /x?y=http://b.org/ HTTP/1.1"),
        ("GET HTTP://A.Org.:8080 HTTP/1.0", "a.org", 8080, "GET / HTTP/1.0"),
        ("PROPFIND http://a.org?q HTTP/1.1", "a.org", 80, "PROPFIND /?q HTTP/1.1"),
        ("GET http://192.0.2.1/ HTTP/1.1", ipaddress.ip_address("192.0.2.1"), 80, "GET / HTTP/1.1"),
        ("GET http://[2001:db8::1]:81/ HTTP/1.1", ipaddress.ip_address("2001:db8::1"), 81, "GET / HTTP/1.1"),
        ("GET http://[::ffff:192.0.2.1]/ HTTP/1.1", ipaddress.ip_address("192.0.2.1"), 80, "GET / HTTP/1.1"),
    ],
)
def test_a_request_names_its_host_and_is_sent_with_its_path(line: str, host: object, port: int, first: str) -> None:
    request = heads.parse_request(head(line, "Host: other.org"))
    assert (request.host, request.port, request.tunnel) == (host, port, False)
    assert request.head.decode().splitlines()[0] == first
    assert b"other.org" not in request.head


def test_host_is_the_judged_one_and_what_is_for_the_proxy_stays_here() -> None:
    request = heads.parse_request(
        head(
            "GET http://a.org:8080/ HTTP/1.1",
            "Host: b.org",
            "Host: c.org",
            "Accept: */*",
            "Proxy-Authorization: Basic x",
            "Proxy-Connection: keep-alive",
            "Connection: X-Mine, Upgrade, Content-Length",
            "X-Mine: 1",
            "Upgrade: h2c",
            "Content-Length: 3",
            "Expect: 100-continue",
            "X-Empty:",
        )
    )
    assert request.head == head(
        "GET / HTTP/1.1",
        "Host: a.org:8080",
        "Accept: */*",
        "Content-Length: 3",
        "Expect: 100-continue",
        "X-Empty: ",
        "Connection: close",
    )
    assert request.body == 3


def test_a_tunnel_names_host_and_port() -> None:
    request = heads.parse_request(head("CONNECT [2001:DB8::1]:443 HTTP/1.1", "Host: whatever"))
    assert (str(request.host), request.port, request.tunnel) == ("2001:db8::1", 443, True)


@pytest.mark.parametrize(
    "lines",
    [
        [""],
        ["GET"],
        ["GET http://a.org/"],
        ["GET  http://a.org/ HTTP/1.1"],
        ["GET http://a.org/ HTTP/2.0"],
        ["G(T http://a.org/ HTTP/1.1"],
        ["GET /path HTTP/1.1", "Host: a.org"],
        ["GET https://a.org/ HTTP/1.1"],
        ["GET ftp://a.org/ HTTP/1.1"],
        ["GET http:a.org/ HTTP/1.1"],
        ["GET http:/// HTTP/1.1"],
        ["GET http://a.org/#part HTTP/1.1"],
        ["GET http://a.org:0/ HTTP/1.1"],
        ["GET http://a.org:65536/ HTTP/1.1"],
        ["GET http://a.org:/ HTTP/1.1"],
        ["GET http://user@a.org/ HTTP/1.1"],
        ["GET http://a.org\\@b.org/ HTTP/1.1"],
        ["GET http://a%2eorg/ HTTP/1.1"],
        ["GET http://m\xfcnchen.de/ HTTP/1.1"],
        ["GET http://2130706433/ HTTP/1.1"],
        ["GET http://[fe80::1%25eth0]/ HTTP/1.1"],
        ["GET http://a.org/\x00 HTTP/1.1"],
        ["CONNECT a.org HTTP/1.1"],
        ["CONNECT http://a.org:443 HTTP/1.1"],
        ["CONNECT a.org:443:80 HTTP/1.1"],
        ["CONNECT 2001:db8::1:443 HTTP/1.1"],
        ["GET http://a.org/ HTTP/1.1", "no colon"],
        ["GET http://a.org/ HTTP/1.1", "Space : 1"],
        ["GET http://a.org/ HTTP/1.1", "A: 1", " folded"],
        ["GET http://a.org/ HTTP/1.1", "A: 1\rB: 2"],
        ["GET http://a.org/ HTTP/1.1", "A: 1\nB: 2"],
        ["GET http://a.org/ HTTP/1.1", "A: \x00"],
        ["POST http://a.org/ HTTP/1.1", "Content-Length: -1"],
        ["POST http://a.org/ HTTP/1.1", "Content-Length: +1"],
        ["POST http://a.org/ HTTP/1.1", "Content-Length: 1, 1"],
        ["POST http://a.org/ HTTP/1.1", "Content-Length: \xb2"],
        ["POST http://a.org/ HTTP/1.1", "Content-Length: 1", "content-length: 2"],
        ["POST http://a.org/ HTTP/1.1", "Content-Length: 1", "Transfer-Encoding: chunked"],
        ["POST http://a.org/ HTTP/1.1", "Transfer-Encoding: gzip, chunked"],
        ["POST http://a.org/ HTTP/1.1", "Transfer-Encoding: chunked", "Transfer-Encoding: chunked"],
        ["POST http://a.org/ HTTP/1.1", "Transfer-Encoding: identity"],
    ],
)
def test_what_is_malformed_or_could_be_read_in_two_ways_is_refused(lines: list[str]) -> None:
    with pytest.raises(InvalidArgumentsError):
        heads.parse_request(head(*lines))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_that_reads_the_same_again_or_refused(text: bytes) -> None:
    for lead in (b"", b"GET http://a.org/", b"GET http://a.org/ HTTP/1.1\r\nA: "):
        try:
            request = heads.parse_request(lead + text + b"\r\n\r\n")
        except InvalidArgumentsError:
            continue
        assert request.tunnel or request.head.count(b"\r\n\r\n") == 1
        assert b"\r\nHost: " in request.head or request.tunnel


@pytest.mark.parametrize(
    ("lines", "method", "body"),
    [
        (["HTTP/1.1 200 OK", "Content-Length: 5"], "GET", 5),
        (["HTTP/1.1 200 OK", "Content-Length: 5", "Content-Length: 5"], "GET", 5),
        (["HTTP/1.1 200 OK", "Content-Length: 5"], "HEAD", 0),
        (["HTTP/1.1 304 Not Modified", "Content-Length: 5"], "GET", 0),
        (["HTTP/1.1 204 No Content"], "GET", 0),
        (["HTTP/1.1 200"], "GET", Framing.UNTIL_CLOSED),
        (["HTTP/1.0 200 OK"], "GET", Framing.UNTIL_CLOSED),
        (["HTTP/1.1 200 OK", "Transfer-Encoding: Chunked"], "GET", Framing.CHUNKED),
        (["HTTP/1.1 200 OK", "Transfer-Encoding: gzip"], "GET", Framing.UNTIL_CLOSED),
        (["HTTP/1.1 200 OK", "Content-Length: 5", "Content-Length: 6"], "GET", Framing.UNTIL_CLOSED),
        (["HTTP/1.1 100 Continue"], "GET", 0),
    ],
)
def test_a_response_ends_where_its_head_says(lines: list[str], method: str, body: object) -> None:
    assert heads.parse_response(head(*lines), method).body == body


def test_a_client_is_told_that_the_connection_ends_with_the_response() -> None:
    response = heads.parse_response(head("HTTP/1.1 200 OK", "Connection: keep-alive", "Keep-Alive: 5", "A: b"), "GET")
    assert response.head == head("HTTP/1.1 200 OK", "A: b", "Connection: close")
    assert heads.parse_response(head("HTTP/1.1 100 Continue"), "PUT").head == head("HTTP/1.1 100 Continue")


@pytest.mark.parametrize(
    "lines", [[""], ["SSH-2.0-OpenSSH"], ["HTTP/2 200"], ["HTTP/1.1 2000 OK"], ["HTTP/1.1 200 OK", "x"]]
)
def test_what_is_no_response_is_refused(lines: list[str]) -> None:
    with pytest.raises(ProtocolError):
        heads.parse_response(head(*lines), "GET")


def test_an_answer_of_the_proxys_own_is_a_whole_response() -> None:
    answered = heads.answer(403, "münchen.de is not allowed.")
    first, _, body = answered.partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 403 Forbidden\r\n")
    assert f"Content-Length: {len(body)}".encode() in first
    assert body.decode() == "münchen.de is not allowed.\n"
