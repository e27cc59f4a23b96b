"""Files of the package index, pinned by their hashes and downloaded once; and the test runner that is made of them."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from agentenv.config import cache_dir
from agentenv.errors import InfraError, SandboxUnavailableError

DOWNLOAD_TIMEOUT_S: Final = 180
SLOT_PYTHON: Final = "/usr/bin/python3"


class DownloadError(InfraError):
    """A package could not be downloaded, or was not the expected one. Nothing of it was kept."""

    code = "download"


@dataclass(frozen=True)
class Artifact:
    """One file of the package index, pinned."""

    name: str
    version: str
    file: str
    sha256: str


RUNNER: Final = (
    Artifact(
        "iniconfig",
        "2.0.0",
        "iniconfig-2.0.0-py3-none-any.whl",
        "b6a85871a79d2e3b22d2d1b94ac2824226a63c6b741c88f7ae975f18b6778374",
    ),
    Artifact(
        "packaging",
        "24.2",
        "packaging-24.2-py3-none-any.whl",
        "09abb1bccd265c01f4a3aa3f7a7db064b36514d2cba19a2f694fe6150451a759",
    ),
    Artifact(
        "pluggy",
        "1.5.0",
        "pluggy-1.5.0-py3-none-any.whl",
        "44e1ad92c8ca002de6377e165f3e0f1be63266ab4d554740532335b9d75ea669",
    ),
    Artifact(
        "pytest",
        "8.3.5",
        "pytest-8.3.5-py3-none-any.whl",
        "c69214aa47deac29fad6c2a4f590b9c4a9fdb16a403176fe154b79c0b4d4d820",
    ),
)
"""What runs tests in slots, unpacked next to the tested files: pytest, and what it needs."""


def slot_python() -> str:
    """The interpreter of slots, with which tasks are therefore verified: the system's ``python3``.

    Raises: SandboxUnavailableError: there is none. (Our own may be where slots cannot see it.)
    """
    if not Path(SLOT_PYTHON).exists():
        raise SandboxUnavailableError(
            f"these tasks need {SLOT_PYTHON} in slots, and it is not installed",
            next_step="install it: on Debian, apt-get install python3",
        )
    return SLOT_PYTHON


def fetch_artifact(artifact: Artifact, cache: Path | None = None) -> Path:
    """The file in the cache, downloaded with pip unless it is there. Raises: DownloadError."""
    downloads = (cache or _cache()) / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    target = downloads / artifact.file
    if not (target.exists() and _sha256(target) == artifact.sha256):
        with tempfile.TemporaryDirectory(dir=downloads) as directory:
            _download(artifact, Path(directory)).replace(target)
    return target


def fetch_runner(cache: Path | None = None) -> Path:
    """The directory of the test runner's unpacked wheels, with its byte code (for this machine's ``python3``);
    everybody may read it. Never written to once it is there. Raises: DownloadError, SandboxUnavailableError."""
    cache = cache or _cache()
    wheels = [fetch_artifact(wheel, cache) for wheel in RUNNER]
    key = hashlib.sha256("".join(wheel.sha256 for wheel in RUNNER).encode() + _slot_version()).hexdigest()[:16]
    target = cache / f"runner-{key}"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            runner = Path(directory) / "runner"
            _unpack(wheels, runner)
            for path in (runner, *runner.rglob("*")):  # slots read it as another user, whatever our umask is
                path.chmod(0o755 if path.is_dir() else 0o644)
            with contextlib.suppress(FileExistsError, OSError):  # another process was faster
                runner.rename(target)
    return target


def _cache() -> Path:
    return cache_dir() / "pypi"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _download(artifact: Artifact, directory: Path) -> Path:
    """pip checks the hash before it opens the file (a build backend runs only for the right one)."""
    requirement = directory / "requirements.txt"
    requirement.write_text(f"{artifact.name}=={artifact.version} --hash=sha256:{artifact.sha256}\n")
    form = "--only-binary" if artifact.file.endswith(".whl") else "--no-binary"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += [form, artifact.name, "--dest", str(directory), "--requirement", str(requirement)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    found = directory / artifact.file
    if done.returncode or not found.exists() or _sha256(found) != artifact.sha256:
        output = (done.stderr or done.stdout).strip()[-800:]
        raise DownloadError(f"could not download {artifact.name} {artifact.version} with pip: {output}")
    return found


def _slot_version() -> bytes:
    command = [slot_python(), "-I", "-S", "-c", "import sys; print(sys.version)"]
    return subprocess.run(command, check=True, capture_output=True, timeout=DOWNLOAD_TIMEOUT_S).stdout


def _unpack(wheels: list[Path], target: Path) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if ".." not in PurePosixPath(name).parts]
            archive.extractall(target, [name for name in names if not name.startswith("/")])
    command = [slot_python(), "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "-s", str(target)]
    subprocess.run([*command, str(target)], check=False, capture_output=True, timeout=DOWNLOAD_TIMEOUT_S)
