"""A directory's entries, for comparing; and, run as a program, those of a mounted index (root, Linux 6.12).

The program mounts in a namespace of its own, so nothing of it stays: ``mounted_index.py INDEX LAYER…``.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000
MOVE_MOUNT, FSOPEN, FSCONFIG, FSMOUNT = 429, 430, 431, 432
FSCONFIG_SET_FLAG, FSCONFIG_SET_STRING, FSCONFIG_CMD_CREATE = 0, 1, 6
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NODEV = 1, 4
AT_FDCWD, MOVE_MOUNT_F_EMPTY_PATH = -100, 4
NAMES = ["names"]
"""In the place of extended attributes: only the names in the directory itself."""
_HASHED_BYTES = 64 * 1024 * 1024
Listing = dict[bytes, tuple[Any, ...]]


def listing(directory: Path, xattrs: Sequence[str] = ()) -> Listing:
    """Every path below a directory with all that is to be equal. Of extended attributes only ``xattrs`` and
    ``user.*``: a file system of this machine adds its own."""
    if list(xattrs) == NAMES:
        return {os.fsencode(path.name): () for path in directory.iterdir()}
    found: Listing = {}
    for parent, directories, files in os.walk(directory):
        for name in (*directories, *files):
            path = Path(parent, name)
            found[os.fsencode(path.relative_to(directory))] = _described(path, xattrs)
    found[b"."] = _described(directory, xattrs)
    return found


def _described(path: Path, wanted: Sequence[str]) -> tuple[Any, ...]:
    seen = path.lstat()
    directory = stat.S_ISDIR(seen.st_mode)
    content = None
    if stat.S_ISREG(seen.st_mode):
        with path.open("rb") as file:
            file.seek(max(0, seen.st_size - _HASHED_BYTES))  # of the huge, only the end
            content = hashlib.file_digest(file, "sha256").hexdigest()
    names = [name for name in os.listxattr(path, follow_symlinks=False) if name.startswith("user.") or name in wanted]
    return (
        oct(seen.st_mode),
        (seen.st_uid, seen.st_gid),
        None if directory else (seen.st_size, seen.st_nlink),
        seen.st_mtime_ns,
        seen.st_rdev if stat.S_ISCHR(seen.st_mode) or stat.S_ISBLK(seen.st_mode) else 0,
        os.fsencode(path.readlink()) if stat.S_ISLNK(seen.st_mode) else None,
        content,
        {name: os.getxattr(path, name, follow_symlinks=False) for name in sorted(names)},
    )


def mounted(index: Path, layers: Sequence[Path], xattrs: Sequence[str] = ()) -> Listing:
    """The listing of an index that another process mounts. Raises OSError when the kernel refuses it."""
    argv = [sys.executable, __file__, ",".join(xattrs), str(index), *map(str, layers)]
    done = subprocess.run(argv, capture_output=True)
    if done.returncode == 3:
        raise OSError(int(done.stderr), os.strerror(int(done.stderr)))
    assert done.returncode == 0, done.stderr
    found: Listing = pickle.loads(done.stdout)
    return found


def differences(one: Listing, other: Listing) -> list[tuple[bytes, Any, Any]]:
    return [
        (path, one.get(path), other.get(path))
        for path in sorted(one.keys() | other)
        if one.get(path) != other.get(path)
    ]


def _called(number: int, *arguments: int | bytes | None) -> int:
    """A system call."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    typed = [ctypes.c_long(one) if isinstance(one, int) else ctypes.c_char_p(one) for one in arguments]
    result: int = libc.syscall(ctypes.c_long(number), *typed)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def mount_index(index: str, layers: Sequence[str], at: str) -> None:
    """Mount an index, of any number of layers: mount(2) has room for 4 KiB of options."""
    context = _called(FSOPEN, b"erofs", 0)
    for key, value in [("source", index), *(("device", layer) for layer in layers)]:
        _called(FSCONFIG, context, FSCONFIG_SET_STRING, key.encode(), value.encode(), 0)
    _called(FSCONFIG, context, FSCONFIG_SET_FLAG, b"ro", None, 0)
    _called(FSCONFIG, context, FSCONFIG_CMD_CREATE, None, None, 0)
    mount = _called(FSMOUNT, context, 0, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV)
    _called(MOVE_MOUNT, mount, b"", AT_FDCWD, at.encode(), MOVE_MOUNT_F_EMPTY_PATH)
    os.close(mount)
    os.close(context)


def main(xattrs: str, index: str, *layers: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "no mount namespace")
    with tempfile.TemporaryDirectory() as at:
        try:
            mount_index(index, layers, at)
        except OSError as error:
            sys.stderr.write(str(error.errno))
            sys.exit(3)
        try:
            sys.stdout.buffer.write(pickle.dumps(listing(Path(at), xattrs.split(","))))
        finally:
            libc.umount2(at.encode(), 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
