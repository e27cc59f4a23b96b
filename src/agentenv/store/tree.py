"""The file tree of an image: its layers applied one after the other, in memory and without the data of files.

The rules are those of the OCI image specification (layer.md), and where it is silent those of containerd:

- A whiteout ``.wh.NAME`` removes NAME of the lower layers, ``.wh..wh..opq`` everything that the lower layers have in
  its directory; neither touches what its own layer adds, wherever in the tar they stand. So a layer is applied in two
  passes: whiteouts first. Other names that begin with ``.wh..wh.`` are AUFS' own and are left out.
- Parents that are symbolic links are followed as if the image were ``/``: nothing leads out of it. The last part of a
  name is never followed: an entry replaces the link.
- An entry replaces what has its name, a directory with everything in it, but a directory that meets a directory only
  changes its attributes.
- A missing parent becomes a directory of root with mode 0755 and time 0.
- A leading ``/`` or ``./`` of a name means nothing. A part ``..`` is refused, as are parts of more than 255 bytes.

Of extended attributes ``user.*``, POSIX ACLs and file capabilities stay. All others are left out: they are another
kernel's labels (``security.selinux``) or state of overlayfs, which an image could forge (``trusted.*``,
``user.overlay.*``).
"""

from __future__ import annotations

import mmap
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from agentenv.errors import BadImageError
from agentenv.tar_headers import BrokenTarError, Entry, Kind, entries

MAX_NAME_BYTES: Final = 255
"""NAME_MAX."""
MAX_PATH_BYTES: Final = 4096
"""PATH_MAX."""
MAX_LINKS_FOLLOWED: Final = 40
"""In one name, as in the kernel (MAXSYMLINKS)."""

ACL_ACCESS: Final = b"system.posix_acl_access"
ACL_DEFAULT: Final = b"system.posix_acl_default"
CAPABILITY: Final = b"security.capability"

_WHITEOUT: Final = b".wh."
_OPAQUE: Final = b".wh..wh..opq"
_AUFS: Final = b".wh..wh."
_FORMATS: Final = {
    Kind.FILE: stat.S_IFREG,
    Kind.SYMLINK: stat.S_IFLNK,
    Kind.CHARACTER_DEVICE: stat.S_IFCHR,
    Kind.BLOCK_DEVICE: stat.S_IFBLK,
    Kind.DIRECTORY: stat.S_IFDIR,
    Kind.FIFO: stat.S_IFIFO,
}


@dataclass(frozen=True)
class TreeLimits:
    """What one image may cost in memory and time; more is refused."""

    entries: int = 1_000_000
    """Of all its layers' tars, with the directories that they imply and the links that are followed."""
    metadata_bytes: int = 256 * 1024 * 1024
    """Of names, link targets and extended attributes."""


@dataclass(slots=True, eq=False)
class Node:
    """A file, directory or anything else of the tree; a file with hard links is one node with several names."""

    mode: int
    """With the file type (``stat.S_IFMT``)."""
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size: int = 0
    layer: int = 0
    """Where a file's data lies: the layer, counted from 0."""
    offset: int = 0
    """Where in that layer's tar."""
    target: bytes = b""
    """Of a symbolic link."""
    device: tuple[int, int] = (0, 0)
    xattrs: Mapping[bytes, bytes] = field(default_factory=dict)
    children: dict[bytes, Node] | None = None
    """Of a directory; None for everything else."""


def layer_entries(tar: mmap.mmap | bytes) -> Iterator[Entry]:
    """The entries of an uncompressed layer, in order. Raises BadImageError."""
    try:
        yield from entries(tar)
    except BrokenTarError as error:
        raise BadImageError(f"the layer's {error}") from None


class Tree:
    """The tree after the layers that were applied so far."""

    def __init__(self, limits: TreeLimits | None = None) -> None:
        self.root = _directory()
        self._limits = limits or TreeLimits()
        self._layers = self._entries = self._bytes = 0

    def apply(self, layer: Iterable[Entry]) -> None:
        """Apply the next layer. Raises BadImageError; the tree is useless then."""
        added: list[tuple[list[bytes], Entry]] = []
        for entry in layer:
            self._spend(entry)
            parts = _parts(entry.name)
            if any(part.startswith(_AUFS) and part != _OPAQUE for part in parts):
                continue
            if any(part.startswith(_WHITEOUT) for part in parts[:-1]):
                raise BadImageError(f"{_shown(entry.name)} is below a whiteout")
            if parts and parts[-1].startswith(_WHITEOUT):
                self._remove(parts, entry)
            added.append((parts, entry))
        for parts, entry in added:
            self._add(parts, entry)
        self._layers += 1

    def _spend(self, entry: Entry) -> None:
        """Count an entry against the limits."""
        self._count(1)
        self._bytes += len(entry.name) + len(entry.link)
        self._bytes += sum(len(name) + len(value) for name, value in entry.xattrs.items())
        if self._bytes > self._limits.metadata_bytes:
            raise BadImageError(f"the image has more than {self._limits.metadata_bytes} bytes of names and attributes")

    def _count(self, entries: int) -> None:
        self._entries += entries
        if self._entries > self._limits.entries:
            raise BadImageError(f"the image has more than {self._limits.entries} entries")

    def _remove(self, parts: list[bytes], entry: Entry) -> None:
        """Apply a whiteout to the lower layers."""
        children = self._children(parts[:-1], entry.name, create=False)
        if children is None:
            return
        if parts[-1] == _OPAQUE:
            children.clear()
            return
        hidden = parts[-1].removeprefix(_WHITEOUT)
        if hidden in (b"", b".", b".."):
            raise BadImageError(f"the whiteout {_shown(entry.name)} names nothing that can be removed")
        children.pop(hidden, None)

    def _add(self, parts: list[bytes], entry: Entry) -> None:
        if not parts:
            if entry.kind is not Kind.DIRECTORY:
                raise BadImageError("the entry of the root is not a directory")
            _become(self.root, entry)
            return
        siblings = self._children(parts[:-1], entry.name)
        assert siblings is not None
        name = parts[-1]
        if name.startswith(_WHITEOUT):
            return
        there = siblings.get(name)
        if entry.kind is Kind.HARD_LINK:
            siblings[name] = self._linked(entry)
        elif entry.kind is Kind.DIRECTORY and there is not None and there.children is not None:
            _become(there, entry)
        else:
            siblings[name] = self._node(entry)

    def _node(self, entry: Entry) -> Node:
        return Node(
            _FORMATS[entry.kind] | (0o777 if entry.kind is Kind.SYMLINK else entry.mode),  # Linux knows no other
            entry.uid,
            entry.gid,
            entry.mtime_ns,
            entry.size,
            self._layers,
            entry.offset,
            entry.link,
            entry.device,
            kept_xattrs(entry.xattrs),
            {} if entry.kind is Kind.DIRECTORY else None,
        )

    def _linked(self, entry: Entry) -> Node:
        """What a hard link is another name of: in this layer or a lower one."""
        parts = _parts(entry.link)
        siblings = self._children(parts[:-1], entry.link, create=False) if parts else None
        found = siblings.get(parts[-1]) if siblings is not None else None
        if found is None:
            raise BadImageError(f"{_shown(entry.name)} is a hard link to {_shown(entry.link)}, which does not exist")
        if found.children is not None:
            raise BadImageError(f"{_shown(entry.name)} is a hard link to a directory")
        return found

    def _children(self, path: list[bytes], name: bytes, *, create: bool = True) -> dict[bytes, Node] | None:
        """What is in the directory at ``path``; None if there is none and it is not to be created.

        Raises BadImageError when something else is there, or the links that lead there do not end.
        """
        trail = [self.root]
        left = path[::-1]
        followed = 0
        while left:
            part = left.pop()
            if part == b"..":  # of a link's target; the root's parent is the root
                trail = trail[:-1] or trail
                continue
            here = trail[-1].children
            assert here is not None
            node = here.get(part)
            if node is None:
                if not create:
                    return None
                self._count(1)
                if len(part) > MAX_NAME_BYTES:  # of a link's target
                    raise BadImageError(f"the parents of {_shown(name)} are too long for a file system")
                node = here[part] = _directory()
            if stat.S_ISLNK(node.mode):
                followed += 1
                self._count(1)
                if followed > MAX_LINKS_FOLLOWED:
                    raise BadImageError(f"the parents of {_shown(name)} are links in a loop")
                if node.target.startswith(b"/"):
                    trail = [self.root]
                left += [part for part in reversed(node.target.split(b"/")) if part not in (b"", b".")]
            elif node.children is None:
                if not create:
                    return None
                raise BadImageError(f"a parent of {_shown(name)} is not a directory")
            else:
                trail.append(node)
        return trail[-1].children


def kept_xattrs(found: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Those extended attributes that slots see. Raises BadImageError for a malformed one."""
    kept = {}
    for name, value in found.items():
        if name in (ACL_ACCESS, ACL_DEFAULT):
            _check_acl(value)
        elif name != CAPABILITY and (not name.startswith(b"user.") or name.startswith(b"user.overlay.")):
            continue
        if len(name) > MAX_NAME_BYTES or name == b"user." or b"\0" in name:
            raise BadImageError(f"an extended attribute of the name {_shown(name)}")
        if len(value) > 0xFFFF:
            raise BadImageError(f"an extended attribute of {len(value)} bytes (at most 65535)")
        kept[name] = value
    return kept


def _check_acl(value: bytes) -> None:
    """As ``posix_acl_xattr_header`` of Linux: version 2 (32 bits), then entries of 8 bytes."""
    if value[:4] != b"\x02\0\0\0" or len(value) % 8 != 4:
        raise BadImageError("a malformed POSIX ACL")


def _directory() -> Node:
    return Node(stat.S_IFDIR | 0o755, children={})


def _become(directory: Node, entry: Entry) -> None:
    """Give a directory the attributes of a later entry for it."""
    directory.mode = stat.S_IFDIR | entry.mode
    directory.uid, directory.gid, directory.mtime_ns = entry.uid, entry.gid, entry.mtime_ns
    directory.xattrs = kept_xattrs(entry.xattrs)


def _parts(name: bytes) -> list[bytes]:
    """The parts of a name. Raises BadImageError when a file system could not have it."""
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if not name:
        raise BadImageError("an entry without a name")
    if b".." in parts:
        raise BadImageError(f"{_shown(name)} has a part '..'")
    if len(name) > MAX_PATH_BYTES or any(len(part) > MAX_NAME_BYTES for part in parts):
        raise BadImageError(f"{_shown(name)} is too long for a file system")
    return parts


def _shown(name: bytes) -> str:
    """A name for a message, cut where it is long."""
    text = name.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 80 else text[:77] + "…")
