"""The file tools: each call is one run of slotfiles inside the slot, under the slot's uid.

A failing file operation (no such file, disk full) is data: an errno as exit code, and a sentence on stderr.
Outcomes are derived from slotfiles' exit code, never from text a command could print.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeVar

from agentenv.errors import InvalidArgumentsError, ProtocolError
from agentenv.file_names import readable_name
from agentenv.sandbox.server.calls import parse_arguments
from agentenv.sandbox.server.tools.artifacts import (
    MAX_ENTRIES,
    TooLargeError,
    listed,
    pack,
    single,
    unpack,
)
from agentenv.sandbox.server.tools.file_records import FileRecord, RecordReader
from agentenv.sandbox.server.tools.search import check_pattern, parse_matches, search_arguments
from agentenv.sandbox.server.tools.slotfiles_exit_codes import DOES_NOT_FIT, NO_PATCH, TOO_LARGE, as_data, check_verdict
from agentenv.sandbox.server.uploads import Upload
from agentenv.sandbox.slot_paths import USUAL_PATHS, SlotPaths
from agentenv.sessions.head_tail import whole_end
from agentenv.tar_headers import mapped_descriptor
from agentenv.wire.base import LARGE_BYTES, MAX_FILE_BYTES, WireModel
from agentenv.wire.tools import (
    ArtifactsArguments,
    ArtifactsReply,
    FileEntry,
    ListFilesArguments,
    ListFilesReply,
    PatchArguments,
    PatchedFile,
    PatchReply,
    PathsArguments,
    PathsReply,
    ReadFileArguments,
    ReadFileReply,
    SearchArguments,
    WriteFileArguments,
    WriteFileReply,
)

_KINDS: Final = {"f": "file", "d": "directory", "l": "symlink", "o": "other"}
_RECORD_BYTES = 64
_PATCH_FAILED = 1
"""Exit code of a patch that does not apply, as in patch(1)."""
_PATCH_ACTIONS: Final = {"c": "created", "m": "modified", "d": "deleted", "r": "renamed", "y": "copied"}
_MAX_PATCH_PARTS = 500
_MAX_WHY_BYTES = 64 * 1024
_OVERHEAD_BYTES = 32 * 1024 * 1024
"""Room for names and records in addition to the content of an archive, and for a listing."""

T = TypeVar("T")


@dataclass(frozen=True)
class Finished:
    """A program that ended. ``exit_code`` is 128 + n when signal n ended it, and an errno when it could not be
    started at all. Stdout beyond the cap is reduced to head and tail, and the rest is counted."""

    exit_code: int
    stdout: bytes | memoryview
    stderr: bytes
    stdout_dropped_bytes: int


class SlotRunner(Protocol):
    """Runs programs in one slot, for one call."""

    async def run(self, argv: Sequence[str], *, stdin: bytes | Upload | None = None, output_bytes: int) -> Finished:
        """Run ``argv`` to its end in the workspace; at most ``output_bytes`` of its stdout are kept."""


@dataclass(frozen=True)
class FileOutcome:
    """``content`` is the tool's reply, None when the operation failed: then ``exit_code`` is an errno (or 128 + n:
    killed by signal n) and ``stderr`` describes the error."""

    content: WireModel | None
    exit_code: int = 0
    stderr: str = ""
    raw: Mapping[str, memoryview] = field(default_factory=dict)
    """Large fields of the content (``text``, ``data``) as bytes; they are empty in the content itself."""


class _FailedError(Exception):
    """The operation failed with an ordinary result."""

    def __init__(self, exit_code: int, text: str) -> None:
        super().__init__(text)
        self.outcome = FileOutcome(None, exit_code, text)


class PatchFailedError(Exception):
    """The patch does not fit the files. Nothing was changed; the text is for the patch's author."""


async def run_file_tool(
    tool: str,
    arguments: WireModel | Mapping[str, Any],
    run: SlotRunner,
    *,
    paths: SlotPaths = USUAL_PATHS,
    uploads: Mapping[str, Upload] = MappingProxyType({}),
) -> FileOutcome:
    """Run one file tool. ``arguments``: the tool's model, or input for it; ``uploads``: arguments sent as
    attachments, which are empty in the model.

    Raises: InvalidArgumentsError, UnknownToolError: the call is wrong; nothing ran. PolicyRefusalError: an archive's
    entry leads outside the destination, or (with ``paths.beneath_workspace``) a path outside the workspace.
    ProtocolError: the input does not fit the tool's model, or the output is not in slotfiles' format.
    """
    model = arguments if isinstance(arguments, WireModel) else parse_arguments(tool, dict(arguments))
    operation = _OPERATIONS.get(type(model))
    if operation is None:
        raise InvalidArgumentsError(f"{tool} is not a file tool")
    files = _Files(run, paths, uploads)
    try:
        content: WireModel = await operation(files, model)
    except _FailedError as failed:
        return failed.outcome
    except PatchFailedError as failed_patch:
        return FileOutcome(None, _PATCH_FAILED, str(failed_patch))
    return FileOutcome(content, raw=files.raw)


class _Files:
    """The operations on one slot. Each raises _FailedError for a failure that is an ordinary result."""

    def __init__(self, run: SlotRunner, paths: SlotPaths, uploads: Mapping[str, Upload]) -> None:
        self._run = run
        self._paths = paths
        self._uploads = uploads
        self.raw: dict[str, memoryview] = {}
        """Parts of the reply that are too large for it."""

    async def read(self, arguments: ReadFileArguments) -> ReadFileReply:
        data, common = await self._read(arguments)
        if len(data) > LARGE_BYTES:
            self.raw["data" if arguments.binary else "text"] = data
            return ReadFileReply(**common)
        if arguments.binary:
            return ReadFileReply(data=bytes(data), **common)
        try:
            return ReadFileReply(text=str(data, "utf-8"), **common)
        except UnicodeDecodeError:
            return ReadFileReply(text=str(data, "utf-8", "replace"), lossy=True, **common)

    async def _read(self, arguments: ReadFileArguments) -> tuple[memoryview, dict[str, Any]]:
        """The requested bytes, and the matching reply fields."""
        limit = MAX_FILE_BYTES if arguments.limit is None else arguments.limit
        offset = min(arguments.offset, 2**63 - 1)
        # One byte more shows whether the file continues: sizes in /proc and /sys do not.
        bounds = (str(offset), str(limit + 1))
        printed = await self._call("read", arguments.path, *bounds, output_bytes=limit + 1 + _RECORD_BYTES)
        reader = RecordReader(printed)
        record = reader.record()
        content = reader.view()
        if record.kind != "f" or len(content) > limit + 1:
            raise ProtocolError("slotfiles printed more than requested")
        truncated = len(content) > limit
        size = record.size_bytes
        if content or not offset:
            size = max(size, offset + len(content)) if truncated else offset + len(content)
        data = content[:limit]
        if truncated and not arguments.binary:
            data = data[: _whole_characters(data)]
        common: dict[str, Any] = {"size_bytes": size, "mode": record.mode, "truncated": truncated}
        if truncated:
            common["next_offset"] = offset + len(data)
        return data, common

    async def write(self, arguments: WriteFileArguments) -> WriteFileReply:
        content, size_bytes = self._content_to_write(arguments)
        mode = "-" if arguments.mode is None else str(arguments.mode)
        printed = await self._call("write", arguments.path, mode, str(size_bytes), stdin=content)
        record = RecordReader(printed).record()
        if record.size_bytes != size_bytes:
            raise ProtocolError(f"slotfiles wrote {record.size_bytes} of {size_bytes} bytes")
        return WriteFileReply(size_bytes=record.size_bytes, created=record.kind == "n")

    def _content_to_write(self, arguments: WriteFileArguments) -> tuple[bytes | Upload, int]:
        if (arguments.text is None) == (arguments.data is None):
            raise InvalidArgumentsError("write_file: give either text or data")
        upload = self._uploads.get("data" if arguments.text is None else "text")
        if upload is not None:
            return upload, upload.size_bytes
        data = arguments.text.encode() if arguments.text is not None else arguments.data or b""
        _check_size(data)
        return data, len(data)

    async def list(self, arguments: ListFilesArguments) -> ListFilesReply:
        bounds = (str(arguments.depth), str(arguments.limit), str(int(arguments.hidden)))
        printed = await self._call("list", arguments.path, *bounds, output_bytes=_OVERHEAD_BYTES)
        return await _worked(len(printed), lambda: _listing(printed, arguments.limit))

    async def artifacts(self, arguments: ArtifactsArguments) -> WireModel:
        if arguments.action == "extract":
            return await self._extract(arguments)
        if arguments.data is not None:
            raise InvalidArgumentsError("artifacts: data is for extract only")
        return await (self._artifact(arguments.path) if arguments.action == "read" else self._archive(arguments))

    async def _archive(self, arguments: ArtifactsArguments) -> WireModel:
        """The archive, or the list of its content: slotfiles sends the content for both."""
        output_bytes = MAX_FILE_BYTES + _OVERHEAD_BYTES
        bounds = (str(MAX_FILE_BYTES), str(MAX_ENTRIES))
        printed = await self._call("archive", arguments.path, *bounds, output_bytes=output_bytes)
        make = pack if arguments.action == "archive" else listed
        try:
            reply = await _worked(len(printed), lambda: make(_without_end(printed)))
        except TooLargeError as error:
            raise _failure(TOO_LARGE, arguments.path) from error
        return self._with_data(reply)

    async def _artifact(self, path: str) -> WireModel:
        content, common = await self._read(ReadFileArguments(path=path, binary=True))
        if common["truncated"]:
            raise _failure(TOO_LARGE, path)
        if len(content) <= LARGE_BYTES:
            return single(path, bytes(content))
        self.raw["data"] = content
        return await asyncio.to_thread(single, path, content)

    def _with_data(self, reply: ArtifactsReply) -> ArtifactsReply:
        if reply.data is None or len(reply.data) <= LARGE_BYTES:
            return reply
        self.raw["data"] = memoryview(reply.data)
        return reply.model_copy(update={"data": None})

    async def _extract(self, arguments: ArtifactsArguments) -> WireModel:
        archive: bytes | Upload | None = self._uploads.get("data", arguments.data)
        if archive is None:
            raise InvalidArgumentsError("artifacts: extract requires data, the tar archive")
        if isinstance(archive, bytes):
            _check_size(archive)
        size_bytes = len(archive) if isinstance(archive, bytes) else archive.size_bytes
        instructions, reply = await _worked(size_bytes, lambda: _unpacked(archive))
        printed = await self._call("extract", arguments.path, stdin=instructions)
        for _ in RecordReader(printed).entries(with_content=False):
            pass
        return reply

    async def patch(self, arguments: PatchArguments) -> WireModel:
        # Read and applied inside the slot, under its limits and the call's deadline: the cost of placing a hunk depends
        # on files made in the slot.
        upload = self._uploads.get("patch")
        text = _patch_text(arguments) if upload is None else upload
        size_bytes = len(text) if isinstance(text, bytes) else text.size_bytes
        strip = "-" if arguments.strip is None else str(arguments.strip)
        done = await self._ran("patch", arguments.path, strip, str(arguments.fuzz), str(size_bytes), stdin=text)
        check_patched(done.exit_code, done.stdout)
        if done.exit_code:
            whole = done.stdout and not 128 < done.exit_code < 200  # a killed process may have printed only half of it
            where = readable_name(RecordReader(done.stdout).record().path) if whole else "patch"
            check_verdict(done.exit_code, where)
            code, sentence = as_data(done.exit_code, where)
            raise _FailedError(code, f"{sentence}Nothing was changed.\n")
        return patched(done.stdout)

    async def search(self, arguments: SearchArguments) -> WireModel:
        done = await self._ran("search", arguments.path, self._paths.ripgrep, *search_arguments(arguments))
        check_pattern(done.exit_code, done.stdout)
        printed = _whole(done, arguments.path)
        return await _worked(len(printed), lambda: parse_matches(bytes(printed), arguments, self._paths))

    async def paths(self, arguments: PathsArguments) -> WireModel:
        match arguments.action:
            case "stat":
                rest = [str(int(arguments.follow))]
            case "mkdir":
                rest = [str(int(arguments.parents)), str(int(arguments.exist_ok))]
            case "rename":
                rest = [self._paths.named(arguments.target or "")]
            case "remove":
                rest = [str(int(arguments.recursive))]
        record = RecordReader(await self._call(arguments.action, arguments.path, *rest)).record()
        if (record.kind == "e") == (arguments.action == "stat"):
            raise ProtocolError(f"slotfiles printed no result of {arguments.action}")
        if record.kind == "e":
            return PathsReply()
        return PathsReply(entry=_entry(record).model_copy(update={"path": arguments.path}))

    async def _call(
        self, operation: str, path: str, *rest: str, stdin: bytes | Upload | None = None, output_bytes: int = 4096
    ) -> bytes | memoryview:
        """The output of slotfiles."""
        return _whole(await self._ran(operation, path, *rest, stdin=stdin, output_bytes=output_bytes), path)

    async def _ran(
        self,
        operation: str,
        path: str,
        *rest: str,
        stdin: bytes | Upload | None = None,
        output_bytes: int = _OVERHEAD_BYTES,
    ) -> Finished:
        if any("\0" in part for part in (path, *rest)):
            raise InvalidArgumentsError("path: must not contain NUL bytes")
        argv = self._paths.slotfiles(operation, path, *rest)
        return await self._run.run(argv, stdin=stdin, output_bytes=output_bytes)


_OPERATIONS: Final[Mapping[type[WireModel], Callable[[_Files, Any], Awaitable[WireModel]]]] = {
    ReadFileArguments: _Files.read,
    WriteFileArguments: _Files.write,
    ListFilesArguments: _Files.list,
    SearchArguments: _Files.search,
    PatchArguments: _Files.patch,
    ArtifactsArguments: _Files.artifacts,
    PathsArguments: _Files.paths,
}


def _whole(done: Finished, path: str) -> bytes | memoryview:
    """The output of slotfiles. Raises when it failed, or printed more than was requested."""
    if done.exit_code:
        raise _failure(done.exit_code, path)
    if done.stdout_dropped_bytes:
        raise _failure(TOO_LARGE, path)
    return done.stdout


def _failure(exit_code: int, path: str) -> Exception:
    """The outcome for an exit code of slotfiles. Raises errors that are not ordinary results."""
    check_verdict(exit_code, path)
    return _FailedError(*as_data(exit_code, path))


def _whole_characters(data: memoryview) -> int:
    """Where to end a partial text so that no character is cut in two; its end if there is no such place."""
    before = max(0, len(data) - 4)
    return before + whole_end(bytes(data[before:])) or len(data)


def _unpacked(archive: bytes | Upload) -> tuple[bytes, ArtifactsReply]:
    if isinstance(archive, bytes):
        return unpack(archive)
    with mapped_descriptor(archive.fd) as tar:
        return unpack(tar)


def _check_size(data: bytes) -> None:
    if len(data) > MAX_FILE_BYTES:
        raise InvalidArgumentsError(f"{len(data)} bytes exceed the limit of {MAX_FILE_BYTES} bytes per call")


def _without_end(printed: bytes | memoryview) -> Iterator[FileRecord]:
    return (record for record in RecordReader(printed).entries(with_content=True) if record.kind != "e")


def _listing(printed: bytes | memoryview, limit: int) -> ListFilesReply:
    *records, end = RecordReader(printed).entries(with_content=False)
    if len(records) > limit:
        raise ProtocolError("slotfiles listed more than requested")
    return ListFilesReply(entries=tuple(_entry(record) for record in records), truncated=end.truncated)


def _entry(record: FileRecord) -> FileEntry:
    kind: Any = _KINDS.get(record.kind)
    if kind is None:
        raise ProtocolError(f"slotfiles listed something of kind {record.kind!r}")
    return FileEntry(
        path=readable_name(record.path),
        kind=kind,
        size_bytes=record.size_bytes,
        mode=record.mode,
        modified_s=record.modified_ns / 1e9,
    )


async def _worked(size_bytes: int, work: Callable[[], T]) -> T:
    # What is large is processed in a thread: the server's loop has other slots to serve.
    return work() if size_bytes <= LARGE_BYTES else await asyncio.to_thread(work)


def _patch_text(arguments: PatchArguments) -> bytes:
    """The diff as standard input for slotfiles. Raises InvalidArgumentsError when it is too long."""
    text = arguments.patch.encode("utf-8", "surrogateescape")
    if len(text) > MAX_FILE_BYTES:
        raise InvalidArgumentsError(f"patch: {len(text)} bytes exceed the limit of {MAX_FILE_BYTES} bytes per call")
    return text


def check_patched(exit_code: int, printed: bytes | memoryview) -> None:
    """Return unless the patch was rejected because of its content.

    Raises: InvalidArgumentsError: it is not a diff. PatchFailedError: it does not fit the files. Both give the
    place and the reason.
    """
    if exit_code not in (DOES_NOT_FIT, NO_PATCH):
        return
    reader = RecordReader(printed)
    if reader.record().kind != "w":
        raise ProtocolError("slotfiles gave no reason for refusing the patch")
    why = str(reader.view()[:_MAX_WHY_BYTES], "utf-8", "replace")
    if exit_code == DOES_NOT_FIT:
        raise PatchFailedError(why)
    raise InvalidArgumentsError(f"patch: {why}", next_step="send a unified diff, as written by git diff")


def patched(printed: bytes | memoryview) -> PatchReply:
    """The outcome for each file. Raises ProtocolError for any other output."""
    reader = RecordReader(printed)
    files: list[PatchedFile] = []
    while (record := reader.record()).kind == "p":
        hunks, fuzz, offset_lines = reader.numbers(3)
        action: Any = _PATCH_ACTIONS.get(chr(record.mode))
        if action is None or len(files) == _MAX_PATCH_PARTS:
            raise ProtocolError("slotfiles printed something else than what it patched")
        files.append(
            PatchedFile(
                path=readable_name(record.path),
                action=action,
                old_path=readable_name(record.link) if record.link else None,
                hunks=hunks,
                fuzz=fuzz,
                offset_lines=offset_lines,
            )
        )
    if record.kind != "e" or reader.view():
        raise ProtocolError("slotfiles did not confirm the patch")
    return PatchReply(files=tuple(files))
