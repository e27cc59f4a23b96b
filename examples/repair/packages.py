"""Fetches the packages the tasks are made from: once, by exact version and hash, into a cache directory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from agentenv.errors import InfraError, SandboxUnavailableError

HERE = Path(__file__).parent
MAX_UNPACKED_BYTES = 64 * 1024 * 1024
DOWNLOAD_TIMEOUT_S = 180
SLOT_PYTHON = "/usr/bin/python3"
PYTEST_INI = "[pytest]\npythonpath = {root}\naddopts = -p no:cacheprovider\n"
"""Replaces the package's own pytest settings, which may require missing plugins."""

Progress = Callable[[str], None]


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


@dataclass(frozen=True)
class Package:
    """A source distribution in memory: the workspace's content (``files``) and how to use it."""

    name: str
    version: str
    root: str
    files: dict[str, bytes]
    mutable: tuple[str, ...]
    tests: tuple[str, ...]
    sha256: str

    def with_file(self, path: str, text: str) -> dict[str, bytes]:
        """All files, one of them replaced."""
        return {**self.files, path: text.encode()}


@dataclass(frozen=True)
class Catalogue:
    """The packages in ``packages.toml``, fetched."""

    packages: tuple[Package, ...]
    runner: Path
    """The directory of the unpacked test runner, with its byte code (for this machine's ``python3``);
    everybody may read it. Never written to once it is there."""

    @property
    def by_name(self) -> dict[str, Package]:
        """The packages by name."""
        return {package.name: package for package in self.packages}


def cache_dir() -> Path:
    """``$AGENTENV_CACHE/repair``, else ``.cache/repair`` in the checkout."""
    named = os.environ.get("AGENTENV_CACHE")
    return (Path(named) if named else HERE.parent.parent / ".cache") / "repair"


def slot_python() -> str:
    """The interpreter of slots, with which tasks are therefore verified: the system's ``python3``.

    Raises: SandboxUnavailableError: there is none. (Our own may be where slots cannot see it.)
    """
    if not Path(SLOT_PYTHON).exists():
        raise SandboxUnavailableError(
            f"slots need a {SLOT_PYTHON} for these tasks, and there is none",
            next_step="install it: on Debian, apt-get install python3",
        )
    return SLOT_PYTHON


def fetch(cache: Path | None = None, progress: Progress = lambda _: None) -> Catalogue:
    """Fetch everything in ``packages.toml``, downloading only what is not cached.

    ``progress`` is called with a file's name when that file is ready.

    Raises: DownloadError: the index cannot be reached, or a file is not the pinned one.
    """
    cache = cache or cache_dir()
    listing = _listing()
    downloads = cache / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    wanted = [(entry, kind == "package") for kind in ("package", "wheel") for entry in listing[kind]]
    with ThreadPoolExecutor(2) as workers:
        for name in workers.map(lambda pair: _ensure(_artifact(pair[0]), downloads, source=pair[1]), wanted):
            progress(name)
    packages = tuple(_load(entry, downloads) for entry in listing["package"])
    return Catalogue(packages, _runner([_artifact(entry) for entry in listing["wheel"]], cache))


def fetch_runner(cache: Path | None = None) -> Path:
    """Only the test runner of :func:`fetch`: the directory of the unpacked pytest. Raises: as that."""
    cache = cache or cache_dir()
    wheels = [_artifact(entry) for entry in _listing()["wheel"]]
    downloads = cache / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    for wheel in wheels:
        _ensure(wheel, downloads, source=False)
    return _runner(wheels, cache)


def fetch_source(artifact: Artifact, cache: Path | None = None) -> Path:
    """A source distribution, downloaded unless it is cached. Raises: DownloadError."""
    downloads = (cache or cache_dir()) / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    return downloads / _ensure(artifact, downloads, source=True)


def package_names() -> list[str]:
    """The packages of :func:`fetch`, without fetching anything."""
    return [str(entry["name"]) for entry in _listing()["package"]]


def _listing() -> dict[str, list[dict[str, Any]]]:
    """``packages.toml``: its ``package`` and its ``wheel`` entries."""
    return tomllib.loads((HERE / "packages.toml").read_text())


def artifact_count() -> int:
    """How many files :func:`fetch` reports."""
    listing = _listing()
    return len(listing["package"]) + len(listing["wheel"])


def _artifact(entry: dict[str, str]) -> Artifact:
    return Artifact(entry["name"], entry["version"], entry["file"], entry["sha256"])


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _ensure(artifact: Artifact, downloads: Path, *, source: bool) -> str:
    target = downloads / artifact.file
    if not (target.exists() and _sha256(target) == artifact.sha256):
        with tempfile.TemporaryDirectory(dir=downloads) as directory:
            found = _download(artifact, Path(directory), source=source)
            found.replace(target)
    return artifact.file


def _download(artifact: Artifact, directory: Path, *, source: bool) -> Path:
    """pip checks the hash before it opens the file (a build backend runs only for the right one)."""
    requirement = directory / "requirements.txt"
    requirement.write_text(f"{artifact.name}=={artifact.version} --hash=sha256:{artifact.sha256}\n")
    form = "--no-binary" if source else "--only-binary"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += [form, artifact.name, "--dest", str(directory), "--requirement", str(requirement)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    found = directory / artifact.file
    if done.returncode or not found.exists() or _sha256(found) != artifact.sha256:
        said = (done.stderr or done.stdout).strip()[-800:]
        raise DownloadError(f"could not download {artifact.name} {artifact.version} with pip: {said}")
    return found


def _load(entry: dict[str, object], downloads: Path) -> Package:
    artifact = _artifact(entry)  # type: ignore[arg-type]
    keep, mutable, tests = (tuple(map(str, entry[key])) for key in ("keep", "mutable", "tests"))  # type: ignore[call-overload]
    root = str(entry["root"])
    files = {path: data for path, data in _members(downloads / artifact.file) if _matches(path, keep)}
    files["pytest.ini"] = PYTEST_INI.format(root=root).encode()
    chosen = tuple(sorted(path for path in files if _matches(path, mutable)))
    return Package(artifact.name, artifact.version, root, dict(sorted(files.items())), chosen, tests, artifact.sha256)


def _matches(path: str, globs: tuple[str, ...]) -> bool:
    """Glob by path segment: ``*`` does not cross a slash."""
    parts = path.split("/")
    return any(len(parts) == len(glob.split("/")) and all(map(fnmatchcase, parts, glob.split("/"))) for glob in globs)


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Regular files of a source distribution, without their leading directory. Nothing is written."""
    total = 0
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            total += member.size
            if total > MAX_UNPACKED_BYTES:
                raise DownloadError(f"{archive.name} unpacks to more than {MAX_UNPACKED_BYTES} bytes")
            if member.isreg() and ".." not in path.parts and not path.is_absolute():
                content = tar.extractfile(member)
                assert content is not None
                yield str(path), content.read()


def _runner(wheels: list[Artifact], cache: Path) -> Path:
    """The wheels unpacked into one directory of the cache, byte-compiled, readable by all."""
    key = hashlib.sha256("".join(wheel.sha256 for wheel in wheels).encode() + _slot_version()).hexdigest()[:16]
    target = cache / f"runner-{key}"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            made = Path(directory) / "runner"
            _unpack(wheels, cache / "downloads", made)
            for path in (made, *made.rglob("*")):  # slots read it as another user, whatever our umask is
                path.chmod(0o755 if path.is_dir() else 0o644)
            with contextlib.suppress(FileExistsError, OSError):  # another process was faster
                made.rename(target)
    return target


def _slot_version() -> bytes:
    command = [slot_python(), "-I", "-S", "-c", "import sys; print(sys.version)"]
    return subprocess.run(command, check=True, capture_output=True, timeout=DOWNLOAD_TIMEOUT_S).stdout


def _unpack(wheels: list[Artifact], downloads: Path, target: Path) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(downloads / wheel.file) as archive:
            names = [name for name in archive.namelist() if ".." not in PurePosixPath(name).parts]
            archive.extractall(target, [name for name in names if not name.startswith("/")])
    command = [slot_python(), "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "-s", str(target)]
    subprocess.run([*command, str(target)], check=False, capture_output=True, timeout=DOWNLOAD_TIMEOUT_S)
