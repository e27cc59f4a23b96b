"""Writes the index of an image: an EROFS image with its metadata only. The data of files stays in the layers' tars,
which are the index's extra devices: a mount has to name them all, in order (``device=LAYER1,device=LAYER2``).
Without them the kernel mounts it too, but cannot read its files.

The format is Linux' ``fs/erofs/erofs_fs.h``, whose names are in the comments. Blocks have 512 bytes, as in a tar, so
that every file in a tar begins at a block. In the index lie, in this order: the superblock and the table of devices;
the inodes, each followed by its extended attributes and its tail (the place of a file's data, a short symbolic link, or
the last block of a directory); the rest of directories, and long symbolic links. Every feature is one of Linux 5.16 or
older; that an index is mounted from a file, without a loop device, takes 6.12.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

from agentenv.errors import BadImageError
from agentenv.store.tree import ACL_ACCESS, ACL_DEFAULT, Node

BLOCK: Final = 512
MAX_LAYERS: Final = 512
"""The kernel's would be 65,535; engines make images of at most 127."""
MAX_LAYER_BYTES: Final = (2**32 - 2) * BLOCK
"""Block addresses have 32 bits (48 in some later kernels), and the last one means a hole."""

_BLOCK_BITS: Final = 9
_SUPER_OFFSET: Final = 1024  # EROFS_SUPER_OFFSET
_MAGIC: Final = 0xE0F5E1E2  # EROFS_SUPER_MAGIC_V1
_COMPAT: Final = 0x1 | 0x2  # EROFS_FEATURE_COMPAT_SB_CHKSUM, _MTIME
_INCOMPAT: Final = 0x4 | 0x8  # EROFS_FEATURE_INCOMPAT_CHUNKED_FILE, _DEVICE_TABLE

_SUPER_BLOCK: Final = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQB23x")  # struct erofs_super_block
_DEVICE_SLOT: Final = struct.Struct("<64sII56x")  # struct erofs_deviceslot
_INODE: Final = struct.Struct("<HHHHQIIIIqII16x")  # struct erofs_inode_extended
_CHUNK_INDEX: Final = struct.Struct("<HHI")  # struct erofs_inode_chunk_index
_XATTR_HEADER: Final = struct.Struct("<I8x")  # struct erofs_xattr_ibody_header
_XATTR_ENTRY: Final = struct.Struct("<BBH")  # struct erofs_xattr_entry
_DIRENT: Final = struct.Struct("<QHBx")  # struct erofs_dirent
_INODE_UNIT: Final = 32  # EROFS_ISLOTBITS: an inode's number is its place divided by it

_NOWHERE: Final = 1 << 31
"""``mapped_blkaddr``: where Linux looks for a layer's data in the index if no devices are named. Nothing is there, so
reading fails and does not return the index's own bytes."""

_FLAT_PLAIN, _FLAT_INLINE, _CHUNK_BASED = 0, 2, 4  # EROFS_INODE_*
_EXTENDED: Final = 1  # EROFS_INODE_LAYOUT_EXTENDED
_CHUNK_INDEXES: Final = 0x20  # EROFS_CHUNK_FORMAT_INDEXES
_MAX_CHUNK_BITS: Final = 31  # EROFS_CHUNK_FORMAT_BLKBITS_MASK: a chunk has at most 2^31 blocks
_MAX_XATTR_UNITS: Final = 0xFFFF  # i_xattr_icount

_FILE_TYPES: Final = {
    stat.S_IFREG: 1,
    stat.S_IFDIR: 2,
    stat.S_IFCHR: 3,
    stat.S_IFBLK: 4,
    stat.S_IFIFO: 5,
    stat.S_IFLNK: 7,
}  # FT_* of include/linux/fs_types.h
_XATTR_PREFIXES: Final = (  # EROFS_XATTR_INDEX_*
    (b"user.", 1),
    (ACL_ACCESS, 2),
    (ACL_DEFAULT, 3),
    (b"security.", 6),
)


@dataclass(frozen=True)
class Layer:
    """A layer's tar as a device of the index."""

    name: str
    """Its name in the device table: the digits of its digest (at most 64 bytes)."""
    size_bytes: int


@dataclass(slots=True, eq=False)
class _Inode:
    """A node with its place in the index."""

    node: Node
    xattrs: bytes
    at: int = 0
    links: int = 1
    names: list[tuple[bytes, _Inode]] = field(default_factory=list)
    """Of a directory: what is in it, sorted, itself and its parent too."""
    inline: int = 0
    """How many bytes of its content follow the inode: all of a link's, or those of a directory's last block; 0 where
    they do not fit into the inode's own last block."""
    content: bytes = b""
    """Of a directory or a symbolic link."""
    content_at: int = 0
    """Where the content begins that does not follow the inode."""

    @property
    def nid(self) -> int:
        """The number by which directories name it."""
        return self.at // _INODE_UNIT

    @property
    def body_bytes(self) -> int:
        """The inode and its extended attributes."""
        return _INODE.size + len(self.xattrs)


def index_of(root: Node, layers: Sequence[Layer]) -> bytes:
    """The index of a tree whose files lie in these layers. The same tree and layers give the same bytes.

    Raises BadImageError for what EROFS cannot express: too large a layer, too many extended attributes on one file.
    """
    _check_layers(layers)
    inodes = _inodes(root)
    end = _place_inodes(inodes, _round_up(_SUPER_OFFSET + _SUPER_BLOCK.size * (1 + len(layers)), BLOCK))
    for inode in inodes:
        inode.content = _directory_content(inode.names) if inode.names else inode.node.target
        if outside := len(inode.content) - inode.inline:
            inode.content_at = end
            end = _round_up(end + outside, BLOCK)
    index = bytearray(end)
    for number, inode in enumerate(inodes, 1):
        _write_inode(index, inode, number)
    _write_head(index, inodes, layers)
    return bytes(index)


def _check_layers(layers: Sequence[Layer]) -> None:
    if len(layers) > MAX_LAYERS:
        raise BadImageError(f"the image has {len(layers)} layers (at most {MAX_LAYERS})")
    for layer in layers:
        if layer.size_bytes > MAX_LAYER_BYTES:
            raise BadImageError(f"a layer has {layer.size_bytes} bytes (at most {MAX_LAYER_BYTES})")


def _inodes(root: Node) -> list[_Inode]:
    """An inode per node, parents first, with its number of links and the names in it."""
    first = _Inode(root, _xattr_body(root), links=2)
    first.names = [(b".", first), (b"..", first)]
    inodes, by_node = [first], {id(root): first}
    stack = [first]
    while stack:
        directory = stack.pop()
        below = []
        for name, node in sorted((directory.node.children or {}).items()):
            inode = by_node.get(id(node))
            if inode is not None:
                inode.links += 1
            else:
                inode = by_node[id(node)] = _Inode(node, _xattr_body(node))
                inodes.append(inode)
                if node.children is not None:
                    inode.links, inode.names = 2, [(b".", inode), (b"..", directory)]
                    directory.links += 1
                    below.append(inode)
            directory.names.append((name, inode))
        directory.names.sort(key=itemgetter(0))
        stack += reversed(below)
    return inodes


def _xattr_body(node: Node) -> bytes:
    if not node.xattrs:
        return b""
    body = bytearray(_XATTR_HEADER.pack(0))
    for name, value in sorted(node.xattrs.items()):
        prefix, number = next((prefix, number) for prefix, number in _XATTR_PREFIXES if name.startswith(prefix))
        rest = name[len(prefix) :]
        body += _XATTR_ENTRY.pack(len(rest), number, len(value)) + rest + value
        body += bytes(-len(body) % 4)
    if _xattr_units(body) > _MAX_XATTR_UNITS:
        raise BadImageError(f"a file has {len(body)} bytes of extended attributes (at most {4 * _MAX_XATTR_UNITS})")
    return bytes(body)


def _xattr_units(body: bytes | bytearray) -> int:
    """As ``i_xattr_icount`` counts: the header is one, then one for every 4 bytes."""
    return 1 + (len(body) - _XATTR_HEADER.size) // 4 if body else 0


def _place_inodes(inodes: Iterable[_Inode], at: int) -> int:
    """Give every inode its place, from ``at`` on. Returns where the content of directories may begin."""
    for inode in inodes:
        at = _round_up(at, _INODE_UNIT)
        inode.inline = _inline_bytes(inode)
        if at % BLOCK + inode.body_bytes % BLOCK + inode.inline > BLOCK and inode.inline:
            at = _round_up(at, BLOCK)  # what is inline must not cross a block
        inode.at = at
        at += inode.body_bytes + inode.inline
        if stat.S_ISREG(inode.node.mode) and inode.node.size:
            at += -inode.body_bytes % 8 + _CHUNK_INDEX.size * len(_chunks(inode.node))
    return _round_up(at, BLOCK)


def _inline_bytes(inode: _Inode) -> int:
    """How much of its content follows an inode: of a directory what its last block has, of a link everything; nothing
    where the rest of the inode's last block cannot hold that."""
    wanted = _directory_bytes(inode.names) % BLOCK if inode.names else len(inode.node.target)
    return wanted if inode.body_bytes % BLOCK + wanted <= BLOCK else 0


def _chunk_bits(node: Node) -> int:
    """The chunk's size in blocks, as a power of 2: the file is one chunk unless it is larger than 2^40 bytes."""
    return min(_MAX_CHUNK_BITS, max(0, (node.size - 1).bit_length() - _BLOCK_BITS))


def _chunks(node: Node) -> range:
    """The first blocks of a file's chunks."""
    begin, blocks = node.offset // BLOCK, -(-node.size // BLOCK)
    return range(begin, begin + blocks, 1 << _chunk_bits(node))


def _directory_bytes(names: Sequence[tuple[bytes, _Inode]]) -> int:
    """The length of :func:`_directory_content`, which depends on the names only."""
    full, room = 0, BLOCK
    for name, _ in names:
        needed = _DIRENT.size + len(name)
        if needed > room:
            full, room = full + BLOCK, BLOCK
        room -= needed
    return full + BLOCK - room


def _directory_content(names: Sequence[tuple[bytes, _Inode]]) -> bytes:
    """Blocks of entries: first their numbers, types and the places of their names, then the names."""
    content, room = bytearray(), BLOCK
    block: list[tuple[bytes, _Inode]] = []
    for name, inode in names:
        needed = _DIRENT.size + len(name)
        if needed > room:
            content += _directory_block(block)
            content += bytes(-len(content) % BLOCK)
            block, room = [], BLOCK
        block.append((name, inode))
        room -= needed
    return bytes(content + _directory_block(block))


def _directory_block(block: Sequence[tuple[bytes, _Inode]]) -> bytes:
    at = _DIRENT.size * len(block)
    entries = bytearray()
    for name, inode in block:
        entries += _DIRENT.pack(inode.nid, at, _FILE_TYPES[stat.S_IFMT(inode.node.mode)])
        at += len(name)
    return bytes(entries) + b"".join(name for name, _ in block)


def _write_inode(index: bytearray, inode: _Inode, number: int) -> None:
    node = inode.node
    layout, size, union, tail = _content_of(inode)
    seconds, ns = divmod(node.mtime_ns, 10**9)
    units = _xattr_units(inode.xattrs)
    head = (_EXTENDED | layout << 1, units, node.mode, 0, size, union, number, node.uid, node.gid, seconds, ns)
    _INODE.pack_into(index, inode.at, *head, inode.links)
    end = inode.at + _INODE.size
    index[end : end + len(inode.xattrs) + len(tail)] = inode.xattrs + tail
    outside = len(inode.content) - inode.inline
    index[inode.content_at : inode.content_at + outside] = inode.content[:outside]


def _content_of(inode: _Inode) -> tuple[int, int, int, bytes]:
    """How an inode's content is stored: the data layout, ``i_size``, ``i_u`` and what follows the inode."""
    node = inode.node
    if inode.content:
        layout = _FLAT_INLINE if inode.inline else _FLAT_PLAIN
        tail = inode.content[len(inode.content) - inode.inline :]
        return layout, len(inode.content), inode.content_at // BLOCK, tail
    if stat.S_ISREG(node.mode) and node.size:
        places = (_CHUNK_INDEX.pack(0, node.layer + 1, block) for block in _chunks(node))
        tail = bytes(-inode.body_bytes % 8) + b"".join(places)
        return _CHUNK_BASED, node.size, _CHUNK_INDEXES | _chunk_bits(node), tail
    major, minor = node.device
    return _FLAT_PLAIN, 0, minor & 0xFF | major << 8 | (minor & ~0xFF) << 12, b""  # new_encode_dev()


def _write_head(index: bytearray, inodes: Sequence[_Inode], layers: Sequence[Layer]) -> None:
    """The superblock, with its checksum, and the table of devices."""
    slots_at = _SUPER_OFFSET + _SUPER_BLOCK.size
    for number, layer in enumerate(layers):
        blocks = -(-layer.size_bytes // BLOCK)
        _DEVICE_SLOT.pack_into(
            index, slots_at + _DEVICE_SLOT.size * number, layer.name.encode("ascii"), blocks, _NOWHERE
        )
    _SUPER_BLOCK.pack_into(
        index,
        _SUPER_OFFSET,
        _MAGIC,
        0,  # checksum
        _COMPAT,
        _BLOCK_BITS,
        0,  # sb_extslots
        inodes[0].nid,  # root_nid, 16 bits: the root is the first inode
        len(inodes),
        0,  # build_time
        0,  # build_time_nsec
        len(index) // BLOCK,
        0,  # meta_blkaddr
        0,  # xattr_blkaddr
        bytes(16),  # uuid
        b"agentenv",  # volume_name
        _INCOMPAT,
        0,  # u1
        len(layers),
        slots_at // _DEVICE_SLOT.size,
        0,  # dirblkbits
        0,  # xattr_prefix_count
        0,  # xattr_prefix_start
        0,  # packed_nid
        0,  # xattr_filter_reserved
    )
    checksum = crc32c(index[_SUPER_OFFSET : _SUPER_OFFSET + BLOCK])
    struct.pack_into("<I", index, _SUPER_OFFSET + 4, checksum)


def crc32c(data: bytes | bytearray) -> int:
    """As the kernel's ``crc32c(~0, data)``: Castagnoli's polynomial (reversed), not inverted at the end. For the
    superblock's one block a bit at a time is fast enough."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
