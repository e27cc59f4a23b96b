"""Finds differences in a workspace; runs in the slot, with its own ``python3 -I -S -B scan.py``.

Standard library only. Its only argument is a file with the original state, ``{path: digest}``; it prints the
differences: ``{"changed": [paths], "removed": [paths], "odd": [paths], "more": bool}``. ``odd`` are new links,
pipes and similar, and unreadable files, which are not used. Names that cannot be printed are skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys

MAX_CHANGED = 500
MAX_HASHED_BYTES = 8 * 1024 * 1024
"""A larger file counts as changed without being read: it is not a repair, and refused later."""
NOT_TAKEN = frozenset({".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis",
                       ".tox", ".nox", ".venv", "venv", "node_modules", ".cache", ".eggs"})  # fmt: skip
"""Directories filled by a policy's tools. Files that existed in one from the start are checked nevertheless."""


def digest(path: str) -> str | None:
    """A digest of a path's content; None if it is neither a file nor a link, or cannot be read."""
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            return "link:" + hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest()  # noqa: PTH115
        if not stat.S_ISREG(status.st_mode):
            return None
        if status.st_size > MAX_HASHED_BYTES:
            return f"large:{status.st_size}"
        with open(path, "rb") as file:  # noqa: PTH123 - as small and quick as can be
            return "file:" + hashlib.sha256(file.read(MAX_HASHED_BYTES)).hexdigest()
    except OSError:
        return None


def differences(root: str, known: dict[str, str], skipped: str) -> dict[str, object]:
    """Differences below ``root`` from ``known``, without the top directory ``skipped``."""
    changed: list[str] = []
    odd: list[str] = []
    found = set()
    kept_directories = {path[:end] for path in known for end, sign in enumerate(path) if sign == "/"}
    for directory, names, files in os.walk(root):
        here = os.path.relpath(directory, root)
        below = "" if here == "." else here + "/"
        links = [name for name in names if os.path.islink(os.path.join(directory, name))]  # noqa: PTH114, PTH118
        wanted = [
            name
            for name in names
            if name not in links
            and below + name != skipped
            and (name not in NOT_TAKEN or below + name in kept_directories)
        ]
        names[:] = sorted(wanted)
        for name in sorted([*files, *links]):
            path = below + name
            if not path.isprintable():
                continue
            now = digest(os.path.join(root, path))  # noqa: PTH118
            found.add(path)
            if path in known and now == known[path]:
                continue
            if now is None or now.startswith("link:"):
                odd.append(path)
            elif not path.endswith(".pyc"):
                changed.append(path)
            if len(changed) + len(odd) > MAX_CHANGED:
                return {"changed": [], "removed": [], "odd": [], "more": True}
    removed = sorted(path for path in known.keys() - found if path.isprintable())
    return {"changed": changed, "removed": removed, "odd": odd, "more": False}


if __name__ == "__main__":
    with open(sys.argv[1]) as _manifest:  # noqa: PTH123
        _known = json.load(_manifest)
    print(json.dumps(differences(".", _known, os.path.basename(os.path.dirname(sys.argv[1])))))  # noqa: PTH119, PTH120
