"""``python -m agentenv.agents.image NAME TREE…``: an image with agent programs, in this machine's store.

It is Debian, with what programs and their tasks need, and a layer for each tree of ``scripts/agent-programs``, which is
below /opt/agents there. No registry is asked, and no slot started: Debian's archive is, by mmdebstrap, the first time.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agentenv.agents.recipes import AT
from agentenv.config import cache_dir
from agentenv.errors import AgentEnvError
from agentenv.image.base import base_tarball
from agentenv.locks import locked
from agentenv.sdk.roots import store_directory
from agentenv.store import Store, StoredImage
from agentenv.store.addition import Runtime
from agentenv.store.reference import committed

PACKAGES: Final = ("python3", "git", "ca-certificates", "libstdc++6")
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def make_image(store: Store, name: str, trees: Sequence[Path]) -> StoredImage:
    """The image with these trees, directories called PROGRAM-VERSION, in the store under the name ``localhost/NAME``.
    Takes minutes the first time. Raises SandboxUnavailableError without mmdebstrap or Debian's archive, ConfigError
    when it is not a name of an image, OSError when a tree cannot be read."""
    reference = committed(name)
    place = cache_dir() / "image"
    place.mkdir(parents=True, exist_ok=True)
    with locked(place / "build.lock", waiting=lambda: None):
        base = base_tarball(place, PACKAGES)
    with tempfile.TemporaryDirectory(dir=place, prefix=".layers-") as directory:
        layers = [_layer(tree, Path(directory)) for tree in trees]
        image = store.add(None, [base, *layers], Runtime(env={"PATH": _PATH}, workdir="/workspace", cmd=("bash",)))
    store.name(str(reference), image)
    return image


def _layer(tree: Path, directory: Path) -> Path:
    """The tar of a tree: the same for the same files, whoever made them."""
    program = tree.name.rpartition("-")[0]
    made = directory / f"{program}.tar"
    with tarfile.open(made, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(tree, f"{AT}/{program}".lstrip("/"), filter=_anybody_s)
    return made


def _anybody_s(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    return entry


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m agentenv.agents.image",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name")
    parser.add_argument("trees", nargs="+", type=Path)
    given = parser.parse_args()
    try:
        image = make_image(Store.open(store_directory()), given.name, given.trees)
    except AgentEnvError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201 - a program
        return 1
    print(f"{committed(given.name).as_written} is {image.digest} in this machine's image store")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
