"""Debian packages on the disk of an image, as ``apt-get install --no-download`` finds them: no slot needs a network."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from agentenv.locks import locked

_APTS = ("./etc/apt", "./usr/share/keyrings", "./var/lib/apt", "./var/lib/dpkg")
_FOUND = ("var/lib/apt/lists", "var/cache/apt/archives")


def packages_above(base: Path, packages: Sequence[str], cache: Path) -> Path:
    """A layer above Debian's base (a tar) with these packages and all that they need, not installed, and apt's lists.
    Kept in ``cache``."""
    made = cache / f"packages-{hashlib.sha256(f'{base.name} {packages}'.encode()).hexdigest()[:16]}.tar"
    with locked(cache / "packages.lock", waiting=lambda: None):
        if not made.exists():
            _download(base, packages, made)
    return made


def _download(base: Path, packages: Sequence[str], made: Path) -> None:
    with tempfile.TemporaryDirectory(dir=made.parent) as directory:
        root = Path(directory) / "root"
        root.mkdir()
        # The host's apt, as if the base were installed: what that has is not downloaded, the rest is of its release.
        subprocess.run(["tar", "-C", str(root), "-xf", str(base), *_APTS], check=True)
        (root / "var/cache/apt/archives/partial").mkdir(parents=True)
        apt = ["apt-get", "-q", "-y", "--no-install-recommends", *_as_if_installed(root)]
        for verb in (["update"], ["install", "--download-only", *packages]):
            subprocess.run([*apt, *verb], check=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
        part = Path(directory) / "layer.tar"
        with tarfile.open(part, "w") as layer:
            for name in _FOUND:
                layer.add(root / name, name)
        part.replace(made)


def _as_if_installed(root: Path) -> list[str]:
    """Options with which apt reads and writes the files of ``root`` only."""
    options = {
        "Dir": root,
        "Dir::State::status": root / "var/lib/dpkg/status",
        "Dir::Etc::TrustedParts": root / "etc/apt/trusted.gpg.d",
        "APT::Sandbox::User": "root",
        "APT::Keep-Downloaded-Packages": "true",
        "DPkg::Post-Invoke": "",
    }
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
