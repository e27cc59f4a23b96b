"""Finds a build of the machine's bash that starts faster, the same version, linked statically; and finds out whether an
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

from agentenv.deadlines import scaled
from agentenv.rooted import RootedDirectory

CANDIDATES = (Path("/usr/bin/bash-static"), Path("/bin/bash-static"))
BASH = Path("/usr/bin/bash")
_TIMEOUT_S = scaled(5.0)
_MAX_BYTES: Final = 4 * 1024 * 1024
_STEP_BYTES: Final = 128 * 1024
"""Searched at once: the search holds the interpreter's lock, and an image's bash may be made to take long."""
_MAX_DIRECTORIES: Final = 64
_MAX_DEPTH: Final = 16
"""Limits of a search path, and of a directory in it."""
_VERSION: Final = re.compile(rb"@\(#\)(Bash version [ -~]{1,80})\0")
"""``sccsversion`` of bash's version.c."""
_SYSTEM: Final = re.compile(rb"-linux-\w{1,20}\0")
"""The end of ``MACHTYPE``, as distributions build with: ``x86_64-pc-linux-gnu``."""
_MAX_MACHINE_BYTES: Final = 80
_MAX_MATCH_BYTES: Final = 128


def find() -> Path | None:
    """The static build of exactly the version that slots have as ``/usr/bin/bash``; None if there is none."""
    found = next((path for path in CANDIDATES if path.is_file()), None)
    if found is None or (version := _version(BASH)) is None or _version(found) != version:
        return None
    return found


def _version(program: Path) -> str | None:
    """``BASH_VERSION`` as reported by the program; None when it does not run."""
    try:
        done = subprocess.run(
            [program, "-c", "echo $BASH_VERSION"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env={},
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def build_of(program: Path) -> str:
    """The version and the ``MACHTYPE`` of a bash, as its file has them: it is not run, because it is untrusted.
    Empty for what is not a bash. Raises OSError."""
    descriptor = os.open(program, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        content = file.read(_MAX_BYTES)
    version, system = _searched(_VERSION, content), _searched(_SYSTEM, content)
    if version is None or system is None:
        return ""
    begin = content.rfind(b"\0", max(0, system.start() - _MAX_MACHINE_BYTES), system.start()) + 1
    return f"{version[1].decode()}, {content[begin : system.end() - 1].decode(errors='replace')}"


def _searched(pattern: re.Pattern[bytes], content: bytes) -> re.Match[bytes] | None:
    steps = range(0, len(content), _STEP_BYTES)
    found = (pattern.search(content, at, at + _STEP_BYTES + _MAX_MATCH_BYTES) for at in steps)
    return next(filter(None, found), None)


def build_in(layers: Iterable[Path], path: str) -> str:
    """:func:`build_of` of the only bash that directories of the search path ``path`` have, in the layers of a root;
    empty when there are none or several, or when it is unknown, as for a path of more than 64 directories. Nothing
    outside of a layer is read. Blocks."""
    found: set[Path] = set()
    try:
        for layer in layers:
            with RootedDirectory(layer, as_root=True) as root:
                found |= {layer / root.followed(name) for name in bashes_in(layer, path)}
        return build_of(found.pop()) if len(found) == 1 else ""
    except (OSError, ValueError):
        return ""


def bashes_in(layer: Path, path: str) -> list[str]:
    """The names, relative to a layer of a root, by which ``bash`` is found there, or removed (a whiteout). Raises
    ValueError for a search path of more than 64 directories, or of deeper ones than 16; OSError."""
    names = [f"{directory}/bash".lstrip("/") for directory in path.split(":", _MAX_DIRECTORIES)]
    if len(names) > _MAX_DIRECTORIES or any(name.count("/") > _MAX_DEPTH for name in names):
        raise ValueError("the search path is too long")
    with RootedDirectory(layer, as_root=True) as root:
        return [name for name in names if _is_there(root, name)]


def _is_there(root: RootedDirectory, name: str) -> bool:
    """Also what we may not see, or what cannot be a name."""
    try:
        return root.seen(name) is not None
    except (OSError, ValueError):
        return True
