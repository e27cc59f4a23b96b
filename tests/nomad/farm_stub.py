#!/usr/bin/env python3
"""Stands in for the program `agentenv` in the farm's job: writes how it was started, and serves /ready."""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


options = dict(zip(sys.argv[3::2], sys.argv[4::2], strict=True))
config = Path(options["--config"])
started = {
    "argv": sys.argv[1:],
    "pid": os.getpid(),
    "settings": config.read_text(),
    "key": (config.parent / "../secrets/farm.key").read_text(),
    "key_mode": (config.parent / "../secrets/farm.key").stat().st_mode & 0o777,
    "environment": {name: value for name, value in os.environ.items() if name.startswith("NOMAD_")},
}
print(json.dumps(started), flush=True)
HTTPServer(("127.0.0.1", int(options["--port"])), Ready).serve_forever()
