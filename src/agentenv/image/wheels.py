"""The image's packages, unpacked outside the build, which needs neither pip nor a package index."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from agentenv.errors import SandboxUnavailableError
from agentenv.image.context import PYTHON_VERSION, REQUIREMENTS

_GLIBC_MINORS = (36, 35, 34, 31, 28, 27, 24, 17)
"""Newest first: the manylinux tags that Debian 12 (glibc 2.36) accepts."""
_TIMEOUT_S = 600
_LAST_WORDS = 600
_INDEX = "check that pip can reach its package index"


def pip_argv(python: str, target: Path, constraints: Path, machine: str) -> list[str]:
    """Install for the image's Python and machine, whatever those of this process are."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in _GLIBC_MINORS]
    argv = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    argv += ["--no-input", "--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON_VERSION]
    for name in platforms:
        argv += ["--platform", name]
    return [*argv, "--constraint", str(constraints), "--target", str(target), *REQUIREMENTS]


def site_directory(cache: Path, constraints: Path) -> Path:
    """A directory with the unpacked packages in the versions of ``constraints``; fetched if it is not in ``cache``.

    Raises SandboxUnavailableError with the end of pip's output.
    """
    made_from = [*REQUIREMENTS, PYTHON_VERSION, platform.machine(), constraints.read_text()]
    name = f"site-{hashlib.sha256(chr(0).join(made_from).encode()).hexdigest()[:16]}"
    directory = cache / name
    if directory.is_dir():
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
    try:
        _run(pip_argv(sys.executable, making / "site", constraints, platform.machine()))
        (making / "site").replace(directory)
    except OSError:
        if not directory.is_dir():  # unless another process was faster
            raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return directory


def _run(argv: Sequence[str]) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxUnavailableError(f"fetching the image's packages failed: {error}", next_step=_INDEX) from error
    if done.returncode:
        words = (done.stderr or done.stdout).strip()[-_LAST_WORDS:]
        raise SandboxUnavailableError(f"fetching the image's packages failed: {words}", next_step=_INDEX)
