"""What the kernel makes of an index is what GNU tar makes of the layers."""

from __future__ import annotations

import os
import stat
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentenv.store import Store
from agentenv.store.erofs import Layer, index_of
from agentenv.store.tree import ACL_ACCESS, ACL_DEFAULT, CAPABILITY, Tree
from agentenv.tar_headers import BLOCK, Entry, Kind, entries, mapped
from tests.image_sources import member, oci_layout, sha256, tar_of
from tests.integration.mounted_index import NAMES, Listing, differences, listing, mounted

KERNEL = tuple(int(part) for part in os.uname().release.split(".")[:2])
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting is root's"),
    pytest.mark.skipif(KERNEL < (6, 12), reason="before Linux 6.12 EROFS is not mounted from files"),
]
XATTRS = [name.decode() for name in (CAPABILITY, ACL_ACCESS, ACL_DEFAULT)]
CAPABILITIES = "\x01\0\0\x02\0\x04" + "\0" * 14  # cap_net_bind_service=ep


def indexed(directory: Path, *layers: bytes | Path) -> tuple[Path, list[Path]]:
    """The index of layers, each given as a tar or its path."""
    tree = Tree()
    tars = []
    for number, layer in enumerate(layers):
        tar = layer if isinstance(layer, Path) else directory / f"{number}.tar"
        if isinstance(layer, bytes):
            tar.write_bytes(layer)
        tars.append(tar)
        with mapped(tar) as content:
            tree.apply(entries(content))
    index = directory / "image.idx"
    index.write_bytes(index_of(tree.root, [Layer("", tar.stat().st_size) for tar in tars]))
    return index, tars


def seen(directory: Path, *layers: bytes | Path) -> Listing:
    index, tars = indexed(directory, *layers)
    return mounted(index, tars, XATTRS)


def unpacked(directory: Path, tars: Sequence[Path]) -> Listing:
    """As GNU tar unpacks them one over the other; what is to go is removed by hand before."""
    at = directory / "unpacked"
    at.mkdir()
    for tar in tars:
        with tarfile.open(tar) as content:
            gone = [path for made in content for path in hidden_by(made, at)]
        subprocess.run(["rm", "-rf", "--", *gone], check=True)
        command = ["tar", "-C", str(at), "--numeric-owner", "--xattrs", "--xattrs-include=*", "--exclude=.wh.*"]
        subprocess.run([*command, "--same-permissions", "-xf", tar], check=True)
    return listing(at, XATTRS)


def hidden_by(made: tarfile.TarInfo, at: Path) -> list[Path]:
    """What an entry of the next layer hides of those that are there: whiteouts, and a directory that is replaced."""
    path = at / made.name
    if path.name == ".wh..wh..opq":
        return list(path.parent.iterdir())
    if path.name.startswith(".wh."):
        return [path.parent / path.name.removeprefix(".wh.")]
    return [path] if path.is_dir() and not made.isdir() else []


def xattr(name: str, value: str) -> dict[str, str]:
    return {f"SCHILY.xattr.{name}": value}


RICH = [
    member("./", type=tarfile.DIRTYPE, mode=0o755),
    member("./d", type=tarfile.DIRTYPE, mode=0o1777, uid=70_000, gid=80_000, pax_headers={"mtime": "1.000000009"}),
    member("./d/empty", b""),
    member("./d/one", b"1"),
    member("./d/block", b"b" * BLOCK),
    member("./d/more", os.urandom(100_001), mode=0o6755, pax_headers={"mtime": "-3.25"}),
    member("./d/owned", b"x", uid=4_000_000_000, gid=4_000_000_001),
    member("./d/hard", type=tarfile.LNKTYPE, linkname="./d/more"),
    member("./d/" + "n" * 255, b"long"),
    member("./s", type=tarfile.SYMTYPE, linkname="d/one"),
    *(member(f"./s{n}", type=tarfile.SYMTYPE, linkname="t" * n) for n in (400, 448, 449, 511, 512, 513, 4000, 4095)),
    member("./sx", type=tarfile.SYMTYPE, linkname="t" * 90),
    member("./fifo", type=tarfile.FIFOTYPE),
    member("./null", type=tarfile.CHRTYPE, mode=0o666, devmajor=1, devminor=3),
    member("./disk", type=tarfile.BLKTYPE, devmajor=259, devminor=70_000),
    member("./ping", b"elf", mode=0o755, pax_headers=xattr("security.capability", CAPABILITIES)),
    member("./tagged", b"x", pax_headers=xattr("user.a", "1") | xattr("user.bb", "v" * 1500)),
    member("./é", "ü".encode()),
]


def test_a_rich_tar(tmp_path: Path) -> None:
    made = tar_of(*RICH)
    found = seen(tmp_path, made)
    assert differences(found, unpacked(tmp_path, [tmp_path / "0.tar"])) == []
    assert found[b"ping"][-1] == {"security.capability": CAPABILITIES.encode()}
    assert len(found) == len(RICH)


def test_directories_of_every_size_around_a_block(tmp_path: Path) -> None:
    """Their last blocks follow their inodes where they fit, which depends on names and extended attributes."""
    made = [member("./", type=tarfile.DIRTYPE, mode=0o755)]
    for names in range(70):
        pax = xattr("user.a", "v" * (names * 13 % 600)) if names % 3 == 0 else {}
        made.append(member(f"./{names}", type=tarfile.DIRTYPE, mode=0o755, pax_headers=pax))
        made += [member(f"./{names}/{'n' * (number % 7)}{number}", b"x") for number in range(names)]
    for length in range(200, 256):
        made.append(member(f"./long{length}", type=tarfile.DIRTYPE, mode=0o755))
        made.append(member(f"./long{length}/" + "n" * length, b"y"))
    found = seen(tmp_path, tar_of(*made))
    assert differences(found, unpacked(tmp_path, [tmp_path / "0.tar"])) == []
    assert len(found) == len(made)


@pytest.mark.parametrize(("form", "packed"), [("gnu", "etc"), ("ustar", "etc"), ("pax", "usr/sbin")])
def test_files_of_this_machine_as_gnu_tar_packs_them(tmp_path: Path, form: str, packed: str) -> None:
    tar = tmp_path / "system.tar"
    command: list[str | Path] = ["tar", "-C", "/", f"--format={form}", "--sort=name", "-cf", tar]
    subprocess.run([*command, "--no-recursion", ".", "usr", "--recursion", packed], check=True)
    found = seen(tmp_path, tar)
    assert len(found) > 100
    assert differences(found, unpacked(tmp_path, [tar])) == []


def test_three_layers_with_whiteouts(tmp_path: Path) -> None:
    top = member("./", type=tarfile.DIRTYPE, mode=0o755)
    one = tar_of(
        top, member("d", type=tarfile.DIRTYPE, mode=0o755), member("d/a", b"a" * 700), member("d/b", b"b"),
        member("d/e", type=tarfile.DIRTYPE, mode=0o755), member("d/e/x", b"x"), member("f", b"file"),
        member("g", type=tarfile.DIRTYPE, mode=0o755), member("g/y", b"y"), member("keep", b"k" * 5000, mode=0o4711),
        member("keep2", type=tarfile.LNKTYPE, linkname="keep"), member("bin", type=tarfile.SYMTYPE, linkname="d"),
    )  # fmt: skip
    two = tar_of(
        top, member("d/.wh.a"), member("d", type=tarfile.DIRTYPE, mode=0o700, uid=9), member("d/new", b"n" * 513),
        member("g", b"now a file"), member("g2", type=tarfile.LNKTYPE, linkname="keep"),
        member("d/e", type=tarfile.DIRTYPE, mode=0o711), member("d/e/.wh..wh..opq"), member("d/e/own", b"own"),
    )  # fmt: skip
    three = tar_of(
        top, member(".wh.f"), member("f", type=tarfile.DIRTYPE, mode=0o750), member("f/deep", b"deep"),
        member(".wh.keep2"), member("d", type=tarfile.DIRTYPE, mode=0o755), member("d/b", b"replaced" * 200, uid=1),
    )  # fmt: skip
    found = seen(tmp_path, one, two, three)
    assert b"d/a" not in found
    assert differences(found, unpacked(tmp_path, [tmp_path / f"{n}.tar" for n in range(3)])) == []


def test_layers_without_files_and_the_same_layer_twice(tmp_path: Path) -> None:
    layer = tar_of(member("a", b"content"))
    found = seen(tmp_path, b"", layer, tar_of(), layer)
    assert found.keys() == {b".", b"a"}
    assert seen(tmp_path).keys() == {b"."}  # of no layer at all


def test_a_directory_of_100_000_files(tmp_path: Path) -> None:
    names = [f"{'x' * (n % 200)}{n}".encode() for n in range(100_000)]
    tree = Tree()
    tree.apply(Entry(name, Kind.SYMLINK, 0o777, 0, 0, 0, link=b"t") for name in names)
    index = tmp_path / "image.idx"
    index.write_bytes(index_of(tree.root, []))
    assert mounted(index, [], NAMES).keys() == set(names)


def test_more_extended_attributes_than_fit_a_block(tmp_path: Path) -> None:
    pax = {f"SCHILY.xattr.user.{n}": str(n) * 300 for n in range(200)}
    pax |= {"SCHILY.xattr.user." + "n" * 250: "v" * 65_535}
    found = seen(tmp_path, tar_of(member("a", b"a", pax_headers=pax), member("b", b"b")))
    assert found[b"a"][-1] == {key.removeprefix("SCHILY.xattr."): value.encode() for key, value in pax.items()}
    assert found[b"b"][-1] == {}


def test_access_control_lists(tmp_path: Path) -> None:
    """As ``setfacl -m u:33:r`` stores it: user::rw-, user:33:r--, group::r--, mask::r--, other::r--."""
    entry = "{}\0{}\0{}"
    nobody = "\udcff" * 4
    acl = "\x02\0\0\0" + "".join(
        [
            entry.format("\x01", "\x06", nobody),
            entry.format("\x02", "\x04", "\x21\0\0\0"),
            entry.format("\x04", "\x04", nobody),
            entry.format("\x10", "\x04", nobody),
            entry.format("\x20", "\x04", nobody),
        ]
    )
    layer = tar_of(member("a", b"", mode=0o644, pax_headers=xattr("system.posix_acl_access", acl)))
    found = seen(tmp_path, layer)
    assert found[b"a"][-1] == {"system.posix_acl_access": acl.encode("utf-8", "surrogateescape")}


def test_a_file_larger_than_2_to_the_40(tmp_path: Path) -> None:
    """A sparse file of this machine's, whose tar is not: a header, a hole, the last bytes, another entry."""
    size = 2**40 + 2 * BLOCK + 5
    first, second = (member(name, type=tarfile.REGTYPE)[0] for name in ("huge", "after"))
    first.size, second.size = size, 3
    tar = tmp_path / "huge.tar"
    with tar.open("wb") as file:
        file.write(first.tobuf(tarfile.GNU_FORMAT))
        file.seek(BLOCK + size - 4)
        file.write(b"last")
        file.seek(-(-(BLOCK + size) // BLOCK) * BLOCK)
        file.write(second.tobuf(tarfile.GNU_FORMAT) + b"end".ljust(3 * BLOCK, b"\0"))
    found = seen(tmp_path, tar)
    assert found[b"huge"][2] == (size, 1)
    os.truncate(tar, BLOCK + size)
    with tar.open("rb") as expected:
        end = tmp_path / "end"
        expected.seek(BLOCK + size - 64 * 2**20)
        end.write_bytes(expected.read())
    assert found[b"huge"][6] == listing(tmp_path)[b"end"][6]


@pytest.mark.parametrize("at", [1024 + 48, 1152 + 10])
def test_a_damaged_superblock_or_device_table_is_not_mounted(tmp_path: Path, at: int) -> None:
    index, tars = indexed(tmp_path, tar_of(member("a", b"a")))
    content = bytearray(index.read_bytes())
    content[at] ^= 1
    index.write_bytes(content)
    with pytest.raises(OSError, match="Bad message"):
        mounted(index, tars)


def test_devices_of_a_layer_are_in_the_index(tmp_path: Path) -> None:
    """Whoever mounts it decides that they mean nothing (``nodev``)."""
    mode = seen(tmp_path, tar_of(member("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3)))[b"null"]
    assert stat.S_ISCHR(int(mode[0], 8))
    assert mode[4] == os.makedev(1, 3)


def test_an_image_of_127_layers(tmp_path: Path) -> None:
    """As many as engines make."""
    layers = [tar_of(member(f"f{n}", b"%d" % n)) for n in range(127)]
    store = Store.open(tmp_path / "store")
    image = store.ensure(f"oci:{oci_layout(tmp_path / 'oci', *layers, how='').directory}")
    found = mounted(image.index, image.layers)
    assert found.keys() == {b".", *(b"f%d" % n for n in range(127))}
    contents = [found[b"f%d" % n][6] for n in range(127)]
    assert contents == [sha256(b"%d" % n).removeprefix("sha256:") for n in range(127)]


def test_mounted_without_its_layers_an_index_gives_errors_and_no_wrong_bytes(tmp_path: Path) -> None:
    index, _ = indexed(tmp_path, tar_of(member("a", b"a")))
    with pytest.raises(AssertionError, match="Input/output error"):
        mounted(index, [])
