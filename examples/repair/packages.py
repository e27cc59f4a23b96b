"""Fetches the packages the tasks are made from: once, by exact version and hash, into a cache directory."""

from __future__ import annotations

import os
import tarfile
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from agentenv.tasks.pinned import RUNNER, Artifact, DownloadError, fetch_artifact, fetch_runner

HERE = Path(__file__).parent
MAX_UNPACKED_BYTES = 64 * 1024 * 1024
PYTEST_INI = "[pytest]\npythonpath = {root}\naddopts = -p no:cacheprovider\n"
"""Replaces the package's own pytest settings, which may require missing plugins."""

Progress = Callable[[str], None]


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
    """The directory of the test runner (:func:`agentenv.tasks.pinned.fetch_runner`)."""

    @property
    def by_name(self) -> dict[str, Package]:
        """The packages by name."""
        return {package.name: package for package in self.packages}


def cache_dir() -> Path:
    """``$AGENTENV_CACHE/repair``, else ``.cache/repair`` in the checkout."""
    named = os.environ.get("AGENTENV_CACHE")
    return (Path(named) if named else HERE.parent.parent / ".cache") / "repair"


def fetch(cache: Path | None = None, progress: Progress = lambda _: None) -> Catalogue:
    """Fetch everything in ``packages.toml``, downloading only what is not cached.

    ``progress`` is called with a file's name when that file is ready.

    Raises: DownloadError: the index cannot be reached, or a file is not the pinned one.
    """
    cache = cache or cache_dir()
    listing = _listing()
    with ThreadPoolExecutor(2) as workers:
        wanted = [*map(_artifact, listing), *RUNNER]
        for fetched in workers.map(lambda artifact: fetch_artifact(artifact, cache), wanted):
            progress(fetched.name)
    return Catalogue(tuple(_load(entry, cache) for entry in listing), fetch_runner(cache))


def package_names() -> list[str]:
    """The packages of :func:`fetch`, without fetching anything."""
    return [str(entry["name"]) for entry in _listing()]


def artifact_count() -> int:
    """How many files :func:`fetch` reports."""
    return len(_listing()) + len(RUNNER)


def _listing() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads((HERE / "packages.toml").read_text())["package"]
    return found


def _artifact(entry: dict[str, Any]) -> Artifact:
    return Artifact(entry["name"], entry["version"], entry["file"], entry["sha256"])


def _load(entry: dict[str, Any], cache: Path) -> Package:
    artifact = _artifact(entry)
    keep, mutable, tests = (tuple(map(str, entry[key])) for key in ("keep", "mutable", "tests"))
    root = str(entry["root"])
    files = {path: data for path, data in _members(fetch_artifact(artifact, cache)) if _matches(path, keep)}
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
