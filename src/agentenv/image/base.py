"""Base of the image: Debian's own slim image, or the same built here if no registry answers."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import docker
from docker.errors import APIError, DockerException, ImageNotFound

from agentenv.errors import SandboxUnavailableError
from agentenv.image.progress import BuildStep, Report

SUITE = "bookworm"
FROM_REGISTRY = f"debian:{SUITE}-slim"
MADE_HERE = f"agentenv-base:{SUITE}"

_LEFT_OUT = ("doc/*", "man/*", "locale/*", "info/*", "lintian/*", "bash-completion/*")
_TIMEOUT_S = 1200
_LAST_WORDS = 800
_ARCHIVE = "check that Debian's archive is reachable"


def base_image(client: docker.DockerClient, cache: Path, report: Report) -> str:
    """Name of an image in the engine to start from: an existing one, else pulled, else built.

    Raises SandboxUnavailableError, naming both failures, when neither works.
    """
    for name in (MADE_HERE, FROM_REGISTRY):
        if _has(client, name):
            return name
    report(BuildStep("base", f"pulling {FROM_REGISTRY}"))
    try:
        client.images.pull(FROM_REGISTRY)
    except (DockerException, OSError) as error:
        refused = " ".join(str(error).split())[:200]
    else:
        return FROM_REGISTRY
    tarball = _tarball(cache)
    if not tarball.exists():
        report(BuildStep("base", f"no registry answers; making {MADE_HERE} with mmdebstrap"))
        _make(tarball, refused)
    report(BuildStep("base", f"importing {MADE_HERE}"))
    _import(client, tarball)
    return MADE_HERE


def base_tarball(cache: Path, packages: Sequence[str] = ()) -> Path:
    """The same base made here, with these packages of Debian's besides, as the tar of its files; made if it is not in
    the cache. Raises SandboxUnavailableError."""
    tarball = _tarball(cache, packages)
    if not tarball.exists():
        _make(tarball, "not asked for", packages)
    return tarball


def _tarball(cache: Path, packages: Sequence[str] = ()) -> Path:
    return cache / f"{'-'.join(['base', SUITE, platform.machine(), *packages])}.tar"


def _has(client: docker.DockerClient, name: str) -> bool:
    try:
        client.images.get(name)
    except ImageNotFound:
        return False
    except (DockerException, OSError) as error:
        raise SandboxUnavailableError(f"the Docker engine failed: {error}", next_step="see the engine's log") from error
    return True


def mmdebstrap_argv(output: Path, packages: Sequence[str] = ()) -> list[str]:
    """Debian's required packages, apt and these, without documentation."""
    argv = ["mmdebstrap", "--quiet", "--variant=minbase", "--format=tar"]
    argv += [f"--include={','.join(packages)}"] if packages else []
    argv += [f"--dpkgopt=path-exclude=/usr/share/{pattern}" for pattern in _LEFT_OUT]
    return [*argv, "--dpkgopt=path-include=/usr/share/doc/*/copyright", SUITE, str(output)]


def _make(tarball: Path, refused: str, packages: Sequence[str] = ()) -> None:
    if shutil.which("mmdebstrap") is None:
        raise SandboxUnavailableError(
            f"no base image is available: {FROM_REGISTRY} could not be pulled ({refused}), mmdebstrap is not installed",
            next_step="apt-get install mmdebstrap, or make a registry reachable",
        )
    tarball.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".base-", dir=tarball.parent) as directory:
        made = Path(directory) / "base.tar"
        _run(mmdebstrap_argv(made, packages))
        made.replace(tarball)


def _run(argv: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False, env=_environment()
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxUnavailableError(f"making the base image failed: {error}", next_step=_ARCHIVE) from error
    if done.returncode:
        words = done.stderr.strip()[-_LAST_WORDS:]
        raise SandboxUnavailableError(f"making the base image failed: {words}", next_step=_ARCHIVE)


def _environment() -> dict[str, str]:
    return {**os.environ, "SOURCE_DATE_EPOCH": "0", "DEBIAN_FRONTEND": "noninteractive"}


def _import(client: docker.DockerClient, tarball: Path) -> None:
    repository, _, tag = MADE_HERE.partition(":")
    try:
        client.api.import_image_from_file(str(tarball), repository=repository, tag=tag)
    except (APIError, DockerException, OSError) as error:
        tarball.unlink(missing_ok=True)  # half a file would fail for ever
        raise SandboxUnavailableError(
            f"the Docker engine refused the base image: {error}",
            next_step="try again: it is rebuilt; see the engine's log",
        ) from error
