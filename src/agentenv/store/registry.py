"""Images from a registry, by the ``skopeo`` program: credentials, proxies, mirrors and patience are its.

It copies into an OCI layout in the store's own directory. Blobs that are there already it does not download, so an
interrupted pull continues; and for layers that the store has, empty files stand there in the place of their blobs.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agentenv.errors import ConfigError, ImageUnavailableError
from agentenv.image.progress import BuildStep, Report
from agentenv.store.manifest import machine_architecture
from agentenv.store.reference import Reference

_POLICIES: Final = (Path("/etc/containers/policy.json"), Path("~/.config/containers/policy.json"))
_LOOK_S: Final = 0.25
_LAST_WORDS: Final = 800
TAG: Final = "image"
"""Of the image in the layout."""
_CURE: Final = "check the name, the credentials (--auth-file) and that the registry is reachable, then try again"


@dataclass(frozen=True)
class RegistrySettings:
    """How registries are asked."""

    auth_file: Path | None = None
    """Credentials as ``docker login`` or ``skopeo login`` write them; None: where skopeo looks itself."""
    tls_verify: bool = True
    """False: plain HTTP, and certificates of anybody, are accepted."""
    mirrors: Mapping[str, str] = field(default_factory=dict)
    """Where to get images whose name begins with a prefix (whole parts of it): ``{"docker.io": "mirror.example/hub"}``.
    The longest prefix counts."""
    retries: int = 3
    """Of a failed request, with growing pauses."""
    timeout_s: float = 3600.0
    """Longest time of one pull."""


def mirrored(name: str, mirrors: Mapping[str, str]) -> str:
    """The name under which an image is asked for."""
    for prefix in sorted(mirrors, key=len, reverse=True):
        if name == prefix or name.startswith(f"{prefix}/"):
            return mirrors[prefix] + name.removeprefix(prefix)
    return name


def skopeo_argv(reference: Reference, settings: RegistrySettings, layout: Path) -> list[str]:
    """The command that copies an image for this machine into an OCI layout."""
    asked = Reference("docker", mirrored(reference.name, settings.mirrors), reference.tag, reference.digest)
    argv = ["skopeo", "--override-os", "linux", "--override-arch", machine_architecture()]
    if not any(policy.expanduser().exists() for policy in _POLICIES):
        argv.append("--insecure-policy")  # without a policy it refuses to work
    argv += ["copy", "--quiet", "--retry-times", str(settings.retries)]
    if settings.auth_file is not None:
        argv += ["--src-authfile", str(settings.auth_file)]
    if not settings.tls_verify:
        argv.append("--src-tls-verify=false")
    return [*argv, f"docker://{asked}", f"oci:{layout}:{TAG}"]


def download(
    reference: Reference,
    settings: RegistrySettings,
    directory: Path,
    stored: Mapping[str, int],
    lock: int,
    report: Report,
) -> Path:
    """Copy an image into an OCI layout below ``directory``, and return the layout.

    ``stored``: blobs that are not needed, with their sizes. The program inherits the descriptor ``lock``. Raises
    ConfigError when skopeo is not installed, ImageUnavailableError when it fails.
    """
    if shutil.which("skopeo") is None:
        raise ConfigError(
            "image", f"{reference} is in a registry, and skopeo is not installed", next_step="apt-get install skopeo"
        )
    layout = directory / "layout"
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    (layout / "index.json").unlink(missing_ok=True)
    _clear(blobs)
    for digest, size_bytes in stored.items():
        with (blobs / digest.removeprefix("sha256:")).open("wb") as file:
            file.truncate(size_bytes)
    _run(skopeo_argv(reference, settings, layout), layout, settings.timeout_s, lock, reference, report)
    return layout


def _clear(blobs: Path) -> None:
    """Remove stand-ins: the layers that they stood for may be gone by now."""
    for blob in blobs.iterdir():
        if blob.stat().st_blocks == 0:
            blob.unlink()


def _run(argv: Sequence[str], layout: Path, timeout_s: float, lock: int, reference: Reference, report: Report) -> None:
    before_bytes = _bytes_in(layout)
    until_s = time.monotonic() + timeout_s
    with (layout.parent / "said").open("w+b") as said:  # no pipe: nobody reads one while it works
        program = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said, pass_fds=(lock,))
        with program:
            try:
                while program.poll() is None:
                    if time.monotonic() > until_s:
                        raise ImageUnavailableError(
                            f"{reference} was not downloaded in {timeout_s:g} s", next_step=_CURE
                        )
                    report(BuildStep("download", str(reference), done=max(0, _bytes_in(layout) - before_bytes)))
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        program.wait(_LOOK_S)
            finally:
                program.kill()
        said.seek(0)
        lines = said.read().decode("utf-8", "replace").splitlines() or ["it said nothing"]
    if program.returncode:
        raise ImageUnavailableError(f"skopeo could not copy {reference}: {lines[-1][-_LAST_WORDS:]}", next_step=_CURE)


def _bytes_in(directory: Path) -> int:
    """Bytes that files take; stand-ins take none."""
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            total += 512 * path.stat().st_blocks
    return total
