"""The patch tool: input for ``slotfiles patch``, and parsing of its output. Pure.

The diff is read and applied inside the slot, under its limits and the call's deadline: the cost of placing a hunk
depends on files made in the slot.
"""

from __future__ import annotations

from typing import Any, Final

from agentenv.errors import InvalidArgumentsError, ProtocolError
from agentenv.file_names import readable_name
from agentenv.sandbox.server.tools.file_records import RecordReader
from agentenv.sandbox.server.tools.slotfiles_exit_codes import DOES_NOT_FIT, NO_PATCH
from agentenv.wire.base import MAX_FILE_BYTES
from agentenv.wire.tools import PatchArguments, PatchedFile, PatchReply

_ACTIONS: Final = {"c": "created", "m": "modified", "d": "deleted", "r": "renamed", "y": "copied"}
_MAX_PARTS = 500
_MAX_WHY_BYTES = 64 * 1024


class PatchFailedError(Exception):
    """The patch does not fit the files. Nothing was changed; the text is for the patch's author."""


def patch_text(asked: PatchArguments) -> bytes:
    """The diff as standard input for slotfiles. Raises InvalidArgumentsError when it is too long."""
    text = asked.patch.encode("utf-8", "surrogateescape")
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
        action: Any = _ACTIONS.get(chr(record.mode))
        if action is None or len(files) == _MAX_PARTS:
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
