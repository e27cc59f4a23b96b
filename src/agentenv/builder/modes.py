"""``--chmod`` and ``--chown``: what is written, as data."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

Mode = Callable[[int, bool], int]
"""The new mode of something by its old one and whether it is a directory."""

DIRECTORY_MODE: Final = 0o755
"""Of directories that COPY and WORKDIR make on the way; fsutil's ``defaultDirectoryMode``."""

_OCTAL: Final = re.compile(r"[0-7]+")
_CLAUSE: Final = re.compile(r"([ugoa]*)((?:[-+=][rwxXst]*)+)")
_CHANGE: Final = re.compile(r"([-+=])([rwxXst]*)")
_BITS: Final = {"r": 0o444, "w": 0o222, "x": 0o111}
_WHO: Final = {"u": 0o4700, "g": 0o2070, "o": 0o1007}


def kept(mode: int, _is_directory: bool) -> int:
    """No ``--chmod``."""
    return mode


def mode_of(text: str) -> Mode:
    """The value of ``--chmod``: octal up to 7777, or symbols as chmod(1) takes them with a umask of 0. Raises
    ValueError."""
    if not text:
        return kept
    if _OCTAL.fullmatch(text) and int(text, 8) <= 0o7777:
        return lambda _mode, _is_directory: int(text, 8)
    clauses = [_CLAUSE.fullmatch(clause) for clause in text.split(",")]
    changes = [
        (clause[1], sign, letters)
        for clause in clauses
        if clause is not None
        for sign, letters in _CHANGE.findall(clause[2])
    ]
    if None in clauses:
        raise ValueError(f"{text} is not a mode: write 755 or u=rwX,go=rX")

    def change(mode: int, is_directory: bool) -> int:
        for who, sign, letters in changes:
            mode = _changed(mode, is_directory, who, sign, letters)
        return mode

    return change


def _changed(mode: int, is_directory: bool, who: str, sign: str, letters: str) -> int:
    scope = 0
    for one in who.replace("a", "ugo") or "ugo":
        scope |= _WHO[one]
    bits = 0
    for letter in letters:
        bits |= _BITS.get(letter, 0)
        if letter == "X" and (is_directory or mode & 0o111):
            bits |= 0o111
    bits &= scope
    if "s" in letters:
        bits |= scope & 0o6000
    if "t" in letters:
        bits |= scope & 0o1000
    if sign == "+":
        return mode | bits
    return mode & ~bits if sign == "-" else mode & ~scope | bits


def directory_mode(text: str) -> int:
    """The mode of directories that a COPY with this ``--chmod`` makes on the way; symbols do not count for them."""
    return int(text, 8) if _OCTAL.fullmatch(text) else DIRECTORY_MODE


def owner_of(text: str) -> tuple[str, str]:
    """User and group of ``--chown``, the group empty if none is given. Raises ValueError for an empty user."""
    user, _, group = text.partition(":")
    if not user:
        raise ValueError(f"{text} is not a user")
    return user, group


def ids(user: str, group: str, passwd: str, groups: str) -> tuple[int, int]:
    """The numbers of an owner, by the root's ``/etc/passwd`` and ``/etc/group``. A user by number has the group of
    that number unless one is given, a user by name their own. Raises LookupError for an unknown name; BuildKit takes
    0 for it silently."""
    if user.isdecimal():
        uid = gid = int(user)
    else:
        line = _line(passwd, user, 4)
        uid, gid = int(line[2]), int(line[3])
    if group:
        gid = int(group) if group.isdecimal() else int(_line(groups, group, 3)[2])
    return uid, gid


def _line(text: str, name: str, fields: int) -> list[str]:
    for line in text.splitlines():
        parts = line.split(":")
        if parts[0] == name and len(parts) >= fields and all(part.isdecimal() for part in parts[2:fields]):
            return parts
    raise LookupError(f"the image has no user or group {name}")
