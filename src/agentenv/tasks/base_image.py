"""``python -m agentenv.tasks.base_image``: an image of Debian, where Debian's archive is reached but no registry.

It is made with mmdebstrap, as the base of agentenv's own image is, and is what NAME (by default debian:bookworm-slim)
means on this machine from then on, until that name is pulled from a registry.
"""

from __future__ import annotations

import argparse
import sys
from typing import Final

from agentenv.config import cache_dir
from agentenv.errors import AgentEnvError
from agentenv.image.base import base_tarball
from agentenv.locks import locked
from agentenv.sdk.roots import store_directory
from agentenv.store import Store, StoredImage
from agentenv.store.addition import Runtime
from agentenv.tasks.scripted import busy

NAME: Final = "debian:bookworm-slim"
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def make_base(store: Store, name: str = NAME) -> StoredImage:
    """The image, in the store under that name. Takes a minute the first time. Raises
    SandboxUnavailableError without mmdebstrap or Debian's archive; ConfigError when it is not a name of an image."""
    place = cache_dir() / "image"
    place.mkdir(parents=True, exist_ok=True)
    with locked(place / "build.lock", waiting=lambda: None):
        tarball = base_tarball(place)
    image = store.add(None, [tarball], Runtime(env={"PATH": PATH}, cmd=("bash",)))
    store.name(name, image)
    return image


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m agentenv.tasks.base_image",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", default=NAME)
    name = parser.parse_args().name
    try:
        with busy(f"making {name} of Debian's packages with mmdebstrap: a minute or two the first time"):
            image = make_base(Store.open(store_directory()), name)
    except AgentEnvError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"{name} is {image.digest} in this machine's image store")
    return 0


if __name__ == "__main__":
    sys.exit(main())
