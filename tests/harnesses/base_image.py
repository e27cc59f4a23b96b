"""python -m tests.harnesses.base_image DIRECTORY: a cache of agentenv's with Debian's base as ``debian:bookworm-slim``,
for the checks of harnesses, whose own environments cannot make it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from agentenv.sdk.roots import store_directory
from agentenv.store import Store
from agentenv.tasks.base_image import make_base
from tests.debian_images import base_in_cache

if __name__ == "__main__":
    os.environ["AGENTENV_CACHE_DIR"] = str(base_in_cache(Path(sys.argv[1])))
    make_base(Store.open(store_directory()))
