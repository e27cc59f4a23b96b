"""The bytes of an index; whether Linux reads them as meant is tested in tests/integration/test_store_mounts.py."""

from __future__ import annotations

import stat
import struct

import pytest

from agentenv.errors import BadImageError
from agentenv.store.erofs import BLOCK, MAX_LAYER_BYTES, MAX_LAYERS, Layer, crc32c, index_of
from agentenv.store.tree import Node

LAYER = Layer("0" * 64, MAX_LAYER_BYTES)
ROOT_AT = 1536  # after the superblock, one device slot and the rest of the block


def root(**children: Node) -> Node:
    return Node(stat.S_IFDIR | 0o755, children={name.encode(): node for name, node in children.items()})


def file(size: int, offset: int = 0, **more: dict[bytes, bytes]) -> Node:
    return Node(stat.S_IFREG | 0o644, size=size, offset=offset, **more)  # type: ignore[arg-type]


def test_the_checksum_is_castagnolis() -> None:
    """The check value of CRC-32C (RFC 3720) is inverted at the end; the kernel's is not."""
    assert crc32c(b"123456789") ^ 0xFFFFFFFF == 0xE3069283


def test_the_superblock() -> None:
    index = index_of(root(a=file(1)), [LAYER])
    magic, checksum = struct.unpack_from("<II", index, 1024)
    assert magic == 0xE0F5E1E2
    unsigned = index[1024:1028] + bytes(4) + index[1032 : 1024 + BLOCK]
    assert checksum == crc32c(unsigned)
    assert struct.unpack_from("<H", index, 1024 + 14)[0] * 32 == ROOT_AT
    assert struct.unpack_from("<I", index, 1024 + 36)[0] * BLOCK == len(index)
    assert index[1152 : 1152 + 64] == b"0" * 64


def test_the_same_tree_gives_the_same_bytes() -> None:
    one, other = (index_of(root(**{name: file(5) for name in order}), [LAYER]) for order in ("abc", "cba"))
    assert one == other


def chunks_of(size: int, offset: int) -> list[tuple[int, int, int]]:
    """The chunk indexes of the only file of an index."""
    index = index_of(root(a=file(size, offset)), [LAYER])
    inode = 32 * struct.unpack_from("<Q", index, ROOT_AT + 64 + 2 * 12)[0]  # the third name, after "." and ".."
    found, bits = struct.unpack_from("<QI", index, inode + 8)
    assert (found, bits & 0x20) == (size, 0x20)
    count = -(-size // (BLOCK << (bits & 31)))
    return [struct.unpack_from("<HHI", index, inode + 64 + 8 * number) for number in range(count)]


@pytest.mark.parametrize("size", [1, 512, 513, 10**6, 2**40 - 1, 2**40])
def test_a_file_is_one_chunk(size: int) -> None:
    assert chunks_of(size, 7 * BLOCK) == [(0, 1, 7)]


def test_a_file_of_more_than_2_to_the_40_bytes_is_several() -> None:
    assert chunks_of(2**40 + 1, 0) == [(0, 1, 0), (0, 1, 2**31)]


def test_data_may_lie_at_the_last_address() -> None:
    assert chunks_of(BLOCK, MAX_LAYER_BYTES - BLOCK) == [(0, 1, 2**32 - 3)]


@pytest.mark.parametrize(
    ("layers", "reason"),
    [([Layer("a", MAX_LAYER_BYTES + 1)], "a layer has"), ([Layer("a", 0)] * (MAX_LAYERS + 1), "513 layers")],
)
def test_too_much_is_refused(layers: list[Layer], reason: str) -> None:
    with pytest.raises(BadImageError, match=reason):
        index_of(root(), layers)


def test_too_many_extended_attributes_are_refused() -> None:
    xattrs = {b"user.%d" % number: bytes(60_000) for number in range(5)}
    with pytest.raises(BadImageError, match="bytes of extended attributes"):
        index_of(root(a=file(1, xattrs=xattrs)), [LAYER])
