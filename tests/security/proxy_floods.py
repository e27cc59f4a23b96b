"""What a slot may try against its proxy, and what its neighbour does meanwhile. Standard library only: run in slots.

flood KIND PORT     the flood of that name, at the proxy on that port, until it is killed; prints a line at work
fetch PORT COUNT    fetches one after the other through the proxy on that port; prints their seconds as JSON
sink ADDRESS        the floods' own hosts: a server that answers in the ways floods need; prints a line serving
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

CONNECTIONS = 64
_POST = b"POST http://other.test:81/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
_GET = b"GET http://other.test:81/ HTTP/1.1\r\n\r\n"
_TUNNEL = b"CONNECT other.test:82 HTTP/1.1\r\n\r\n"


def _forever(first: bytes, rest: bytes) -> Iterator[bytes]:
    return itertools.chain([first], itertools.repeat(rest))


def _byte_by_byte() -> Iterator[bytes]:
    yield b"GET http://other.test:81/ HTTP/1.1\r\nX: "
    while True:
        yield b"x"


def _names() -> Iterator[bytes]:
    for number in itertools.count():
        yield b"GET http://%d-%d.flood.test/ HTTP/1.1\r\n\r\n" % (threading.get_ident(), number)


FLOODS: Mapping[str, tuple[int, Callable[[], Iterator[bytes]], str]] = MappingProxyType(
    {
        # Connections, what is sent over each until it ends, and what is done besides: "read" (and throw away), "once"
        # (a connection for each piece), "shut" (half closed after the first piece), or nothing.
        "chunks of one byte": (CONNECTIONS, lambda: _forever(_POST, b"1\r\nx\r\n" * 10_000), ""),
        "trailer fields": (CONNECTIONS, lambda: _forever(_POST + b"0\r\n", b"a\r\n" * 20_000), ""),
        "chunk extensions": (CONNECTIONS, lambda: _forever(_POST, (b"1;" + b"e" * 4000 + b"\r\nx\r\n") * 16), ""),
        "a header byte by byte": (16, _byte_by_byte, ""),
        "idle connections": (300, lambda: iter([b""]), ""),
        "half-closed tunnels": (CONNECTIONS, lambda: iter([_TUNNEL]), "shut"),
        "pipelined requests": (CONNECTIONS, lambda: _forever(_GET * 2, _GET * 1000), ""),
        "tunnels closed at once": (CONNECTIONS, lambda: itertools.repeat(_TUNNEL), "once"),
        "connections closed at once": (CONNECTIONS, lambda: itertools.repeat(b""), "once"),
        "malformed headers": (CONNECTIONS, lambda: itertools.repeat(b"x" * 30_000 + b"\r\n\r\n"), "once"),
        "names": (CONNECTIONS, _names, "once"),
        "an echo at full speed": (CONNECTIONS, lambda: _forever(_TUNNEL, b"x" * 65536), "read"),
        "a response that is not read": (CONNECTIONS, lambda: iter([b"GET http://other.test:83/ HTTP/1.1\r\n\r\n"]), ""),
        "a response of interim responses": (
            CONNECTIONS, lambda: iter([b"GET http://other.test:84/ HTTP/1.1\r\n\r\n"]), "read",
        ),
        "a response of chunks of one byte": (
            CONNECTIONS, lambda: iter([b"GET http://other.test:85/ HTTP/1.1\r\n\r\n"]), "read",
        ),
    }
)  # fmt: skip


def flood(kind: str, port: int) -> None:
    connections, pieces, how = FLOODS[kind]
    began = threading.Barrier(min(connections, 16) + 1)

    def one(number: int) -> None:
        again = False
        while True:
            try:
                _send(port, pieces(), how, began if number < 16 and not again else None)
            except OSError:
                time.sleep(0.01)
            again = True

    for number in range(connections):
        threading.Thread(target=one, args=(number,), daemon=True).start()
    began.wait(60)
    print("at work", flush=True)
    threading.Event().wait()


def _send(port: int, pieces: Iterator[bytes], how: str, began: threading.Barrier | None) -> None:
    with socket.socket() as sock:
        sock.settimeout(60)
        sock.connect(("127.0.0.1", port))
        if how == "read":
            threading.Thread(target=_read_all, args=(sock,), daemon=True).start()
        for piece in pieces:
            sock.sendall(piece)
            if began is not None:
                began.wait(60)
                began = None
            if how == "shut":
                sock.shutdown(socket.SHUT_WR)
            if how == "once":
                return
        time.sleep(60)


def _read_all(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while sock.recv(1 << 20):
            pass


def fetch(port: int, count: int) -> None:
    took_s = []
    for _ in range(count):
        began_s = time.monotonic()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sock.sendall(b"GET http://web.test/ HTTP/1.1\r\nHost: web.test\r\n\r\n")
            said = b"".join(iter(lambda: sock.recv(4096), b""))
        assert said.startswith(b"HTTP/1.1 200 "), said
        assert said.endswith(b"\nhello from 11.22.33.2\n"), said
        took_s.append(time.monotonic() - began_s)
        time.sleep(0.01)
    print(json.dumps(took_s), flush=True)


class _Sink(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            self._answer(self.request.getsockname()[1])

    def _answer(self, port: int) -> None:
        if port == 82:
            while received := self.request.recv(65536):
                self.request.sendall(received)
            return
        if port == 81:
            _read_all(self.request)
            return
        self.request.recv(65536)
        first, rest = {
            83: (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536),
            84: (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2000),
            85: (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 10_000),
        }[port]
        for piece in _forever(first, rest):
            self.request.sendall(piece)


class _Threads(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024


def sink(address: str) -> None:
    for port in range(81, 86):
        threading.Thread(target=_Threads((address, port), _Sink).serve_forever, daemon=True).start()
    print("serving", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    if sys.argv[1] == "flood":
        flood(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1] == "fetch":
        fetch(int(sys.argv[2]), int(sys.argv[3]))
    else:
        sink(sys.argv[2])
