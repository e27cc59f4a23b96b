"""Finds a build of the machine's bash that starts faster: the same version, linked statically.

Most of a short call is bash starting, and a third of that is the dynamic linker. The static build (Debian's
``bash-static``) of the very same version behaves like bash except for loadable builtins and user names from sources
other than /etc/passwd (docs/decisions/0009). Without it everything works the same, but each call costs about 0.4
core-ms more.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

CANDIDATES = (Path("/usr/bin/bash-static"), Path("/bin/bash-static"))
BASH = Path("/usr/bin/bash")
_TIMEOUT_S = 5.0


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
