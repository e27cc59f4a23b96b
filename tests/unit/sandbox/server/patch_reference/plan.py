"""What a diff makes of a tree of files: the patch tool in plain Python, as slotfiles has to behave. Slow and clear."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from agentenv.errors import InvalidArgumentsError
from agentenv.wire.base import MAX_FILE_BYTES
from agentenv.wire.tools import PatchArguments, PatchedFile, PatchReply
from tests.unit.sandbox.server.patch_reference.apply import HunkFailedError, apply_hunks
from tests.unit.sandbox.server.patch_reference.parse import FileDiff, PatchTextError, parse


@dataclass(frozen=True)
class Held:
    """A file as it is."""

    content: bytes
    mode: int


Read = Callable[[str], Awaitable[Held | None]]
"""A file of the slot by its path; None when there is none."""


class PatchFailedError(Exception):
    """The patch does not fit the files. Nothing was changed; the text is for whoever wrote the patch."""


@dataclass
class Plan:
    """What the files become: ``files`` by path, None for one that goes."""

    files: dict[str, Held | None] = field(default_factory=dict)
    changed: list[PatchedFile] = field(default_factory=list)

    def reply(self) -> PatchReply:
        """When it is done."""
        return PatchReply(files=tuple(self.changed))


async def planned(asked: PatchArguments, read: Read) -> Plan:
    """What ``asked`` does to the files that ``read`` knows.

    Raises:
        InvalidArgumentsError: it is no diff, or too much.
        PatchFailedError: it does not fit. Both say where, and why.
    """
    try:
        parts = parse(asked.patch.encode("utf-8", "surrogateescape"), asked.strip)
    except PatchTextError as error:
        raise InvalidArgumentsError(
            f"patch: {error}", next_step="send a unified diff, as written by git diff"
        ) from error
    work = _Work(asked, read, parts)
    for part in parts:
        await work.take(part)
    return await work.finished()


class _Work:
    def __init__(self, asked: PatchArguments, read: Read, parts: list[FileDiff]) -> None:
        self._asked = asked
        self._parts = parts
        self._made: set[str] = set()
        """Files whose content comes from another file, or from nowhere."""
        self._edited: set[str] = set()
        """Files that were changed where they are."""
        self._read = read
        self._was: dict[str, Held | None] = {}
        self._plan = Plan()
        self._bytes = 0

    async def take(self, part: FileDiff) -> None:
        """One file's part, on top of what the parts before it did; copies, and renames of files that these did not
        edit, begin with the file as it was."""
        name = part.new if part.new is not None else part.old
        assert name is not None
        path = self._path(name)
        source = path if part.old is None else self._path(part.old)
        anew = await self._original(source) is not None and (
            part.copies or (part.renames and source not in self._edited)
        )
        before = await self._original(source) if anew else await self._content(source)
        if part.creates:
            self._check_absent(path, await self._content(source))
            before = Held(b"", 0o644)
        elif before is None:
            raise self._failed(source, "there is no such file")
        free = path not in self._made and any(other.renames and other.old == part.new for other in self._parts)
        if (part.renames or part.copies) and await self._content(path) is not None and path != source and not free:
            raise self._failed(path, "the new name is taken: a file of that name already exists")
        try:
            fit = apply_hunks(before.content, part.hunks, self._asked.fuzz)
        except HunkFailedError as error:
            raise self._failed(source, str(error)) from None
        if part.deletes:
            if fit.content:
                left = fit.content.count(b"\n") + (not fit.content.endswith(b"\n"))
                raise self._failed(path, f"the patch deletes it, but does not remove {left} of its lines")
            self._remove(path)
        else:
            kept = path == source or (anew and source in self._made)
            self._plan.files[path] = Held(fit.content, before.mode if part.mode is None else part.mode)
            if part.creates or part.copies or part.renames:
                self._made.add(path)
                self._edited.discard(path)
            elif path not in self._made:
                self._edited.add(path)
            if part.renames and not kept:
                self._remove(source)
        self._plan.changed.append(
            PatchedFile(
                path=path,
                action=_action(part),
                old_path=source if part.renames or part.copies else None,
                hunks=len(part.hunks),
                fuzz=fit.fuzz,
                offset_lines=fit.offset_lines,
            )
        )

    async def finished(self) -> Plan:
        """What is to be done, without what undoes itself (a file made and removed by the same patch)."""
        for path, held in list(self._plan.files.items()):
            if held is None and await self._original(path) is None:
                del self._plan.files[path]
        return self._plan

    def _remove(self, path: str) -> None:
        self._plan.files[path] = None
        self._made.discard(path)
        self._edited.discard(path)

    def _check_absent(self, path: str, held: Held | None) -> None:
        if held is not None and held.content:
            raise self._failed(
                path, "the patch creates it as a new file, but it already exists; make a diff against the existing file"
            )

    async def _content(self, path: str) -> Held | None:
        return self._plan.files[path] if path in self._plan.files else await self._original(path)

    async def _original(self, path: str) -> Held | None:
        if path not in self._was:
            held = self._was[path] = await self._read(path)
            self._bytes += len(held.content) if held else 0
            if self._bytes > MAX_FILE_BYTES:
                raise InvalidArgumentsError(f"patch: the files it changes have more than {MAX_FILE_BYTES} bytes")
        return self._was[path]

    def _path(self, name: bytes) -> str:
        text = os.fsdecode(name)
        if b"\0" in name or not text.strip("/"):
            raise InvalidArgumentsError("patch: a file name is empty or contains a NUL byte")
        base = self._asked.path.rstrip("/")
        return text if text.startswith("/") or base in ("", ".", "/workspace") else f"{base}/{text}"

    def _failed(self, path: str, why: str) -> PatchFailedError:
        return PatchFailedError(f"{path}: {why}\nNothing was changed.\n")


def _action(part: FileDiff) -> str:
    if part.creates:
        return "created"
    if part.deletes:
        return "deleted"
    return "renamed" if part.renames else "copied" if part.copies else "modified"
