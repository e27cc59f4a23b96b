"""A small root file system, as the layer of an image: made in a second of this machine's own programs."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import pytest

from agentenv.store import Store
from tests.image_sources import oci_layout, tar_of

PYTHON: Final = Path("/usr/bin/python3").resolve()
PROGRAMS: Final = (
    *(
        "bash",
        "cat",
        "chmod",
        "chown",
        "cp",
        "dd",
        "df",
        "env",
        "grep",
        "head",
        "id",
        "ls",
        "mkdir",
        "mv",
        PYTHON.name,
    ),
    *("rm", "seq", "setpriv", "setsid", "sleep", "stat", "tail", "touch", "tr", "true", "unshare", "wc"),
)
STANDARD_LIBRARY: Final = Path("/usr/lib") / PYTHON.name
_NOT_NEEDED: Final = ("test", "idlelib", "lib2to3", "distutils", "ensurepip", "pydoc_data", "tkinter", "unittest")
PASSWD: Final = "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/bash\n"
RUNTIME: Final = {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "FROM_IMAGE=yes"], "WorkingDir": "/work"}

Member = tuple[tarfile.TarInfo, bytes]


@lru_cache(maxsize=1)  # tens of MB
def programs(*names: str, python: bool = True) -> bytes:
    """A layer with these programs, the libraries that they need, and (``python``) what python imports."""
    paths = {Path("/usr/bin") / name for name in names}
    paths |= {library for path in paths for library in _libraries(path)}
    if python:
        paths |= set(_python())
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("lib", "lib64", "bin", "sbin"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(link)
        for path in sorted(paths):
            tar.add(path.resolve(), str(path.parent.resolve() / path.name).lstrip("/"), recursive=False)
    return target.getvalue()


def _libraries(program: Path) -> Iterable[Path]:
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return (Path(word) for line in listed.splitlines() for word in line.split() if word.startswith("/"))


def _python() -> Iterable[Path]:
    for path in STANDARD_LIBRARY.rglob("*"):
        parts = path.relative_to(STANDARD_LIBRARY).parts
        if path.is_file() and parts[0] not in _NOT_NEEDED and path.suffix in (".py", ".so", ".pyc"):
            yield path
            if path.suffix == ".so":
                yield from _libraries(path)


def add_image(store: Path, directory: Path, *layers: bytes, config: dict[str, Any] | None = None) -> str:
    """Store an image of these layers; returns its digest. ``directory`` is where its files are made."""
    oci_layout(directory, *layers, how="", config=RUNTIME if config is None else config)
    digest: str = Store.open(store).ensure(f"oci:{directory}:t").digest
    return digest


def files(*members: Member) -> bytes:
    """A layer of these entries (:func:`tests.image_sources.member`)."""
    return tar_of(*members)


def file_capability(bit: int) -> dict[str, str]:
    """The PAX headers of a program that gets this capability (permitted and effective) when it is executed
    (linux/capability.h: VFS_CAP_REVISION_2, its sets in two words each)."""
    words = (0x0200_0001, 1 << bit, 0, 0, 0)
    value = b"".join(word.to_bytes(4, "little") for word in words).decode()
    return {"SCHILY.xattr.security.capability": value}


def use_store(patch: pytest.MonkeyPatch, store: Path) -> None:
    """Containers of the local backend see this store."""
    patch.setattr("agentenv.slots.backends.local.local_store", lambda isolation: str(store))
