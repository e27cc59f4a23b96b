"""Servers that stand for the Internet: HTTP on port 80 of each address, an echo on 7, names on 53.

    python internet.py REQUESTS ADDRESS...

Each HTTP request is a line of JSON in the file REQUESTS. ``/git/`` is git's own server over the directory of that
file; ``/slow`` sends a first byte and waits; a request with a body gets its SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
import socketserver
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit


class Handler(BaseHTTPRequestHandler):
    """One request a connection or several, as the client wants."""

    protocol_version = "HTTP/1.1"
    record: Path

    def do_GET(self) -> None:
        body = self._body()
        told = {"server": self.connection.getsockname()[0], "line": self.requestline, "headers": dict(self.headers)}
        with self.record.open("a") as record:
            record.write(json.dumps(told) + "\n")
        if self.path.startswith("/git/"):
            self._git(body)
        elif self.path == "/slow":
            self._slow()
        elif self.path == "/large":
            self._say(b"x" * (64 << 20))
        else:
            said = hashlib.sha256(body).hexdigest() if body else f"hello from {told['server']}"
            self._say(f"{said}\n".encode())

    do_POST = do_PUT = do_HEAD = do_GET

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return body

    def _say(self, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "keep-alive")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _slow(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"1")
        self.wfile.flush()
        self.rfile.read(1)  # until the other side closes
        self.close_connection = True

    def _git(self, body: bytes) -> None:
        url = urlsplit(self.path)
        env = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(self.record.parent),
            "GIT_HTTP_EXPORT_ALL": "1",
            "REMOTE_USER": "somebody",
            "PATH_INFO": url.path.removeprefix("/git"),
            "QUERY_STRING": url.query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "CONTENT_LENGTH": str(len(body)),
        }
        done = subprocess.run(["git", "http-backend"], input=body, env=env, capture_output=True, timeout=100)
        head, _, said = done.stdout.partition(b"\r\n\r\n")
        kind = next(line for line in head.decode().split("\r\n") if line.startswith("Content-Type: "))
        self._say(said, kind.removeprefix("Content-Type: "))

    def log_message(self, format: str, *args: object) -> None:
        pass


class Echo(socketserver.StreamRequestHandler):
    """Sends back what it gets; at the end of it says so, which only half a closed connection can be told."""

    def handle(self) -> None:
        while received := self.request.recv(65536):
            self.request.sendall(received)
        self.request.sendall(b"the end\n")


class Threads(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024


class Heard(socketserver.BaseRequestHandler):
    """Notes that a datagram came."""

    def handle(self) -> None:
        with Handler.record.open("a") as record:
            record.write(json.dumps({"server": "datagram"}) + "\n")


def main() -> None:
    Handler.record = Path(sys.argv[1])
    ThreadingHTTPServer.request_queue_size = 1024
    servers: list[socketserver.BaseServer] = [ThreadingHTTPServer((address, 80), Handler) for address in sys.argv[2:]]
    servers += [Threads((address, 7), Echo) for address in sys.argv[2:]]
    servers.append(socketserver.UDPServer(("0.0.0.0", 53), Heard))
    threads = [threading.Thread(target=server.serve_forever) for server in servers]
    for thread in threads:
        thread.start()
    print("serving", flush=True)


if __name__ == "__main__":
    main()
