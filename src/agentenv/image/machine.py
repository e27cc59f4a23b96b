"""The files of a container that is a virtual machine: kernel, first file system, root; from the containers' image."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import docker
from docker.errors import DockerException

from agentenv import shipped
from agentenv.errors import ConfigError, SandboxUnavailableError
from agentenv.image.context import write_context
from agentenv.image.ensure import ensure_image, follow_build
from agentenv.image.progress import BuildStep, Report, silent
from agentenv.sandbox.machine.qemu import INITRD, KERNEL, ROOT
from agentenv.wire.spec import MIB

DOCKERFILE: Final = "docker/machine.Dockerfile"
NAME: Final = "agentenv-machine:local"
_MADE_OF: Final = "made-of"
"""A file beside the others: the image that they were made of."""
_BLOCK_BYTES: Final = 4096
_MORE: Final = 1.1
"""Of the root's size, beside its files: what ext4 takes for itself. Nobody writes to it."""
_LEAST_MORE_BYTES: Final = 64 * MIB
_TIMEOUT_S: Final = 1800
_CURE: Final = "see the engine's log, and that the directory's disk has 2 GB free"


def make_machine(
    directory: Path, image: str, *, client: docker.DockerClient, report: Report = silent, again: bool = False
) -> bool:
    """Write the files of machines of this image into the directory, unless they are there; False when they were.

    ``image``: of a farm's containers, in the engine, or built here (:func:`ensure_image`). ``again``: with the newest
    kernel of Debian's, whatever is there. Each file is replaced as a whole, so machines that run keep theirs. As root,
    on x86_64; minutes when the kernel is not cached. Raises ConfigError for another user or processor,
    SandboxUnavailableError when the engine or a program fails.
    """
    if os.geteuid() != 0:
        raise ConfigError(
            "image machine", "needs root: the root file system has files of several users", next_step="use sudo"
        )
    if platform.machine() != "x86_64":
        raise ConfigError(
            "image machine", f"is for x86_64, and this is {platform.machine()}", next_step="use another driver than vm"
        )
    made_of = f"{ensure_image(image, client=client, report=report).id}\n{shipped.path(DOCKERFILE).read_text()}"
    if not again and _is(directory, made_of):
        return False
    try:
        _build(client, image, report, again=again)
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".machine-", dir=directory) as place:
            report(BuildStep("files", f"writing {directory}"))
            _export(client, Path(place) / "root")
            _write(Path(place), directory)
        (directory / _MADE_OF).write_text(made_of)
    except (DockerException, OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailableError(f"the machine could not be made: {error}", next_step=_CURE) from error
    return True


def _is(directory: Path, made_of: str) -> bool:
    with contextlib.suppress(OSError):
        there = all((directory / name).is_file() for name in (KERNEL, INITRD, ROOT))
        return there and (directory / _MADE_OF).read_text() == made_of
    return False


def _build(client: docker.DockerClient, image: str, report: Report, *, again: bool) -> None:
    with tempfile.TemporaryFile() as context:
        write_context(context, [], shipped.path(DOCKERFILE).read_bytes())
        context.seek(0)
        follow_build(client, context, {"tag": NAME, "buildargs": {"BASE": image}, "nocache": again}, report)


def _export(client: docker.DockerClient, root: Path) -> None:
    """The files of the image, with their owners."""
    root.mkdir()
    container = client.containers.create(NAME)
    try:
        unpack = ["tar", "--extract", "--numeric-owner", "--same-permissions", "--xattrs", "--directory", str(root)]
        with tempfile.TemporaryFile() as said:  # a pipe that nobody reads yet would stop it
            with subprocess.Popen(unpack, stdin=subprocess.PIPE, stderr=said) as tar:
                assert tar.stdin is not None
                with contextlib.suppress(BrokenPipeError), tar.stdin:  # it says itself why it has ended
                    for part in container.export():
                        tar.stdin.write(part)
            said.seek(0)
            words = said.read(MIB).decode(errors="replace").strip()
        if tar.returncode:
            raise SandboxUnavailableError(f"unpacking the image failed: {words[-400:]}", next_step=_CURE)
    finally:
        container.remove()
    for name in ("dev", "proc", "sys", "run", "tmp"):
        (root / name).mkdir(exist_ok=True)
    (root / ".dockerenv").unlink(missing_ok=True)


def _write(place: Path, directory: Path) -> None:
    """Each file whole, or the one before it."""
    root = place / "root"
    for name in (KERNEL, INITRD):
        shutil.move(root / "machine" / name, place / name)
    (root / "machine").rmdir()
    sizes = [path.lstat().st_size for path in root.rglob("*")]
    files_bytes = sum(-(-size // _BLOCK_BYTES) * _BLOCK_BYTES for size in sizes)
    with (place / ROOT).open("wb") as image:
        image.truncate(int(files_bytes * _MORE + _LEAST_MORE_BYTES) // MIB * MIB)  # a disk has whole sectors
    _fill(place / ROOT, root, inodes=int(len(sizes) * _MORE) + 1000)
    for name in (KERNEL, INITRD, ROOT):
        (place / name).replace(directory / name)


def _fill(image: Path, root: Path, *, inodes: int) -> None:
    """A file system with these files; the image has its size."""
    program = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        raise SandboxUnavailableError("there is no mkfs.ext4", next_step="apt-get install e2fsprogs")
    options = ["-q", "-F", "-O", "^has_journal", "-m", "0", "-N", str(inodes), "-d", str(root)]
    done = subprocess.run([program, *options, str(image)], capture_output=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        words = done.stderr.decode(errors="replace")[-400:]
        raise SandboxUnavailableError(f"mkfs.ext4 failed: {words}", next_step=_CURE)
