"""Run in a slot: changes a directory at random, and tells a tree by everything that can be seen of it.

python3 changing_tree.py change SEED DIRECTORY
python3 changing_tree.py digest DIRECTORY

Not as root, in a plain slot, the digest is exact (see there).
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import stat
import sys
from pathlib import Path

STEPS = 60


def change(directory: Path, chance: random.Random) -> None:
    """One change at random: something made, changed, moved, replaced or removed."""
    found = sorted(path for path in directory.rglob("*"))
    folders = [directory, *(path for path in found if path.is_dir() and not path.is_symlink())]
    path = chance.choice(folders) / f"n{chance.randrange(40)}"
    some = chance.choice(found) if found else path
    match chance.randrange(12):
        case 0 | 1:
            if not path.is_dir():
                path.unlink(missing_ok=True)
                path.write_bytes(chance.randbytes(chance.randrange(5000)))
        case 2:
            path.mkdir(exist_ok=True) if not os.path.lexists(path) else None
        case 3:
            path.symlink_to(chance.choice(["nowhere", "/etc/passwd", "."])) if not os.path.lexists(path) else None
        case 4:
            if some.is_file() and not some.is_symlink() and not os.path.lexists(path):
                path.hardlink_to(some)
        case 5:
            os.mkfifo(path) if not os.path.lexists(path) else None
        case 6:
            if not os.path.lexists(path):
                with path.open("wb") as file:
                    file.write(b"begin")
                    file.truncate(chance.randrange(10_000, 200_000))
        case 7:
            owners = chance.randrange(2000), chance.randrange(2000)
            if os.geteuid() == 0 and os.path.lexists(some):
                os.lchown(some, *owners)
        case 8:
            if os.path.lexists(some) and not some.is_symlink():
                some.chmod(chance.choice([0o600, 0o644, 0o755, 0o4755, 0o2711]) | (0o700 if some.is_dir() else 0))
        case 9:
            if some.is_dir() and not some.is_symlink():
                shutil.rmtree(some)
                some.mkdir() if chance.random() < 0.5 else None
            elif os.path.lexists(some):
                some.unlink()
        case 10:
            if some.is_file() and not some.is_symlink():
                os.setxattr(some, b"user.n%d" % chance.randrange(3), chance.randbytes(20))
                with some.open("ab") as file:
                    file.write(b"more")
        case _:
            if os.path.lexists(some):
                when = chance.randrange(10**18, 2 * 10**18)
                os.utime(some, ns=(when, when), follow_symlinks=False)


def digest(directory: Path, *, owned: bool = False) -> str:
    """Names, kinds, modes, owners, times, attributes and content. Not the times of directories, nor which names are one
    file: overlayfs changes both by itself when it copies something up."""
    lines = []
    for path in sorted(directory.rglob("*")):
        seen = path.lstat()
        owner = seen.st_uid, seen.st_gid
        line: list[object] = [str(path.relative_to(directory)), oct(seen.st_mode)]
        line.append(owner == (os.geteuid(), os.getegid()) if owned else owner)
        if not stat.S_ISDIR(seen.st_mode):
            line += [seen.st_size, seen.st_mtime_ns]
            names = os.listxattr(path, follow_symlinks=False)
            line += [(name, os.getxattr(path, name, follow_symlinks=False)) for name in sorted(names)]
        if stat.S_ISLNK(seen.st_mode):
            line.append(str(path.readlink()))
        if stat.S_ISREG(seen.st_mode):
            line.append(hashlib.sha256(path.read_bytes()).hexdigest())
        lines.append(repr(line))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def exact(directory: Path) -> str:
    """All of :func:`digest`, for files that are the caller's own, and what it leaves out; the holes of files too."""
    lines = [digest(directory, owned=True)]
    names: dict[int, list[str]] = {}
    for path in [directory, *sorted(directory.rglob("*"))]:
        seen, name = path.lstat(), str(path.relative_to(directory))
        if stat.S_ISDIR(seen.st_mode):
            lines.append(repr((name, oct(seen.st_mode), seen.st_mtime_ns, sorted(os.listxattr(path)))))
        else:
            names.setdefault(seen.st_ino, []).append(name)
            lines.append(repr((name, seen.st_nlink)))
        if stat.S_ISREG(seen.st_mode):
            lines.append(repr((name, parts(path, seen.st_size))))
    return hashlib.sha256("\n".join([*lines, repr(sorted(names.values()))]).encode()).hexdigest()


def parts(path: Path, size: int) -> list[tuple[int, int]]:
    """Where a file has content."""
    found, at, file = [], 0, os.open(path, os.O_RDONLY)
    while at < size:
        try:
            begin = os.lseek(file, at, os.SEEK_DATA)
        except OSError:  # ENXIO: there is no more
            break
        at = os.lseek(file, begin, os.SEEK_HOLE)
        found.append((begin, at))
    os.close(file)
    return found


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "change":
        seed, tree = rest
        given = random.Random(int(seed))
        for _ in range(STEPS):
            change(Path(tree), given)
    print((exact if os.geteuid() else digest)(Path(rest[-1])))
