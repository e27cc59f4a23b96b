"""Content of the image, and a hash that tells whether an image was built from this source."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from agentenv.sandbox.slotagent.build import Binaries

DOCKERFILE = "docker/sandbox.Dockerfile"
IMAGE = "agentenv-sandbox:local"
LABEL_CONTENT = "agentenv.content"
PYTHON_VERSION = "3.11"
"""Python of the image's Debian; wheels with compiled parts are chosen for it, whatever Python runs this."""
REQUIREMENTS = ("aiohttp", "pydantic", "pydantic-core")
"""The ``sandbox`` extra: everything the sandbox server imports beyond this package. constraints.txt has the
versions."""

_GROUND = (
    *("__init__.py", "_version.py", "apparmor.py", "backoff.py", "deadlines.py", "errors.py", "exports.py", "locks.py"),
    *("file_names.py", "process_marks.py", "py.typed", "rooted.py", "subordinate_ids.py", "tar_headers.py"),
    *("tar_members.py", "background.py"),
)
_UNPACKING = tuple(
    f"store/{name}.py" for name in ("__init__", "erofs", "layout", "manifest", "reference", "tree", "unpacked")
)
OUR_PARTS = (*_GROUND, *_UNPACKING, "wire", "sessions", "sandbox")
"""All that the sandbox server and what unpacks images import of this package (tests follow the imports)."""
_COMPILED = "sandbox/slotagent/bin"


@dataclass(frozen=True)
class BuildFile:
    """One file of the build context."""

    name: str
    source: Path
    mode: int = 0o644


def package_entries(package: Path, programs: Binaries) -> list[BuildFile]:
    """agentenv as the container needs it, below ``site/``: no client code, and only the compiled programs of this
    list."""
    found = [
        BuildFile(f"site/agentenv/{path.relative_to(package)}", path)
        for part in OUR_PARTS
        for path in _files(package / part)
        if not str(path.relative_to(package)).startswith(_COMPILED)
    ]
    compiled = [
        BuildFile(f"site/agentenv/{_COMPILED}/{program.name}", program, 0o755) for program in vars(programs).values()
    ]
    return sorted([*found, *compiled], key=lambda entry: entry.name)


def wheel_entries(site: Path) -> list[BuildFile]:
    """The unpacked wheels, below ``site/``, without console scripts."""
    return [BuildFile(f"site/{path.relative_to(site)}", path) for path in _files(site) if path.parent != site / "bin"]


def content_hash(entries: Iterable[BuildFile], dockerfile: bytes, pins: str) -> str:
    """Hash of the image's content as 16 hexadecimal digits: names and bytes, no times or paths."""
    digest = hashlib.sha256()
    for part in (dockerfile, pins.encode()):
        digest.update(len(part).to_bytes(8, "big") + part)
    for entry in sorted(entries, key=lambda entry: entry.name):
        digest.update(f"{entry.name}\0{entry.mode:o}\0".encode())
        digest.update(hashlib.sha256(entry.source.read_bytes()).digest())
    return digest.hexdigest()[:16]


def write_context(file: IO[bytes], entries: Iterable[BuildFile], dockerfile: bytes) -> None:
    """The context as a tar file, bit for bit the same for the same entries."""
    with tarfile.open(fileobj=file, mode="w") as archive:
        _add(archive, "Dockerfile", io.BytesIO(dockerfile), len(dockerfile), 0o644)
        for entry in sorted(entries, key=lambda entry: entry.name):
            with entry.source.open("rb") as source:
                _add(archive, entry.name, source, entry.source.stat().st_size, entry.mode)


def _add(archive: tarfile.TarFile, name: str, source: IO[bytes], size_bytes: int, mode: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size_bytes, mode, 0
    archive.addfile(member, source)


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for found in sorted(path.rglob("*")):
        if found.is_file() and "__pycache__" not in found.parts:
            yield found
