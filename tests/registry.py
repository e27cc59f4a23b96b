"""A real registry on this machine: Debian's docker-registry."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import START_S, wait_for


@dataclass(frozen=True)
class Registry:
    address: str
    log: Path

    def push(self, layout: Path, tag: str, *options: str) -> str:
        """Push an image of this OCI layout as ``team/app:TAG``. Returns the reference."""
        reference = f"{self.address}/team/app:{tag}"
        copy = ["skopeo", "--insecure-policy", "copy", "--quiet", "--dest-tls-verify=false", *options]
        subprocess.run([*copy, f"oci:{layout}:{tag}", f"docker://{reference}"], check=True)
        return reference

    def served(self, digest: str) -> int:
        """How often a blob was downloaded."""
        return len(re.findall(f'"GET /v2/team/app/blobs/{digest} HTTP', self.log.read_text()))


@contextmanager
def running_registry(directory: Path, auth: str = "", *, host: str = "127.0.0.1") -> Iterator[Registry]:
    log, config = directory / "log", directory / "config.yml"
    storage = f"{{filesystem: {{rootdirectory: {directory}/data}}}}"
    config.write_text(f"version: 0.1\nstorage: {storage}\nhttp: {{addr: '{host}:0'}}\n{auth}")
    with log.open("w") as said:
        process = subprocess.Popen(["docker-registry", "serve", config], stdout=said, stderr=said)
    try:
        found = wait_for(
            lambda: re.search(rf"listening on ({re.escape(host)}:\d+)", log.read_text()), START_S, log.read_text
        )
        yield Registry(found[1], log)
    finally:
        process.terminate()
        process.wait(START_S)
