"""Finds the image of this source, and builds it if it is missing."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import docker
from docker.errors import DockerException, ImageNotFound

from agentenv import shipped
from agentenv._version import __version__
from agentenv.config import cache_dir
from agentenv.errors import SandboxUnavailableError
from agentenv.image.base import base_image
from agentenv.image.context import (
    DOCKERFILE,
    IMAGE,
    LABEL_CONTENT,
    PYTHON_VERSION,
    REQUIREMENTS,
    BuildFile,
    content_hash,
    package_entries,
    wheel_entries,
    write_context,
)
from agentenv.image.engine import connect
from agentenv.image.progress import BuildStep, Report, silent
from agentenv.locks import locked
from agentenv.sandbox.slotagent.build import ensure_built

LABEL_BASE = "agentenv.base"

_STEP = re.compile(r"Step (\d+)/(\d+) : (.*)")
_BUILD_TIMEOUT_S = 1800
_PIP_TIMEOUT_S = 600
_LAST_WORDS = 600
_GLIBC_MINORS = (36, 35, 34, 31, 28, 27, 24, 17)
"""Newest first: the manylinux tags that Debian 12 (glibc 2.36) accepts."""
_INDEX = "check that pip can reach its package index"


@dataclass(frozen=True)
class ImageStatus:
    """The engine's image of a name. ``content`` and ``wanted`` are equal when it was built from this source;
    ``wanted`` is empty for images that are not built here."""

    name: str
    id: str
    size_bytes: int
    content: str
    wanted: str
    base: str = ""

    @property
    def present(self) -> bool:
        """Whether an image of that name exists."""
        return bool(self.id)

    @property
    def stale(self) -> bool:
        """Whether it is built here, and was built from another source."""
        return self.present and bool(self.wanted) and self.content != self.wanted


def built_here(name: str) -> bool:
    """Whether an image of this name may be built here: its tag is ``local``."""
    return name.rpartition(":")[2] == "local"


def image_status(client: docker.DockerClient, name: str = IMAGE) -> ImageStatus:
    """Raises SandboxUnavailableError when the engine fails or the slot's programs cannot be compiled."""
    wanted = wanted_content() if built_here(name) else ""
    try:
        found = client.images.get(name)
    except ImageNotFound:
        return ImageStatus(name, "", 0, "", wanted)
    except (DockerException, OSError) as error:
        raise SandboxUnavailableError(f"the Docker engine failed: {error}", next_step="see the engine's log") from error
    labels = found.labels or {}
    return ImageStatus(
        name, found.id, found.attrs["Size"], labels.get(LABEL_CONTENT, ""), wanted, labels.get(LABEL_BASE, "")
    )


def ensure_image(
    name: str = IMAGE, *, client: docker.DockerClient | None = None, report: Report = silent
) -> ImageStatus:
    """Return the image of that name; it is built first if its tag is ``local`` and it is missing or was built from
    another source.

    Concurrent builders make one image: the second waits for the first. Takes seconds with a warm cache, minutes
    without. Raises SandboxUnavailableError: no engine, the build failed, or the image is missing and has another
    tag.
    """
    with _client(client) as engine:
        status = image_status(engine, name)
        if status.present and not status.stale:
            return status
        if not built_here(name):
            raise SandboxUnavailableError(
                f"the Docker engine has no image {name}", next_step=f"docker pull {name}, or name another"
            )
        waiting = BuildStep("wait", "another process is building the image")
        with locked(cache_dir() / "image" / "build.lock", waiting=lambda: report(waiting)):
            status = image_status(engine, name)
            if status.present and not status.stale:
                return status
            return build_image(name, client=engine, report=report)


def build_image(name: str = IMAGE, *, client: docker.DockerClient, report: Report = silent) -> ImageStatus:
    """Build it now, whatever exists. Raises SandboxUnavailableError with the last output of the failing step."""
    cache = cache_dir() / "image"
    base = base_image(client, cache, report)
    report(BuildStep("packages", "downloading what is not cached"))
    site = site_directory(cache, shipped.path("constraints.txt"))
    ours = _package_entries()
    labels = _labels(_content(ours), base)
    with tempfile.TemporaryFile() as context:
        write_context(context, [*wheel_entries(site), *ours], _dockerfile())
        context.seek(0)
        asked = {"tag": name, "buildargs": {"BASE": base}, "labels": labels}
        follow_build(client, context, asked, report)
    _discard_predecessors(client)
    return image_status(client, name)


def pip_argv(python: str, target: Path, constraints: Path, machine: str) -> list[str]:
    """Install for the image's Python and machine, whatever those of this process are."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in _GLIBC_MINORS]
    argv = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    argv += ["--no-input", "--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON_VERSION]
    for name in platforms:
        argv += ["--platform", name]
    return [*argv, "--constraint", str(constraints), "--target", str(target), *REQUIREMENTS]


def site_directory(cache: Path, constraints: Path) -> Path:
    """A directory with the image's packages in the versions of ``constraints``, unpacked outside the build, which needs
    neither pip nor a package index; fetched if it is not in ``cache``.

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
        _run_pip(pip_argv(sys.executable, making / "site", constraints, platform.machine()))
        (making / "site").replace(directory)
    except OSError:
        if not directory.is_dir():  # unless another process was faster
            raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return directory


def _run_pip(argv: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=_PIP_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxUnavailableError(f"fetching the image's packages failed: {error}", next_step=_INDEX) from error
    if done.returncode:
        words = (done.stderr or done.stdout).strip()[-_LAST_WORDS:]
        raise SandboxUnavailableError(f"fetching the image's packages failed: {words}", next_step=_INDEX)


def follow_build(client: docker.DockerClient, context: IO[bytes], asked: Mapping[str, object], report: Report) -> None:
    """Build an image and report its steps. Raises SandboxUnavailableError when one fails."""
    _follow(_lines(client, context, asked), report)


def _lines(client: docker.DockerClient, context: IO[bytes], asked: Mapping[str, object]) -> Iterator[dict[str, str]]:
    """The engine's messages during the build. The request is sent at the first line, so its failure is raised there
    too."""
    yield from client.api.build(
        fileobj=context,
        custom_context=True,
        rm=True,
        forcerm=True,
        decode=True,
        network_mode="host",
        timeout=_BUILD_TIMEOUT_S,
        **asked,
    )


def _discard_predecessors(client: docker.DockerClient) -> None:
    """Remove images built here whose name was taken by a newer one; those still used by containers are left until
    later."""
    with contextlib.suppress(DockerException, OSError):
        for image in client.images.list(filters={"dangling": True, "label": LABEL_CONTENT}):
            with contextlib.suppress(DockerException):
                client.images.remove(image.id)


def wanted_content() -> str:
    """Content hash of an image of this source."""
    return _content(_package_entries())


def _package_entries() -> list[BuildFile]:
    return package_entries(shipped.PACKAGE, ensure_built(cache_dir()))


def _content(entries: list[BuildFile]) -> str:
    return content_hash(entries, _dockerfile(), shipped.path("constraints.txt").read_text())


def _dockerfile() -> bytes:
    return shipped.path(DOCKERFILE).read_bytes()


def _labels(content: str, base: str) -> dict[str, str]:
    return {
        "org.opencontainers.image.title": "agentenv sandbox",
        "org.opencontainers.image.description": "one container of a farm of sandbox slots",
        "org.opencontainers.image.version": __version__,
        "org.opencontainers.image.licenses": "MIT",
        LABEL_CONTENT: content,
        LABEL_BASE: base,
    }


def _follow(stream: Iterator[dict[str, str]], report: Report) -> None:
    words: list[str] = []
    try:
        for line in stream:
            text = line.get("stream", "").strip()
            if text:
                words = [*words[-19:], text]
            if found := _STEP.match(text):
                report(BuildStep("build", found[3][:100], int(found[1]), int(found[2])))
            if "error" in line:
                raise SandboxUnavailableError(
                    f"building the image failed: {line['error'].strip()}; before that: {' | '.join(words)[-600:]}",
                    next_step="check that Debian's archive is reachable; `agentenv image build` resumes the build",
                )
    except (DockerException, OSError) as error:
        raise SandboxUnavailableError(
            f"building the image failed: {error}", next_step="see the engine's log"
        ) from error


@contextmanager
def _client(given: docker.DockerClient | None) -> Iterator[docker.DockerClient]:
    if given is not None:
        yield given
        return
    client = connect()
    try:
        yield client
    finally:
        client.close()
