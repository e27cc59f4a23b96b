"""Finds a build of the machine's bash that starts faster, the same version, linked statically; and tells whether an
image's bash is that version too.

Most of a short call is bash starting, and a third of that is the dynamic linker. The static build (Debian's
``bash-static``) of the very same version behaves like bash except for loadable builtins and user names from sources
other than /etc/passwd (docs/decisions/0009). Without it everything works the same, but each call costs about 0.4
core-ms more.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Final

CANDIDATES = (Path("/usr/bin/bash-static"), Path("/bin/bash-static"))
BASH = Path("/usr/bin/bash")
_TIMEOUT_S = 5.0
_MAX_BYTES: Final = 16 * 1024 * 1024
_VERSION: Final = re.compile(rb"@\(#\)(Bash version [ -~]{1,80})\0")
"""``sccsversion`` of bash's version.c."""
_SYSTEM: Final = re.compile(rb"-linux-\w{1,20}\0")
"""The end of ``MACHTYPE``, as distributions build with: ``x86_64-pc-linux-gnu``."""
_MAX_MACHINE_BYTES: Final = 80


def find() -> Path | None:
    """The static build of exactly the version that slots have as ``/usr/bin/bash``; None if there is none."""
    found = next((path for path in CANDIDATES if path.is_file()), None)
    if found is None or (version := _version(BASH)) is None or _version(found) != version:
        return None
    return found


def _version(program: Path) -> str | None:
    """``BASH_VERSION`` as reported by the program; None when it does not run."""
    try:
        said = subprocess.run(
            [program, "-c", "echo $BASH_VERSION"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env={},
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip()


def build_of(program: Path) -> str:
    """The version and the ``MACHTYPE`` of a bash, as its file has them: it is not run, because it may be anybody's.
    Empty for what is no bash. Raises OSError."""
    descriptor = os.open(program, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        content = file.read(_MAX_BYTES)
    version, system = _VERSION.search(content), _SYSTEM.search(content)
    if version is None or system is None:
        return ""
    begin = content.rfind(b"\0", max(0, system.start() - _MAX_MACHINE_BYTES), system.start()) + 1
    return f"{version[1].decode()}, {content[begin : system.end() - 1].decode(errors='replace')}"


def build_in(layers: Iterable[Path], path: str) -> str:
    """:func:`build_of` of the only bash that directories of the search path ``path`` have, in the layers of a root;
    empty when there are none or several, or when it cannot be told."""
    try:
        found = {_within(layer, name) for layer in layers for name in bashes_in(layer, path)}
        return build_of(found.pop()) if len(found) == 1 else ""
    except (OSError, ValueError):
        return ""


def bashes_in(layer: Path, path: str) -> list[str]:
    """The names, relative to a layer of a root, by which ``bash`` is found there, or is gone (a whiteout)."""
    names = [f"{directory}/bash".lstrip("/") for directory in path.split(":")]
    return [name for name in names if _is_there(layer / name)]


def _is_there(path: Path) -> bool:
    """Also what we may not see, or what cannot be a name."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    return True


def _within(layer: Path, name: str) -> Path:
    """The file of that name, through links that stay in the layer. Raises OSError when one leads out of it: it is
    absolute, and means another file to a slot."""
    found = Path(os.path.realpath(layer / name))
    if not found.is_relative_to(os.path.realpath(layer)):
        raise OSError(f"{name} leads out of {layer}")
    return found
