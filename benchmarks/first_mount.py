"""``python -m benchmarks.first_mount STORE DIGEST TIMES``: mounts an image of a store, and prints the milliseconds of
each time. To be run in a mount namespace of its own (``unshare --mount``)."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from agentenv.sandbox.supervisor import syscalls
from agentenv.sandbox.supervisor.image_mounts import ImageMounts


def main(store: str, digest: str, times: str) -> None:
    """See the module."""
    took_ms = []
    with tempfile.TemporaryDirectory() as place:
        for _ in range(int(times)):
            mounts = ImageMounts(Path(store), Path(place))
            began = time.perf_counter()
            mounts.require(digest)
            took_ms.append(1e3 * (time.perf_counter() - began))
            (mounted,) = Path(place).iterdir()
            syscalls.umount(str(mounted))
            mounted.rmdir()
    print(json.dumps(took_ms))


if __name__ == "__main__":
    main(*sys.argv[1:])
