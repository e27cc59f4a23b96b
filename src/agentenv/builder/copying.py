"""COPY, ADD and WORKDIR on a machine: whose the files become, where they go, and putting them there."""

from __future__ import annotations

import asyncio
import errno
import posixpath
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import IO, Final

from agentenv.builder.archive import UNREADABLE, ArchiveError, Part, Placed, members, placed, write
from agentenv.builder.context import BuildContext, Source
from agentenv.builder.instructions import Place
from agentenv.builder.machine import Machine, Seen
from agentenv.builder.modes import DIRECTORY_MODE, Mode, directory_mode, ids, kept, mode_of, owner_of
from agentenv.builder.patterns import Entries, PatternError, glob
from agentenv.builder.steps import CopyStep, WorkdirStep
from agentenv.errors import ImageUnavailableError
from agentenv.store.layout import check_room
from agentenv.tar_members import StrictMember

_SPOOLED_BYTES: Final = 4 * 1024 * 1024
"""A tar stream up to this size stays in memory."""
_ROOT: Final = (0, 0)


@dataclass(frozen=True)
class _Target:
    """Where a step copies to: the real path of its destination, whether that is a directory now, and how what is made
    there is owned and may be used."""

    destination: str
    is_directory: bool
    owner: tuple[int, int] | None
    mode: Mode
    directory_mode: int


@dataclass(frozen=True)
class _Found:
    """One source in another root."""

    name: str
    path: str
    is_directory: bool


async def make_directory(step: WorkdirStep, machine: Machine) -> None:
    """WORKDIR. Raises DockerfileError for a user that the root does not have, or a file at the path."""
    owner = await _owner(machine, step.place, step.user) if step.user else _ROOT
    await _put(machine, [], step.path, owner, DIRECTORY_MODE, step.place)


async def copy_from_context(step: CopyStep, context: BuildContext, sources: Sequence[Source], machine: Machine) -> None:
    """COPY and ADD. Raises DockerfileError for what cannot be copied, or has changed so since it was read."""
    target = await _target(step, machine)
    places = _placed(step, [(source.name, source.is_directory) for source in sources], target)
    parts = [
        Part(
            place,
            context.entries(source),
            target.owner if source.archive else target.owner or _ROOT,
            kept if source.archive else target.mode,
        )
        for place, source in zip(places, sources, strict=True)
    ]
    for at, together in groupby(parts, key=lambda part: part.place.at):
        await _put(machine, list(together), at, target.owner or _ROOT, target.directory_mode, step.place)


async def copy_from_root(step: CopyStep, origin: Machine, machine: Machine) -> None:
    """COPY ``--from``. Raises DockerfileError for what does not exist or cannot be copied."""
    target = await _target(step, machine)
    found = await _sources(step, origin)
    places = _placed(step, [(source.name, source.is_directory) for source in found], target)
    for place, source in zip(places, found, strict=True):
        with await origin.get(source.path) as stream, _opened(stream) as archive:
            part = Part(place, members(archive), target.owner, target.mode)
            await _put(machine, [part], place.at, target.owner or _ROOT, target.directory_mode, step.place)


async def _target(step: CopyStep, machine: Machine) -> _Target:
    try:
        mode, made = mode_of(step.chmod), directory_mode(step.chmod)
    except ValueError as error:
        raise step.place.wrong(str(error), next_step="correct --chmod") from error
    owner = await _owner(machine, step.place, step.chown) if step.chown else None
    seen = await _looked(machine, step.destination, step.place)
    slash = "/" if step.destination.endswith("/") else ""
    return _Target(seen.path.rstrip("/") + slash or "/", seen.kind == "directory", owner, mode, made)


def _placed(step: CopyStep, sources: Sequence[tuple[str, bool]], target: _Target) -> list[Placed]:
    try:
        return placed(sources, target.destination, target.is_directory)
    except ValueError as error:
        raise step.place.wrong(str(error), next_step="end the destination with a slash") from error


async def _owner(machine: Machine, place: Place, text: str) -> tuple[int, int]:
    """The numbers of a user and group, by the machine's own files."""
    try:
        user, group = owner_of(text)
        passwd = "" if user.isdecimal() else await _text(machine, "/etc/passwd", place)
        groups = "" if not group or group.isdecimal() else await _text(machine, "/etc/group", place)
        return ids(user, group, passwd, groups)
    except (ValueError, LookupError) as error:
        reason = error.args[0]
        raise place.wrong(f"{text}: {reason}", next_step="create the user with RUN before, or use numbers") from error


async def _looked(machine: Machine, path: str, place: Place) -> Seen:
    try:
        return await machine.look(path)
    except OSError as error:
        raise place.wrong(f"{path}: {error.strerror or error}", next_step="correct the links on this path") from error


async def _text(machine: Machine, path: str, place: Place) -> str:
    """A small file of the root; empty if there is none."""
    seen = await _looked(machine, path, place)
    if seen.kind != "file":
        return ""
    with await machine.get(seen.path) as stream, _opened(stream) as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is not None:
                return content.read().decode(errors="replace")
    return ""


async def _sources(step: CopyStep, origin: Machine) -> list[_Found]:
    """What the step's sources are in another root; wildcards may find nothing, a path has to exist."""
    found: list[_Found] = []
    for written in step.sources:
        pattern = posixpath.normpath(f"/{written}").lstrip("/")
        try:
            matches = await _matches(pattern, origin, step, written)
        except PatternError as error:
            raise step.place.wrong(str(error), next_step="correct the wildcard") from error
        for match in matches:
            seen = await _existing(f"/{match}", origin, step, written)
            found.append(_Found(posixpath.basename(match), seen.path, seen.kind == "directory"))
    return found


def _opened(stream: IO[bytes]) -> tarfile.TarFile:
    return tarfile.open(fileobj=stream, mode="r|", tarinfo=StrictMember)


async def _existing(path: str, origin: Machine, step: CopyStep, written: str) -> Seen:
    seen = await _looked(origin, path, step.place)
    if seen.kind == "missing":
        raise step.place.wrong(f"{written} does not exist there", next_step="correct the path")
    return seen


async def _matches(pattern: str, origin: Machine, step: CopyStep, written: str) -> list[str]:
    search = glob(pattern)
    answer: Entries | None = None
    try:
        while True:
            wanted = search.send(answer) if answer is not None else next(search)
            seen = await _existing(f"/{wanted}", origin, step, written)
            answer = await origin.names(seen.path) if seen.kind == "directory" else ()
    except StopIteration as stop:
        matches: list[str] = stop.value
        return matches


async def _put(
    machine: Machine, parts: Sequence[Part], at: str, owner: tuple[int, int], mode: int, place: Place
) -> None:
    """Put the parts below ``at``, through a temporary file: what is wrong with a part is found before any is put."""
    with tempfile.SpooledTemporaryFile(max_size=_SPOOLED_BYTES) as stream:
        try:
            await asyncio.to_thread(write, stream, parts, partial(check_room, Path(tempfile.gettempdir())))
        except ArchiveError as error:
            raise place.wrong(str(error), next_step="leave it out, or create it with RUN") from error
        except UNREADABLE as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise ImageUnavailableError(
                    f"{place.file}:{place.line}: {place.keyword}: {error.strerror}",
                    next_step=f"free space in {tempfile.gettempdir()}, or set TMPDIR to another directory",
                ) from error
            reason = f"reading what it copies failed: {error}"
            raise place.wrong(reason, next_step="build again, or check the archive") from error
        stream.seek(0)
        try:
            await machine.put(stream, at, owner=owner, mode=mode)
        except OSError as error:
            raise place.wrong(f"cannot write to {at}: {error}", next_step="correct the destination") from error
