"""The machine's tmux with all that it needs, to be shown to image slots whose image has none.

Such an image has another C library, or none: the bundle has the dynamic linker and the libraries that tmux is linked
with, and the UTF-8 locale without which it does not start. It takes 5 MB, once for a container.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agentenv.deadlines import scaled
from agentenv.sandbox.slot_env import PATH

_LOCALE: Final = Path("/usr/lib/locale/C.utf8/LC_CTYPE")
_TIMEOUT_S: Final = scaled(10.0)


def find() -> list[tuple[str, Path]]:
    """The files of the bundle, by their names in it (:func:`agentenv.sandbox.slot_paths.bundled_tmux`); none where the
    machine has no tmux, or one that is not linked as expected."""
    program = shutil.which("tmux", path=PATH)
    if program is None or not _LOCALE.is_file():
        return []
    try:
        asked = subprocess.run(
            ["ldd", program], capture_output=True, text=True, timeout=_TIMEOUT_S, env={"PATH": PATH}, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    linked = list(_paths(asked.stdout))
    linker = [path for path in linked if path.name.startswith("ld-")]
    if len(linker) != 1:
        return []
    libraries = [(f"lib/{path.name}", path) for path in linked if path not in linker]
    return [("tmux", Path(program)), ("ld.so", linker[0]), ("locale/C.UTF-8/LC_CTYPE", _LOCALE), *libraries]


def _paths(listed: str) -> Iterator[Path]:
    """What ldd lists: ``NAME => PATH (ADDRESS)``, or ``PATH (ADDRESS)`` of the dynamic linker."""
    for line in listed.splitlines():
        named = line.rpartition("=>")[2].split()
        if named and named[0].startswith("/"):
            yield Path(named[0])
