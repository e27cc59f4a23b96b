"""Unpacked layers below an overlay show what the same image's index shows."""

from __future__ import annotations

import os
import random
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import BadImageError
from agentenv.locks import hold
from agentenv.store import Store
from agentenv.store.gc import kept_images
from agentenv.store.unpacked import LEAN_IDS, names_of, sweep_trees, unpack
from tests.image_sources import member, oci_layout, tar_of
from tests.integration.mounted_index import Listing, mounted
from tests.integration.mounted_trees import overlaid

KERNEL = tuple(int(part) for part in os.uname().release.split(".")[:2])
pytestmark = pytest.mark.skipif(os.geteuid() != 0 or KERNEL < (6, 12), reason="compared as root with a mounted index")
XATTRS = ["security.capability", "system.posix_acl_access", "system.posix_acl_default"]
CAPABILITIES = "\x01\0\0\x02\0\x04" + "\0" * 14  # cap_net_bind_service=ep
TOP = member("./", type=tarfile.DIRTYPE, mode=0o755)


def directory(name: str, mode: int = 0o755, **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.DIRTYPE, mode=mode, **more)


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.LNKTYPE, linkname=target)


def both(place: Path, *layers: bytes) -> tuple[Listing, Listing]:
    """An image as an index and as unpacked layers show it."""
    store = Store.open(place / "store")
    image = store.ensure(f"oci:{oci_layout(place / 'oci', *layers, how='').directory}")
    unpack(store.layout, image.diff_ids)
    trees = [store.layout.tree(name) / "root" for name in names_of(image.diff_ids)]
    return mounted(image.index, image.layers, XATTRS), overlaid(trees, XATTRS)


def differences(index: Listing, trees: Listing) -> list[tuple[bytes, Any, Any]]:
    """Without devices, which are left out, and ids that an unpacked layer does not have."""
    expected = {}
    for path, (mode, owner, *rest) in index.items():
        if int(mode, 8) >> 12 not in (0o2, 0o6):
            expected[path] = (mode, tuple(one if one < 65_536 else 65_534 for one in owner), *rest)
    return [(path, expected.get(path), trees.get(path)) for path in sorted(expected.keys() | trees)
            if expected.get(path) != trees.get(path)]  # fmt: skip


def test_a_rich_layer(tmp_path: Path) -> None:
    pax = {"SCHILY.xattr.user.a": "1", "SCHILY.xattr.user.overlay.opaque": "y"}
    layer = tar_of(
        TOP,
        directory("d", 0o1777, uid=70_000, gid=80_000, pax_headers={"mtime": "1.000000009"}),
        member("d/empty", b""),
        member("d/more", os.urandom(100_001), mode=0o6755, uid=5, gid=6, pax_headers={"mtime": "-3.25"}),
        member("d/owned", b"x", uid=65_535, gid=65_536),
        link("d/hard", "d/more"),
        link("again", "d/more"),
        member("d/" + "n" * 255, b"long"),
        member("s", type=tarfile.SYMTYPE, linkname="d/one", uid=7),
        member("long", type=tarfile.SYMTYPE, linkname="t" * 4000),
        member("fifo", type=tarfile.FIFOTYPE, mode=0o620, uid=9),
        member("null", type=tarfile.CHRTYPE, mode=0o666, devmajor=1, devminor=3),
        member("disk", type=tarfile.BLKTYPE, devmajor=259, devminor=70_000),
        directory("locked", 0o000),
        member("locked/in", b"in", mode=0),
        member("ping", b"elf", mode=0o755, pax_headers={"SCHILY.xattr.security.capability": CAPABILITIES}),
        member("tagged", b"x", pax_headers=pax),
        directory("tagged-too", pax_headers=pax),
        member("é", "ü".encode()),
    )
    index, trees = both(tmp_path, layer)
    assert differences(index, trees) == []
    assert b"null" not in trees
    assert trees[b"tagged"][-1] == {"user.a": b"1"}
    assert trees[b"ping"][-1].keys() == {"security.capability"}


def test_whiteouts_replaced_directories_and_links_across_layers(tmp_path: Path) -> None:
    one = tar_of(
        TOP, directory("d"), member("d/a", b"a" * 700), member("d/b", b"b"), directory("d/e"), member("d/e/x", b"x"),
        directory("d/e/deep"), member("d/e/deep/y", b"y"), member("f", b"file"), directory("g"), member("g/y", b"y"),
        member("keep", b"k" * 5000, mode=0o4711), link("keep2", "keep"), link("d/keep3", "keep"),
        member("bin", type=tarfile.SYMTYPE, linkname="d"), directory("w"), member("w/old", b"old"),
        member("dev", b"a file that becomes a device"), directory("plain", uid=3), member("plain/p", b"p"),
    )  # fmt: skip
    two = tar_of(
        TOP, member("d/.wh.a"), directory("d", 0o700, uid=9), member("d/new", b"n" * 513), member("g", b"now a file"),
        link("g2", "keep"), directory("d/e", 0o711), member("d/e/.wh..wh..opq"), member("d/e/own", b"own"),
        member(".wh.w"), directory("w", 0o750), member("w/new", b"new"), member("bin/through", b"a link"),
        member("dev", type=tarfile.CHRTYPE, devmajor=5, devminor=1),
    )  # fmt: skip
    three = tar_of(
        TOP, member(".wh.f"), directory("f", 0o750), member("f/deep", b"deep"), member(".wh.keep2"), directory("d"),
        member("d/b", b"replaced" * 200, uid=1), member("missing/parent/z", b"z"), directory("g"), member("g/h", b"h"),
    )  # fmt: skip
    index, trees = both(tmp_path, one, two, three)
    assert differences(index, trees) == []
    assert index[b"keep"][2] == (5000, 3)
    assert b"d/through" in trees
    assert b"d/e/x" not in trees


def random_layer(chance: random.Random) -> bytes:
    """Files, directories, links and whiteouts of few names, so that layers often meet; sometimes one kind replaces
    another."""
    entries: dict[str, tuple[tarfile.TarInfo, bytes]] = {}
    for _ in range(chance.randrange(1, 12)):
        parents = [chance.choice("abc" if chance.random() < 0.95 else "st") for _ in range(chance.randrange(4))]
        name = chance.choice("fgh")
        path, other = "/".join([*parents, name]), chance.choice("abcfghst")
        match chance.randrange(7):
            case 0:
                entries[path] = member("/".join([*parents, f".wh.{other}"]))
            case 1:
                entries[path] = member("/".join([*parents, ".wh..wh..opq"]))
            case 2:
                target = chance.choice(["a", "/b", "../c", "nowhere"])
                entries[path] = member("/".join([*parents, chance.choice("st")]), type=tarfile.SYMTYPE, linkname=target)
            case 3:
                mode = chance.choice([0o755, 0o700, 0o1777])
                entries[path] = directory("/".join([*parents, other]), mode, uid=chance.randrange(9))
            case kind:
                mode = chance.choice([0o644, 0o4755])
                entries[path] = member(path, chance.randbytes(chance.randrange(9)), mode=mode)
                if kind == 4:
                    entries[f"{path} link"] = link("/".join([chance.choice("abc"), name]), path)
                elif kind == 5:
                    entries[f"{path} link"] = link(name, "a/f")
    return tar_of(*entries.values())


def test_random_layers(tmp_path: Path) -> None:
    compared = 0
    for seed in range(40):
        chance = random.Random(seed)
        first = tar_of(TOP, directory("a"), member("a/f", b"f"), directory("b"), directory("c"))
        layers = [first, *(random_layer(chance) for _ in range(chance.randrange(2, 6)))]
        try:
            index, trees = both(tmp_path / str(seed), *layers)
        except BadImageError:
            continue  # a file for a parent, a link to nothing, or links that lead round
        assert differences(index, trees) == [], seed
        compared += 1
    assert compared >= 10


def test_gc_removes_unpacked_layers_with_the_last_image_that_has_them(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    base, one, two = (tar_of(member(name, name.encode() * 1000)) for name in ("base", "one", "two"))
    images = [
        store.ensure(f"oci:{oci_layout(tmp_path / name, base, layer, how='').directory}")
        for name, layer in (("a", one), ("b", two))
    ]
    for image in images:
        unpack(store.layout, image.diff_ids)
    names = [names_of(image.diff_ids) for image in images]
    assert names[0][0] == names[1][0]
    assert len(list(store.layout.trees.iterdir())) == 3
    assert store.size_bytes() >= 7000
    with store.pin(images[0].digest):
        store.gc(budget_bytes=0, keep_s=0)
    assert {path.name for path in store.layout.trees.iterdir()} == {store.layout.tree(name).name for name in names[0]}
    store.gc(budget_bytes=0, keep_s=0)
    assert list(store.layout.trees.iterdir()) == []


def test_a_layer_is_unpacked_beside_itself_for_containers_of_few_ids(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What others own is nobody's in it, which is told by their ids. Both go with the image."""
    owners = {"system": (33, 42), "first": (1999, 0), "second": (2000, 1), "nobody": (65_534, 65_534), "far": (5, 9000)}
    members = (member(name, b"x", uid=uid, gid=gid) for name, (uid, gid) in owners.items())
    store = Store.open(tmp_path / "store")
    image = store.ensure(f"oci:{oci_layout(tmp_path / 'oci', tar_of(TOP, *members), how='').directory}")
    unpack(store.layout, image.diff_ids)
    assert caplog.text == ""
    (name,) = unpack(store.layout, image.diff_ids, LEAN_IDS)
    assert name not in names_of(image.diff_ids)
    root = store.layout.tree(name) / "root"
    found = {path.name: (path.stat().st_uid, path.stat().st_gid) for path in root.iterdir()}
    assert found == {**owners, "second": (65_534, 1), "far": (5, 65_534)}
    assert "files of users or groups 2000, 9000 belong to nobody (65534)" in caplog.text
    assert set(kept_images(store.layout)[0].layers) >= {name, *names_of(image.diff_ids)}
    store.gc(budget_bytes=10**9, keep_s=0)
    assert len(list(store.layout.trees.iterdir())) == 2
    store.gc(budget_bytes=0, keep_s=0)
    assert list(store.layout.trees.iterdir()) == []


def test_an_unpacked_layer_in_use_is_not_removed(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    image = store.ensure(f"oci:{oci_layout(tmp_path / 'oci', tar_of(member('a', b'a')), how='').directory}")
    (name,) = unpack(store.layout, image.diff_ids)
    lock = hold(store.layout.tree(name), shared=True)
    store.gc(budget_bytes=0, keep_s=0)
    assert (store.layout.tree(name) / "root/a").read_bytes() == b"a"
    os.close(lock)
    store.gc(budget_bytes=0, keep_s=0)
    assert not store.layout.tree(name).exists()


def test_deeper_than_any_path_may_be_long(tmp_path: Path) -> None:
    name = "/".join(["d" * 30] * 130)
    layers = [tar_of(member("l", type=tarfile.SYMTYPE, linkname=name), member(f"{name}/x", b"x")),
              tar_of(*[member("l/" + name + "/y", b"y")])]  # fmt: skip
    store = Store.open(tmp_path / "store")
    image = store.ensure(f"oci:{oci_layout(tmp_path / 'oci', *layers, how='').directory}")
    names = unpack(store.layout, image.diff_ids)
    depth = subprocess.run(["find", store.layout.tree(names[1]), "-name", "y"], capture_output=True, check=True)
    assert len(depth.stdout) > 8000
    store.gc(budget_bytes=0, keep_s=0)
    assert list(store.layout.trees.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """Of a layer that has no room; what it took is free again."""
    store = Store.open(tmp_path / "store")
    image = store.ensure(f"oci:{oci_layout(tmp_path / 'oci', tar_of(member('a', bytes(3_000_000))), how='').directory}")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=1777", "none", store.layout.trees], check=True)
    try:
        with pytest.raises(OSError, match="No space left"):
            unpack(store.layout, image.diff_ids)
        used = os.statvfs(store.layout.trees)
        assert (used.f_blocks - used.f_bfree) * used.f_frsize < 100_000
    finally:
        subprocess.run(["umount", store.layout.trees], check=True)


def test_what_an_ordinary_keeper_gives_up_is_deleted_by_the_next_unpacking(tmp_path: Path) -> None:
    """It owns the store, but not what is in unpacked layers."""
    keeper = 54_321
    tmp_path.chmod(0o755)
    store = Store.open(tmp_path / "store")
    image = store.ensure(f"oci:{oci_layout(tmp_path / 'oci', tar_of(member('d/a', b'a')), how='').directory}")
    (name,) = unpack(store.layout, image.diff_ids)
    for path in (store.layout.directory, *store.layout.directory.rglob("*")):
        if store.layout.tree(name) not in (path, *path.parents):
            os.chown(path, keeper, keeper)
    here = os.open(tmp_path, os.O_RDONLY)  # directories above are root's alone
    if (child := os.fork()) == 0:
        os.fchdir(here)
        os.setresgid(keeper, keeper, keeper)
        os.setresuid(keeper, keeper, keeper)
        os._exit(0 if image.digest in Store(Path("store")).gc(budget_bytes=0, keep_s=0).images else 1)
    assert os.waitpid(child, 0)[1] == 0
    os.close(here)
    left = list(store.layout.trees.iterdir())
    assert [path.name for path in left] == [f"{store.layout.tree(name).name}.part"]
    sweep_trees(store.layout)
    assert list(store.layout.trees.iterdir()) == []
