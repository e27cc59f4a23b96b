"""Meaning of slotfiles' exit codes, independent of text a command could print."""

from __future__ import annotations

import errno
import os

from agentenv.errors import PolicyRefusalError, ProtocolError
from agentenv.sandbox.server.tools.artifacts import MAX_ENTRIES
from agentenv.wire.base import MAX_FILE_BYTES

_OUTSIDE, _UNSUPPORTED_KERNEL, _NOT_REGULAR, CUT_SHORT, TOO_LARGE, USAGE, DOES_NOT_FIT, NO_PATCH, BAD_PATTERN = range(
    200, 209
)
_NO_USER, _NO_GROUP = 210, 211
"""Of slotas, which runs slotfiles as a user of an image."""
_ERRNO_OF = {_NOT_REGULAR: errno.EINVAL, TOO_LARGE: errno.EFBIG, _NO_USER: errno.EACCES, _NO_GROUP: errno.EACCES}
_TEXT_OF = {
    _NOT_REGULAR: "is not a regular file",
    TOO_LARGE: f"exceeds the limit of {MAX_FILE_BYTES} bytes or {MAX_ENTRIES} entries of one file operation",
    _NO_USER: "the slot's /etc/passwd has no such user",
    _NO_GROUP: "the slot's /etc/group has no such group",
}


def check_verdict(exit_code: int, path: str) -> None:
    """Return if ``exit_code`` (not 0) is an ordinary failure of the operation, for :func:`as_data`.

    Raises:
        PolicyRefusalError: something leads out of the directory that the operation is kept beneath.
        ProtocolError: slotfiles has no such exit code. The kernel's openat2 is tested before anything is
            served, so a code that denies it was forged in the slot.
    """
    if exit_code == _OUTSIDE:
        raise PolicyRefusalError(
            f"{path!r} is outside the workspace, or behind a link that leads out of the directory being filled",
            next_step="use a path inside /workspace: the fake backend's file tools reach no other",
        )
    if exit_code not in _TEXT_OF and not 0 < exit_code < _OUTSIDE:
        raise ProtocolError(f"slotfiles ended with {exit_code}")


def as_data(exit_code: int, path: str) -> tuple[int, str]:
    """An errno (or 128 + n: killed by signal n) and a sentence, for an ordinary failure."""
    if exit_code in _TEXT_OF:
        return _ERRNO_OF[exit_code], f"{path}: {_TEXT_OF[exit_code]}\n"
    if exit_code > 128:
        return exit_code, f"{path}: the operation was killed by signal {exit_code - 128}\n"
    return exit_code, f"{path}: {os.strerror(exit_code)}\n"
