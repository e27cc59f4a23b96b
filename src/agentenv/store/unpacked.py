"""The layers of images unpacked to directories, for kernels that do not mount images as they are.

``trees/NAME/root`` is a layer as overlayfs reads it; the name is of the layer and of all below it, because what a
layer's entries mean depends on those. Images that begin with the same layers share them.

An unpacked layer has what the layer added or replaced, with its parents; a whiteout for each name that it removed; and
is opaque where it replaced a directory. A file that the layer gave another name, or took one from, is whole in it with
all its names: links do not cross the layers of an overlay. In the place of a device is a whiteout: no slot could open
it. Owners that slots do not have become nobody.

It is run as a program, by the supervisor of a container: as the root of a user namespace of the ids that all unpacked
layers of the node have, without any right outside of it. So whatever an image does to it, it has the files of other
images at worst. It reads the tars as the index is made from them, and creates files below directories that no one else
can write to: no name in an image is ever resolved by the kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import hashlib
import logging
import os
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agentenv import subordinate_ids
from agentenv.errors import AgentEnvError
from agentenv.locks import hold
from agentenv.store.layout import PART, Layout, check_room, digest_of, downloading, part_of
from agentenv.store.manifest import read_manifest
from agentenv.store.tree import CAPABILITY, Node, Tree, layer_entries
from agentenv.tar_headers import mapped


@dataclass(slots=True, eq=False)
class Change:
    """A file or directory in an unpacked layer."""

    node: Node
    children: dict[bytes, Change | None] = field(default_factory=dict)
    """Of a directory; None: a whiteout."""
    opaque: bool = False
    """Nothing of the lower layers' directory of this name is seen."""


@dataclass(frozen=True)
class Before:
    """A tree at one time, though its directories change later."""

    directories: dict[int, tuple[Node, tuple[Any, ...], dict[bytes, Node]]]
    """By the ids of the nodes, which are kept so that no other gets one."""
    names: Counter[int]
    """Of each file, the sum of its names' hashes: another set of names has another one (64 bits)."""


def seen(root: Node) -> Before:
    """The tree as it is now."""
    directories = {}
    names: Counter[int] = Counter()
    todo = [root]
    while todo:
        node = todo.pop()
        children = dict(node.children or {})
        directories[id(node)] = (node, _attributes(node), children)
        for name, child in children.items():
            if child.children is None:
                names[id(child)] += hash((id(node), name))
            else:
                todo.append(child)
    return Before(directories, names)


def changes(before: Before, root: Node) -> Change:
    """The tree's root, with what is not as it was ``before``."""
    now = seen(root).names
    top = Change(root)
    queue: list[tuple[Change, Change | None, bytes]] = [(top, None, b"")]
    for change, _, _ in queue:  # it grows
        node = change.node
        known = before.directories.get(id(node))
        were = known[2] if known is not None else {}
        children = node.children or {}
        change.children = {name: None for name in were if name not in children}
        for name, child in children.items():
            was = were.get(name)
            if child.children is not None:
                replaced = was is not None and was is not child and was.children is not None
                below = change.children[name] = Change(child, opaque=replaced)
                queue.append((below, change, name))
            elif was is not child or before.names[id(child)] != now[id(child)]:
                change.children[name] = Change(child)
    for change, parent, name in reversed(queue):
        known = before.directories.get(id(change.node))
        if parent is not None and known is not None and not change.children and known[1] == _attributes(change.node):
            del parent.children[name]
    return top


def _attributes(node: Node) -> tuple[Any, ...]:
    return node.mode, node.uid, node.gid, node.mtime_ns, node.xattrs


log = logging.getLogger(__name__)

NOBODY: Final = 65_534
IDS: Final = 65_536
"""Users and groups that an unpacked layer has, besides nobody."""
LEAN_IDS: Final = 2_000
"""The same, where containers have few ids (sandbox/supervisor/user_namespace.py)."""
_VERSION: Final = b"1"
"""Of what an unpacked layer is; part of its name."""
_OPAQUE: Final = b"user.overlay.opaque"
_CHUNK_BYTES: Final = 16 * 1024 * 1024
_FRESH: Final = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FAILED: Final = 1
_SOME: Final = 20
"""Users and groups that are named in a warning."""


def names_of(diff_ids: Sequence[str], ids: int = IDS) -> list[str]:
    """The names of an image's layers, the lowest first, unpacked with so many users."""
    hashed = hashlib.sha256(_VERSION if ids == IDS else b"%s of %d" % (_VERSION, ids))
    names = []
    for diff_id in diff_ids:
        hashed.update(f" {diff_id}".encode())
        names.append(f"sha256:{hashed.hexdigest()}")
    return names


def all_names_of(diff_ids: Sequence[str]) -> list[str]:
    """The names of an image's layers, with any number of users."""
    return [*names_of(diff_ids), *names_of(diff_ids, LEAN_IDS)]


def unpack(layout: Layout, diff_ids: Sequence[str], ids: int = IDS) -> list[str]:
    """Unpack those layers of an image that are not, with so many users; the names of all. Raises OSError,
    BadImageError."""
    names = names_of(diff_ids, ids)
    missing = [number for number, name in enumerate(names) if not layout.tree(name).exists()]
    if not missing:
        return names
    tree = Tree()
    with ExitStack() as opened:
        tars: list[int] = []
        for number, diff_id in enumerate(diff_ids[: missing[-1] + 1]):
            path = layout.layer(diff_id)
            tars.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            opened.callback(os.close, tars[-1])
            before = seen(tree.root)
            with mapped(path) as tar:
                tree.apply(layer_entries(tar))
            if number in missing:
                _unpack_layer(layout, names[number], changes(before, tree.root), tars, ids)
    return names


def _unpack_layer(layout: Layout, name: str, change: Change, tars: Sequence[int], ids: int) -> None:
    """Write one layer, unless another process just does so."""
    final = layout.tree(name)
    part = part_of(final)
    with downloading(part):
        if final.exists():
            return
        if part.stat().st_uid != os.geteuid():
            raise OSError(errno.EPERM, f"{part} belongs to another user")
        remove(*part.iterdir())  # of a writer that was killed
        try:
            check_room(part, os.fstat(tars[-1]).st_size)
            new, links = part / "made", part / "links"
            (new / "root").mkdir(parents=True)
            links.mkdir()
            writer = _Writer(tars, links, ids)
            size_bytes = writer.write(change, new / "root")
            (new / "bytes").write_text(str(size_bytes))
            if writer.foreign:
                some = ", ".join(map(str, sorted(writer.foreign)[:_SOME]))
                log.warning("layer %s: files of users or groups %s belong to nobody (%d)", name, some, NOBODY)
            _sync(new)
            new.rename(final)
        except BaseException:
            remove(*part.iterdir())
            raise


def drop(layout: Layout, name: str) -> None:
    """Remove an unused unpacked layer. A process that may not delete its content leaves that to the next one that
    unpacks. Raises OSError when it stays."""
    part = layout.tree(name).rename(part_of(layout.tree(name)))
    with contextlib.suppress(OSError):
        remove(part)


def sweep_trees(layout: Layout) -> None:
    """Remove what writers that were killed left, and what was dropped, as far as we may."""
    for part in layout.trees.glob(f"*{PART}"):
        with contextlib.suppress(OSError):  # it is being written, or not ours to delete
            descriptor = hold(part, wait=False)
            try:
                remove(part)
            finally:
                os.close(descriptor)


def bytes_of(layout: Layout) -> dict[str, int]:
    """The unpacked layers of a store, with the bytes of their files."""
    found = {}
    for path in layout.trees.glob("sha256-*"):
        if not path.name.endswith(PART):
            with contextlib.suppress(FileNotFoundError):
                found[digest_of(path)] = int((path / "bytes").read_text())
    return found


def remove(*directories: Path) -> None:
    """Remove directories, however deep. Raises OSError."""
    if not directories:
        return
    done = _run("rm", "-rf", "--", *directories)
    if done.returncode and os.geteuid() != 0 and subordinate_ids.refusal() is None:
        # What this user's containers have unpacked has the user's subordinate ids.
        done = _run(sys.executable, "-m", subordinate_ids.__name__, "rm", "-rf", "--", *directories)
    if done.returncode:
        raise OSError(errno.EACCES, done.stderr.strip())


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


@dataclass
class _Writer:
    """Writes a layer below a directory, going from each to the next by ``..``: neither the depth of an image nor the
    length of its paths is bounded by the kernel's limits."""

    tars: Sequence[int]
    links: Path
    """An empty directory for files with several names."""
    ids: int
    """Users and groups that files can have, besides nobody."""
    size_bytes: int = 0
    foreign: set[int] = field(default_factory=set)
    """Users and groups that became nobody."""
    _linked: dict[int, str] = field(default_factory=dict)
    _names: dict[int, int] = field(default_factory=dict)

    def write(self, change: Change, root: Path) -> int:
        """Returns how many bytes of files it has."""
        for node in _files(change):
            self._names[id(node)] = self._names.get(id(node), 0) + 1
        here = os.open(root, _DIRECTORY)
        links = os.open(self.links, _DIRECTORY)
        try:
            stack = [(change, iter(change.children.items()))]
            while stack:
                directory, left = stack[-1]
                entry = next(left, None)
                if entry is None:
                    self._finish_directory(here, directory)
                    stack.pop()
                    if stack:
                        here = _moved(here, b"..")
                    continue
                name, child = entry
                if child is None or _is_device(child.node):
                    os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=here)
                elif child.node.children is not None:
                    os.mkdir(name, 0o700, dir_fd=here)
                    here = _moved(here, name)
                    stack.append((child, iter(child.children.items())))
                else:
                    self._put(child.node, name, here, links)
        finally:
            os.close(here)
            os.close(links)
        return self.size_bytes

    def _put(self, node: Node, name: bytes, here: int, links: int) -> None:
        if self._names[id(node)] == 1:
            self._make(node, name, here)
            return
        first = self._linked.get(id(node))
        if first is None:
            first = self._linked[id(node)] = str(len(self._linked))
            self._make(node, first.encode(), links)
        os.link(first, name, src_dir_fd=links, dst_dir_fd=here, follow_symlinks=False)

    def _make(self, node: Node, name: bytes, here: int) -> None:
        if stat.S_ISREG(node.mode):
            self._make_file(node, name, here)
            return
        if stat.S_ISLNK(node.mode):
            os.symlink(node.target, name, dir_fd=here)
        else:
            os.mknod(name, stat.S_IFIFO | 0o600, dir_fd=here)
        os.chown(name, *self._owner(node), dir_fd=here, follow_symlinks=False)
        if not stat.S_ISLNK(node.mode):
            os.chmod(name, stat.S_IMODE(node.mode), dir_fd=here)
        os.utime(name, ns=(node.mtime_ns, node.mtime_ns), dir_fd=here, follow_symlinks=False)

    def _make_file(self, node: Node, name: bytes, here: int) -> None:
        fd = os.open(name, _FRESH, 0o600, dir_fd=here)
        try:
            at, end = node.offset, node.offset + node.size
            while at < end:
                sent = os.sendfile(fd, self.tars[node.layer], at, min(end - at, _CHUNK_BYTES))
                if not sent:
                    raise OSError(errno.EIO, "a layer's tar has been truncated")
                at += sent
            self.size_bytes += node.size
            self._describe(fd, node)
        finally:
            os.close(fd)

    def _finish_directory(self, here: int, change: Change) -> None:
        """Last, because what is put into a directory changes its time, and its mode may forbid it."""
        if change.opaque:
            os.setxattr(here, _OPAQUE, b"y")
        self._describe(here, change.node)

    def _describe(self, fd: int, node: Node) -> None:
        """Owner before mode, which a change of owner takes the set-user-id bit from; capabilities after both."""
        os.fchown(fd, *self._owner(node))
        for name, value in sorted(node.xattrs.items(), key=lambda pair: pair[0] == CAPABILITY):
            os.setxattr(fd, name, value)
        os.fchmod(fd, stat.S_IMODE(node.mode))
        os.utime(fd, ns=(node.mtime_ns, node.mtime_ns))

    def _owner(self, node: Node) -> tuple[int, int]:
        self.foreign |= {number for number in (node.uid, node.gid) if number >= self.ids and number != NOBODY}
        uid, gid = (number if number < self.ids else NOBODY for number in (node.uid, node.gid))
        return uid, gid


def _files(change: Change) -> Iterator[Node]:
    """The files of a layer, each once for every name."""
    todo = [change]
    while todo:
        for child in todo.pop().children.values():
            if child is not None and child.node.children is None:
                yield child.node
            elif child is not None:
                todo.append(child)


def _moved(here: int, name: bytes) -> int:
    try:
        return os.open(name, _DIRECTORY, dir_fd=here)
    finally:
        os.close(here)


def _is_device(node: Node) -> bool:
    return stat.S_ISCHR(node.mode) or stat.S_ISBLK(node.mode)


def _sync(directory: Path) -> None:
    """Whatever lies on its file system is on the disk then."""
    opened = os.open(directory, _DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(opened) < 0:
            raise OSError(ctypes.get_errno(), f"syncfs {directory}")
    finally:
        os.close(opened)


def main(arguments: Sequence[str]) -> int:
    """Unpack an image of the store whose directory is open as a descriptor. Prints the names of the
    layers' directories, or why it cannot."""
    parser = argparse.ArgumentParser(prog="python -m agentenv.store.unpacked")
    parser.add_argument("--store-fd", type=int, required=True)
    parser.add_argument("--ids", type=int, default=IDS, help="users and groups that files can have, besides nobody")
    parser.add_argument("digest")
    options = parser.parse_args(arguments)
    os.umask(0o022)
    os.fchdir(options.store_fd)  # its path may lead through directories that are closed to us
    layout = Layout(Path())
    try:
        sweep_trees(layout)
        manifest = layout.manifest(options.digest).read_bytes()
        names = unpack(
            layout, read_manifest(manifest, layout.index(options.digest), layout.layer).diff_ids, options.ids
        )
    except (AgentEnvError, OSError) as error:
        sys.stdout.write(str(error))
        return _FAILED
    sys.stdout.write("\n".join(layout.tree(name).name for name in names))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
