"""E2B's envd, built from its own sources: it is not part of agentenv, and the Go module proxies do not have it
(decision 0074). The commit is pinned; git checks its content by that name, and Go each dependency by its ``go.sum``.
One line of it is changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from agentenv.config import cache_dir
from agentenv.errors import SandboxUnavailableError
from agentenv.locks import locked

SOURCE: Final = "https://github.com/e2b-dev/infra.git"
VERSION: Final = "0.6.13"
COMMIT: Final = "03166a020f0ea2da25e3a73e45518ae156db824f"
"""Of the tag ``envd-v0.6.13``."""
_PACKAGE: Final = "packages/envd"
_LICENSE: Final = "LICENSE"
_CHANGED: Final = f"{_PACKAGE}/internal/services/process/handler/handler.go"
_WRITES: Final = "`echo %d > /proc/$$/oom_score_adj && exec "
_TRIES: Final = "`{ echo %d > /proc/$$/oom_score_adj; } 2>/dev/null; exec "
"""What envd's shell does before each command. /proc is read-only in slots (decision 0072): it goes on without."""
_TIMEOUT_S: Final = 3600.0


def built() -> Path:
    """Where the program is once it was built; its licence (Apache-2.0) lies beside it."""
    return cache_dir() / "e2b" / f"envd-{VERSION}-{COMMIT[:12]}" / "envd"


def build_envd(report: Callable[[str], None], source: str = SOURCE) -> Path:
    """Build it, unless that was done before; some minutes, by git and Go. ``source``: the repository, a URL or a
    directory, which has to have the pinned commit. Raises SandboxUnavailableError that says what failed."""
    program = built()
    program.parent.parent.mkdir(parents=True, exist_ok=True)
    with locked(program.parent.parent / "lock", waiting=lambda: report("another process is building it")):
        if not program.exists():
            with tempfile.TemporaryDirectory(prefix=".new-", dir=program.parent.parent) as directory:
                made = Path(directory) / "made"
                made.mkdir()
                _make(Path(directory) / "source", made, report, source)
                made.replace(program.parent)
    return program


def _make(checkout: Path, made: Path, report: Callable[[str], None], source: str) -> None:
    git, go = _program("git", "git"), _program("go", "Go 1.26 or newer")
    report(f"fetching {source} at {COMMIT[:12]}")
    _run([git, "init", "--quiet", str(checkout)], made)
    where = source if "://" in source else str(Path(source).absolute())
    _run([git, "fetch", "--quiet", "--depth", "1", where, COMMIT], checkout)
    _run([git, "checkout", "--quiet", COMMIT], checkout)
    source_file = checkout / _CHANGED
    text = source_file.read_text()
    if text.count(_WRITES) != 1:
        raise SandboxUnavailableError(f"building envd failed: {_CHANGED} is not that of {VERSION}")
    source_file.write_text(text.replace(_WRITES, _TRIES))
    report("building envd")
    argv = [go, "build", "-trimpath", "-buildvcs=false", "-ldflags", f"-s -w -X=main.commitSHA={COMMIT[:7]}"]
    _run([*argv, "-o", str(made / "envd"), "."], checkout / _PACKAGE)
    shutil.copyfile(checkout / _LICENSE, made / _LICENSE)
    (made / "CHANGES").write_text(f"{_CHANGED}: {_WRITES} has become {_TRIES}\n")  # as the licence wants (4b)


def _program(name: str, called: str) -> str:
    if (found := shutil.which(name)) is None:
        raise SandboxUnavailableError(
            f"there is no {name} to build envd with",
            next_step=f"install {called}, or build envd elsewhere and give its path (--envd)",
        )
    return found


def _run(argv: Sequence[str], directory: Path) -> None:
    environment = {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off", "GOFLAGS": "", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            argv,
            check=False,
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxUnavailableError(f"building envd failed: {error}") from error
    if done.returncode:
        words = " | ".join(done.stderr.split("\n")[-10:])
        raise SandboxUnavailableError(
            f"building envd failed: {' '.join(argv[:3])}: {words}"[:1200],
            next_step="check that git reaches the repository (or give --source) and go its module proxy",
        )
