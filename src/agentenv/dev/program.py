"""The nomad program: on PATH, in the cache, the official release, or built from the Go module."""

from __future__ import annotations

import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

import httpx

from agentenv import shipped
from agentenv.config import cache_dir, nomad_releases
from agentenv.errors import SandboxUnavailableError
from agentenv.image.progress import BuildStep, Report
from agentenv.locks import locked

VERSION = "1.11.3"
OLDEST = (1, 8, 0)
"""The job needs dynamic node metadata and ``cgroupns`` in the Docker driver."""

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_TIMEOUT = httpx.Timeout(30.0, connect=5.0)
_BUILD_TIMEOUT_S = 3600
_CHUNK_BYTES = 1024 * 1024
_AS_IT_IS = {"Accept-Encoding": "identity"}
"""So that its length is known while it is fetched."""


class ReleaseError(SandboxUnavailableError):
    """The official release cannot be downloaded, or its checksum is wrong."""


def nomad_program(report: Report, *, search_path: str | None = None) -> Path:
    """Path of the program. If none is installed it is downloaded or built (minutes), once.

    ``search_path`` replaces ``$PATH`` when looking for an installed one. Raises SandboxUnavailableError naming what
    failed.
    """
    report(BuildStep("nomad", "looking for an installed one"))
    installed = shutil.which("nomad", path=search_path)
    if installed is not None and (version := version_of(Path(installed))) is not None and version >= OLDEST:
        return Path(installed)
    kept = cache_dir() / "nomad" / f"nomad-{VERSION}"
    if not kept.exists():
        waiting = BuildStep("nomad", "another process is installing it")
        with locked(kept.parent / "lock", waiting=lambda: report(waiting)):
            if not kept.exists():
                _obtain(kept, report)
    return kept


def version_of(program: Path) -> tuple[int, ...] | None:
    """Version from ``nomad version``; None if the program does not run here or is not Nomad."""
    try:
        said = subprocess.run([program, "version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.match(r"Nomad v(\d+)\.(\d+)\.(\d+)", said)
    return tuple(int(part) for part in found.groups()) if found else None


def _obtain(kept: Path, report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix=".new-", dir=kept.parent) as directory:
        made = Path(directory) / "nomad"
        try:
            download(made, nomad_releases(), report)
        except ReleaseError as error:
            report(BuildStep("nomad", f"no release ({error.message}); building it"))
            build(made, Path(directory), report, error.message)
        made.chmod(0o755)
        if version_of(made) is None:
            raise SandboxUnavailableError(
                "the nomad program that was just built does not run",
                next_step="install nomad and check that it is on PATH",
            )
        made.replace(kept)


# -- the official release ----------------------------------------------------------------------------


def download(output: Path, releases: str, report: Report, *, version: str = VERSION) -> None:
    """Fetch the release for this machine and write the program to ``output``.

    ``releases`` is the base URL of all releases. The zip must have the checksum listed by the release. Raises
    ReleaseError; then nothing is written.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise ReleaseError(f"there is no release for {platform.machine()}")
    name = f"nomad_{version}_linux_{machine}.zip"
    wanted = checksum_of(
        name, _fetch(f"{releases}/{version}/nomad_{version}_SHA256SUMS", report).decode("ascii", "replace")
    )
    content = _fetch(f"{releases}/{version}/{name}", report)
    found = hashlib.sha256(content).hexdigest()
    if found != wanted:
        raise ReleaseError(f"{name} has the checksum {found}, its release says {wanted}")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            output.write_bytes(archive.read("nomad"))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ReleaseError(f"{name} is not a valid release: {error}") from error


def checksum_of(name: str, sums: str) -> str:
    """A file's checksum in a ``SHA256SUMS`` file. Raises ReleaseError if it is not listed. Pure."""
    for line in sums.splitlines():
        digest, _, file = line.partition("  ")
        if file.strip() == name and re.fullmatch(r"[0-9a-f]{64}", digest):
            return digest
    raise ReleaseError(f"the release does not state a checksum of {name}")


def _fetch(url: str, report: Report) -> bytes:
    """Body of a URL, with progress reports. Fails fast when the host cannot be reached."""
    parts: list[bytes] = []
    try:
        with httpx.stream("GET", url, headers=_AS_IT_IS, follow_redirects=True, timeout=_TIMEOUT) as answer:
            answer.raise_for_status()
            total = int(answer.headers.get("Content-Length", 0))
            for part in answer.iter_raw(_CHUNK_BYTES):
                parts.append(part)
                report(BuildStep("nomad", f"downloading {url.rpartition('/')[2]}", answer.num_bytes_downloaded, total))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ReleaseError(f"{url} cannot be fetched: {error}") from error
    return b"".join(parts)


# -- the Go module -----------------------------------------------------------------------------------


def build_argv(go: str, output: Path) -> list[str]:
    """Command that builds Nomad from its Go module, with the web UI."""
    return [go, "build", "-mod=mod", "-v", "-tags", "ui,release", "-ldflags", "-s -w", "-o", str(output), _MODULE]


_MODULE = "github.com/hashicorp/nomad"


def build(output: Path, directory: Path, report: Report, why: str) -> None:
    """Build the program from ``nomad/agent`` with Go: four minutes and 4 GB of Go's caches, on two cores.

    Raises SandboxUnavailableError with the end of the compiler's output. ``why``: the reason for building.
    """
    go = shutil.which("go")
    if go is None:
        raise SandboxUnavailableError(
            f"nomad is not installed, its release cannot be downloaded ({why}), and there is no go to build it",
            next_step="install nomad, or Go 1.26 or newer, and check that it is on PATH",
        )
    module = directory / "module"
    module.mkdir()
    for name in ("go.mod", "go.sum"):
        shutil.copyfile(shipped.path(f"nomad/agent/{name}"), module / name)
    words = _compile(build_argv(go, output), module, report)
    if not output.exists():
        raise SandboxUnavailableError(
            f"building nomad failed: {' | '.join(words[-10:])}"[:1200],
            next_step="install nomad, or check that go (1.26 or newer) can reach its module proxy",
        )


def _compile(argv: list[str], module: Path, report: Report) -> list[str]:
    """Run go in ``module`` and report each package; returns the last lines of its output."""
    words: list[str] = []
    packages = 0
    environment = {**os.environ, "GOFLAGS": "", "GOWORK": "off"}
    process = subprocess.Popen(
        argv,
        cwd=module,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    with process:
        assert process.stderr is not None
        for line in process.stderr:
            words = [*words[-39:], line.strip()]
            packages += not line.startswith("go: ")
            report(BuildStep("nomad", f"building: {packages} packages, {line.strip()[:80]}"))
        try:
            process.wait(timeout=_BUILD_TIMEOUT_S)
        finally:
            process.kill()
    return words
