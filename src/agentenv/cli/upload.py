"""Copies local files into a slot before a command, and files back after it: streamed, with a progress bar."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from agentenv.cli.output import err
from agentenv.containers import transfer
from agentenv.containers.transfer import TransferLease
from agentenv.errors import ConfigError, InvalidArgumentsError, PolicyRefusalError
from agentenv.file_names import meant_path, readable_name


def named(paths: Sequence[Path]) -> dict[str, Path]:
    """Each path by its name in the workspace: its own last component, also of a link, as slots take it.

    Raises ConfigError when two have the same name, or one does not exist.
    """
    found: dict[str, Path] = {}
    for path in paths:
        try:
            whole = path.resolve(strict=True)
        except OSError as error:
            raise ConfigError("--upload", str(error)) from error
        name = readable_name(os.fsencode(Path(os.path.abspath(path)).name)) or "root"  # noqa: PTH100 (a link's own name)
        if name in found:
            raise ConfigError("--upload", f"two paths have the name {name!r}", next_step="rename one of them")
        found[name] = whole
    return found


def targets(downloads: Sequence[str]) -> dict[str, Path]:
    """Each ``PATH`` or ``PATH:LOCAL`` of a slot, with its local target: by default its own name in the current
    directory.

    Raises ConfigError when a path has no name to use.
    """
    found: dict[str, Path] = {}
    for text in downloads:
        remote, colon, local = text.partition(":")
        target = local if colon else meant_path(PurePosixPath(remote).name)
        if not remote or not target:
            raise ConfigError("--download", f"got {text!r}", next_step="write PATH, or PATH:LOCAL")
        found[remote] = Path(target)
    return found


async def put_all(lease: TransferLease, paths: Mapping[str, Path]) -> None:
    """Copy them into the workspace. Raises ConfigError (unreadable files, or no room), InfraError."""
    for name, path in paths.items():
        with _shown(f"upload {name}") as progress, _explained("--upload"):
            await transfer.upload(lease, path, name, progress=progress)


async def get_all(lease: TransferLease, paths: Mapping[str, Path]) -> None:
    """Copy them out of the workspace. Raises ConfigError (missing files, or not writable here), InfraError."""
    for remote, local in paths.items():
        with _shown(f"download {remote}") as progress, _explained("--download"):
            await transfer.download(lease, remote, local, progress=progress)


@contextmanager
def _explained(option: str) -> Iterator[None]:
    try:
        yield
    except (InvalidArgumentsError, PolicyRefusalError) as error:
        raise ConfigError(option, error.message, next_step=error.next_step) from error
    except OSError as error:
        raise ConfigError(option, str(error)) from error


@contextmanager
def _shown(what: str) -> Iterator[transfer.Progress]:
    """A progress bar on stderr during transfers; nothing if stderr is not a terminal."""
    console = err()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
