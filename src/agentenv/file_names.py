"""File names as text. A name is bytes; JSON and models take text, so that bytes that are not UTF-8 need a notation.

Each component of a path is by itself: one that is UTF-8 is that text. In one that is not, its bytes that are not UTF-8
are ``\\xNN`` (lower case, ``\\x80`` to ``\\xff``), and a backslash is two. The same is done with one that is UTF-8 but
contains such a ``\\xNN``, so that no two names look the same. Pure, standard library only.
"""

from __future__ import annotations

import re
from typing import Final

_BYTE: Final = re.compile(r"\\x[89a-f][0-9a-f]")
_NOTATION: Final = re.compile(rb"\\(?:(\\)|x([89a-f][0-9a-f]))")


def readable_name(path: bytes) -> str:
    """The path as text; :func:`meant_path` has the way back."""
    return "/".join(map(_readable, path.split(b"/")))


def meant_path(text: str) -> str:
    """The path that a call means by this text: bytes that are not UTF-8 as in ``os.fsdecode``."""
    return "/".join(map(_meant, text.split("/")))


def _readable(component: bytes) -> str:
    try:
        text = component.decode()
    except UnicodeDecodeError:
        pass
    else:
        if not _BYTE.search(text):
            return text
    return component.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")


def _meant(component: str) -> str:
    if not _BYTE.search(component):
        return component
    given = component.encode("utf-8", "surrogateescape")
    return _NOTATION.sub(_byte, given).decode("utf-8", "surrogateescape")


def _byte(found: re.Match[bytes]) -> bytes:
    return found[1] or bytes.fromhex(found[2].decode())
