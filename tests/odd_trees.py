"""Trees of files such as hardly anybody makes, drawn at random, and a description of a tree by everything that can be
seen of it. Only the standard library is used, so that it runs in a slot as well:

python3 odd_trees.py make SEED DIRECTORY [WITHOUT...]
python3 odd_trees.py describe DIRECTORY
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import stat
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

SIZES = (0, 1, 2, 511, 512, 513, 1024, 4095, 4096, 4097, 10_239, 10_240, 10_241)
LARGE_SIZES = tuple(near + by for near in (65_536, 196_608, 262_144, 1_048_576) for by in (-1, 0, 1))
"""Round the chunks of transfers, of attachments and of tars' buffers."""
FILE_MODES = (0o644, 0o600, 0o755, 0o400, 0o444, 0o666, 0o777, 0o111, 0o000, 0o640)
SET_ID_MODES = (0o4755, 0o2755, 0o6711, 0o1644, 0o7777)
DIRECTORY_MODES = (0o755, 0o700, 0o555, 0o500, 0o777, 0o711)
SET_ID_DIRECTORY_MODES = (0o1777, 0o2775, 0o3770)
NAMES = (
    *("a", "b", "B", ".hidden", "with space", " lead", "trail ", "-rf", "--", "new\nline", "cr\r", "tab\t", "\x01"),
    *("é", "e\u0301", "日本", "\U0001f600", "back\\slash", "\\n", "\\xff", "quote'", 'double"', "*", "{a,b}", "[x]"),
    *("$HOME", "`id`", "a;b", "a|b", "%s", "...", "..a", "a.", "~", "~root", "#", "a:b", "C:\\x", "core", "CON"),
    *(".wh", "wh.a", ".whx", "a.wh.b", ".Wh.a", ".w", ".agentenv-x", "x" * 99, "y" * 100, "z" * 101, "é" * 127),
    "l" * 255,
)
RAW_NAMES = (b"\xff", b"caf\xe9", b"\xed\xa0\x80", b"a\xc3", b"\xff" * 255)
TARGETS = ("a", "b/c", ".", "missing", "with space", "new\nline", "é", "x/" * 60 + "x", "t" * 3000)
OUTWARD_TARGETS = ("/etc/passwd", "..", "../../..", "/", "/missing")
ATTRIBUTES = (b"", b"v", b"\0\xff\n=", b"w" * 200)
ALL = frozenset(
    {
        *("owners", "unreadable", "set-id", "links", "outward", "raw names", "pipes", "sockets", "devices"),
        *("attributes", "holes", "large"),
    }
)
"""What a tree may be made without."""


def make(directory: str | os.PathLike[str], chance: random.Random, without: Collection[str] = ()) -> None:
    """Fill an existing directory; it keeps its own mode. ``without``: some of :data:`ALL`. Devices and owners take
    root; what the file system does not have (long names below long names) is left out."""
    _Maker(os.fsencode(directory), chance, ALL - set(without)).make()


class _Maker:
    def __init__(self, top: bytes, chance: random.Random, having: Collection[str]) -> None:
        self._chance = chance
        self._having = having
        self._directories = [top]
        self._files: list[bytes] = []
        self._made: list[tuple[bytes, bool]] = []

    def make(self) -> None:
        for _ in range(self._chance.randrange(1, 40)):
            path = os.path.join(self._chance.choice(self._directories), self._name())
            if len(path) < 3500 and not os.path.lexists(path):
                self._chance.choice(self._kinds())(path)
        for path, is_directory in reversed(self._made):  # a directory after what is in it
            self._dress(path, is_directory)

    def _kinds(self) -> list[Callable[[bytes], None]]:
        more = {
            "links": self._link,
            "pipes": self._pipe,
            "sockets": self._socket,
            "devices": self._device,
            "holes": self._hole,
        }
        usual: list[Callable[[bytes], None]] = [self._file, self._file, self._file, self._directory, self._directory]
        return [*usual, self._symlink, *(kind for name, kind in more.items() if name in self._having)]

    def _name(self) -> bytes:
        if "raw names" in self._having and self._chance.random() < 0.1:
            return self._chance.choice(RAW_NAMES)
        return os.fsencode(self._chance.choice(NAMES))

    def _directory(self, path: bytes) -> None:
        os.mkdir(path)
        self._directories.append(path)
        self._made.append((path, True))

    def _file(self, path: bytes) -> None:
        large = "large" in self._having and self._chance.random() < 0.05
        size = self._chance.choice(LARGE_SIZES if large else SIZES)
        zeros = self._chance.random() < 0.2
        with open(path, "xb") as file:
            file.write(bytes(size) if zeros else self._chance.randbytes(size))
        self._files.append(path)
        self._made.append((path, False))

    def _hole(self, path: bytes) -> None:
        with open(path, "xb") as file:
            for _ in range(self._chance.randrange(3)):
                file.seek(self._chance.randrange(200_000))
                file.write(self._chance.randbytes(self._chance.choice((1, 512, 5000))))
            file.truncate(self._chance.choice((0, 1, 65_536, 300_000)))
        self._files.append(path)
        self._made.append((path, False))

    def _symlink(self, path: bytes) -> None:
        outward = "outward" in self._having and self._chance.random() < 0.4
        target = os.fsencode(self._chance.choice(OUTWARD_TARGETS if outward else TARGETS))
        if "raw names" in self._having and self._chance.random() < 0.1:
            target = self._chance.choice(RAW_NAMES)
        elif self._chance.random() < 0.1:
            target = os.path.basename(path)  # itself
        os.symlink(target, path)
        self._made.append((path, False))

    def _link(self, path: bytes) -> None:
        if self._files:
            os.link(self._chance.choice(self._files), path)

    def _pipe(self, path: bytes) -> None:
        os.mkfifo(path)
        self._made.append((path, False))

    def _socket(self, path: bytes) -> None:
        with socket.socket(socket.AF_UNIX) as made:
            here = os.open(os.path.dirname(path), os.O_PATH)
            try:  # a socket's path is short
                made.bind(b"/proc/self/fd/%d/%s" % (here, os.path.basename(path)[:80]))
            except OSError:
                return
            finally:
                os.close(here)

    def _device(self, path: bytes) -> None:
        kind = self._chance.choice((stat.S_IFCHR, stat.S_IFBLK))
        os.mknod(path, kind | 0o600, os.makedev(self._chance.randrange(1, 256), self._chance.randrange(256)))
        self._made.append((path, False))

    def _dress(self, path: bytes, is_directory: bool) -> None:
        is_link = os.path.islink(path)
        if "owners" in self._having:
            os.lchown(path, self._chance.choice((0, 1, 1000, 65534)), self._chance.choice((0, 5, 1000)))
        if "attributes" in self._having and not is_link and os.path.isdir(path) | os.path.isfile(path):
            for name in self._chance.sample(("user.a", "user.mime_type", "user.é"), self._chance.randrange(3)):
                os.setxattr(path, name, self._chance.choice(ATTRIBUTES))
        if not is_link:
            os.chmod(path, self._mode(is_directory))
        os.utime(path, ns=(0, self._time_ns()), follow_symlinks=False)

    def _mode(self, is_directory: bool) -> int:
        modes: tuple[int, ...] = DIRECTORY_MODES if is_directory else FILE_MODES
        if "set-id" in self._having and self._chance.random() < 0.2:
            modes = SET_ID_DIRECTORY_MODES if is_directory else SET_ID_MODES
        mode = self._chance.choice(modes)
        return mode if "unreadable" in self._having else mode | (0o500 if is_directory else 0o400)

    def _time_ns(self) -> int:
        """From 1906 to 2255: file systems keep these, and 64 bits of nanoseconds hardly more."""
        second = self._chance.choice((0, -1, 1, 2**31 - 1, 2**31, 2**33, self._chance.randrange(-2 * 10**9, 9 * 10**9)))
        return second * 10**9 + self._chance.choice((0, 1, 250_000_000, 999_999_999, self._chance.randrange(10**9)))


def described(directory: str | os.PathLike[str], leave_out: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Everything below a directory, by its name (bytes that are not ASCII as ``\\\\xNN``): ``kind``, ``mode``, ``uid``,
    ``gid``, ``modified_ns``, ``attributes``; of files ``size_bytes``, ``sha256`` and ``first``, the first name of the
    same file; of links ``target``; of devices ``device``. ``leave_out``: keys that do not count."""
    found: dict[str, dict[str, Any]] = {}
    first: dict[tuple[int, int], str] = {}
    top = os.fsencode(directory)
    for path in below(top):
        name = _shown(path[len(top) + 1 :])
        status = os.lstat(path)
        entry = _entry(path, status)
        if not stat.S_ISDIR(status.st_mode):
            entry["first"] = first.setdefault((status.st_dev, status.st_ino), name)
        found[name] = {key: value for key, value in entry.items() if key not in leave_out}
    return found


def below(directory: bytes) -> Iterator[bytes]:
    """The paths of everything in a directory, each directory before what is in it. Not ``Path.rglob``: Python 3.11.2's
    raises for a link whose target is too long."""
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        yield path
        if os.path.isdir(path) and not os.path.islink(path):
            yield from below(path)


def _entry(path: bytes, status: os.stat_result) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "kind": stat.filemode(status.st_mode)[0],
        "mode": oct(stat.S_IMODE(status.st_mode)),
        "uid": status.st_uid,
        "gid": status.st_gid,
        "modified_ns": status.st_mtime_ns,
        "attributes": {
            name: os.getxattr(path, name, follow_symlinks=False).hex()
            for name in os.listxattr(path, follow_symlinks=False)
            if name.startswith("user.")
        },
    }
    if stat.S_ISREG(status.st_mode):
        with open(path, "rb") as file:
            entry |= {"size_bytes": status.st_size, "sha256": hashlib.sha256(file.read()).hexdigest()}
    elif stat.S_ISLNK(status.st_mode):
        entry["target"] = _shown(os.readlink(path))
    elif stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
        entry["device"] = [os.major(status.st_rdev), os.minor(status.st_rdev)]
    return entry


def _shown(name: bytes) -> str:
    return "".join(chr(byte) if 32 <= byte < 127 and byte != 92 else f"\\x{byte:02x}" for byte in name)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make", seed, directory, *without]:
            make(directory, random.Random(int(seed)), without)
        case ["describe", directory]:
            print(json.dumps(described(directory)))
        case _:
            sys.exit(__doc__)
