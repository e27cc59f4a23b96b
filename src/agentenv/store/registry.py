"""Images from a registry, by the ``skopeo`` program: credentials, proxies, mirrors and patience are its.

It copies into an OCI layout in the store's own directory. Blobs that are there already it does not download, so an
interrupted pull continues; and layers that the store has are represented by empty files in the place of their blobs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agentenv.errors import BadImageError, ConfigError, ImageUnavailableError
from agentenv.image.progress import BuildStep, Report
from agentenv.store.layout import check_room
from agentenv.store.manifest import machine_architecture
from agentenv.store.reference import Reference
from agentenv.store.route import Route

_POLICIES: Final = (Path("/etc/containers/policy.json"), Path("~/.config/containers/policy.json"))
_LOOK_S: Final = 0.25
_LAST_WORDS: Final = 800
TAG: Final = "image"
"""Of the image in the layout."""
_LOGGED: Final = re.compile(r'\bmsg=("(?:[^"\\]|\\.)*")')
"""An error of skopeo is a line of its log: ``time="…" level=fatal msg="…"``, quoted as Go and JSON do."""
_CURE: Final = "check the name, the credentials (--auth-file) and that the registry is reachable, then retry"


@dataclass(frozen=True)
class RegistrySettings:
    """Access to registries."""

    auth_file: Path | None = None
    """Credentials as ``docker login`` or ``skopeo login`` write them; None: where skopeo looks itself."""
    tls_verify: bool = True
    """False: plain HTTP and any certificate are accepted."""
    mirrors: Mapping[str, str] = field(default_factory=dict)
    """Where to get images whose name begins with a prefix (whole parts of it): ``{"docker.io": "mirror.example/hub"}``.
    The longest prefix counts."""
    retries: int = 3
    """Of a failed request, with growing pauses."""
    stall_s: float = 120.0
    """Longest time without a byte; a slow registry may take any time as long as it sends."""
    route: Route | None = None
    """The only way to them; None: as in the environment."""

    def popen(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a program that connects to them. Raises OSError."""
        return (self.route.popen if self.route is not None else subprocess.Popen)(argv, **options)


class BusyRegistryError(ImageUnavailableError):
    """A registry did not answer, or is overloaded: the same request may succeed later. ``throttled``: it has had
    too many requests."""

    def __init__(self, message: str, *, next_step: str = "", throttled: bool = False) -> None:
        super().__init__(message, next_step=next_step)
        self.throttled = throttled


_THROTTLED: Final = re.compile(r"\b429\b|too ?many ?requests|rate limit", re.IGNORECASE)
_PASSING: Final = re.compile(
    r"\b50[0234]\b|time-?out|timed out|connection re(fused|set)|broken pipe|EOF|no route to host|network is unreachable"
    r"|temporary failure|try again|no such host|server misbehaving|service unavailable|internal server error"
    r"|bad gateway",
    re.IGNORECASE,
)


def failure(reference: Reference, words: str) -> ImageUnavailableError:
    """What skopeo's last words mean: a name that does not exist, or credentials that are missing, stay so."""
    with contextlib.suppress(ValueError):
        words = json.loads(logged[1]) if (logged := _LOGGED.search(words)) else words
    message = f"skopeo could not copy {reference}: {words[-_LAST_WORDS:]}"
    throttled = _THROTTLED.search(words) is not None
    if throttled or _PASSING.search(words):
        return BusyRegistryError(message, next_step=_CURE, throttled=throttled)
    return ImageUnavailableError(message, next_step=_CURE)


def mirrored(name: str, mirrors: Mapping[str, str]) -> str:
    """The name under which an image is requested."""
    for prefix in sorted(mirrors, key=len, reverse=True):
        if name == prefix or name.startswith(f"{prefix}/"):
            return mirrors[prefix] + name.removeprefix(prefix)
    return name


def skopeo_argv(reference: Reference, settings: RegistrySettings, layout: Path) -> list[str]:
    """The command that copies an image for this machine into an OCI layout."""
    argv = ["skopeo", "--override-os", "linux", "--override-arch", machine_architecture()]
    if not any(policy.expanduser().exists() for policy in _POLICIES):
        argv.append("--insecure-policy")  # without a policy it refuses to work
    argv += ["copy", "--quiet", "--retry-times", str(settings.retries)]
    if settings.auth_file is not None:
        argv += ["--src-authfile", str(settings.auth_file)]
    if not settings.tls_verify:
        argv.append("--src-tls-verify=false")
    return [*argv, _source_name(reference, settings), f"oci:{layout}:{TAG}"]


def _source_name(reference: Reference, settings: RegistrySettings) -> str:
    name = mirrored(reference.name, settings.mirrors)
    return f"docker://{Reference('docker', name, reference.tag, reference.digest)}"


def pinned(reference: Reference, settings: RegistrySettings) -> Reference:
    """The reference with the digest that its tag means now, by one request for the manifest.

    Raises ConfigError when skopeo is not installed, ImageUnavailableError.
    """
    if reference.digest:
        return reference
    _need_skopeo(reference)
    argv = ["skopeo", "inspect", "--raw", "--retry-times", str(settings.retries)]
    if settings.auth_file is not None:
        argv += ["--authfile", str(settings.auth_file)]
    if not settings.tls_verify:
        argv.append("--tls-verify=false")
    pipe = subprocess.PIPE
    argv.append(_source_name(reference, settings))
    with settings.popen(argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as program:
        try:
            manifest, words = program.communicate(timeout=settings.stall_s)
        except subprocess.TimeoutExpired:
            reason = f"no data of {reference} for {settings.stall_s:g} s"
            raise BusyRegistryError(reason, next_step=_CURE) from None
        finally:
            program.kill()
    if program.returncode:
        raise failure(reference, words.decode("utf-8", "replace").strip())
    digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    return dataclasses.replace(reference, tag="", digest=digest)


def _need_skopeo(reference: Reference) -> None:
    if shutil.which("skopeo") is None:
        raise ConfigError(
            "image", f"{reference} is in a registry, and skopeo is not installed", next_step="apt-get install skopeo"
        )


def download(
    reference: Reference,
    settings: RegistrySettings,
    directory: Path,
    stored: Mapping[str, int],
    lock: int,
    report: Report,
    *,
    limit_bytes: int = sys.maxsize,
) -> Path:
    """Copy an image into an OCI layout below ``directory``, and return the layout.

    ``stored``: blobs that are not needed, with their sizes. The program inherits the descriptor ``lock``. Raises
    ConfigError when skopeo is not installed, ImageUnavailableError when it fails, BadImageError for more than
    ``limit_bytes``, OSError when the disk has too little room.
    """
    _need_skopeo(reference)
    layout = directory / "layout"
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    (layout / "index.json").unlink(missing_ok=True)
    _clear(blobs)
    for digest, size_bytes in stored.items():
        with (blobs / digest.removeprefix("sha256:")).open("wb") as file:
            file.truncate(size_bytes)
    _run(skopeo_argv(reference, settings, layout), layout, settings, limit_bytes, lock, reference, report)
    return layout


def _clear(blobs: Path) -> None:
    """Remove stand-ins: the layers that they represent may be removed by now."""
    for blob in blobs.iterdir():
        if blob.stat().st_blocks == 0:
            blob.unlink()


def _run(
    argv: Sequence[str],
    layout: Path,
    settings: RegistrySettings,
    limit_bytes: int,
    lock: int,
    reference: Reference,
    report: Report,
) -> None:
    stall_s = settings.stall_s
    before_bytes = last_bytes = _bytes_in(layout)
    moved_s = time.monotonic()
    with (layout.parent / "output").open("w+b") as output:  # no pipe: none is read while it works
        program = settings.popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(lock,))
        with program:
            try:
                while program.poll() is None:
                    now_bytes, now_s = _bytes_in(layout), time.monotonic()
                    check_room(layout)
                    if now_bytes > limit_bytes:
                        raise BadImageError(f"{reference} has more than {limit_bytes} bytes")
                    if now_bytes != last_bytes:
                        last_bytes, moved_s = now_bytes, now_s
                    elif now_s - moved_s > stall_s:
                        raise BusyRegistryError(f"no data of {reference} for {stall_s:g} s", next_step=_CURE)
                    report(BuildStep("download", str(reference), done=max(0, now_bytes - before_bytes)))
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        program.wait(_LOOK_S)
            finally:
                program.kill()
        output.seek(0)
        lines = output.read().decode("utf-8", "replace").splitlines() or ["no output"]
    if program.returncode:
        raise failure(reference, lines[-1])


def _bytes_in(directory: Path) -> int:
    """Bytes that files take; stand-ins take none."""
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # just renamed
            total += 512 * path.stat().st_blocks
    return total
