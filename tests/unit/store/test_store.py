"""The store: images come in from every kind of source, once, and stay while they are used."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentenv.errors import BadImageError, ConfigError, ImageUnavailableError
from agentenv.image.progress import BuildStep
from agentenv.store import Store, StoreLimits, TreeLimits, registry
from tests.image_sources import Compression, OciLayout, docker_archive, member, oci_layout, sha256, tar_of

BASE = tar_of(member("etc", type=tarfile.DIRTYPE), member("etc/a", b"base" * 300), member("b", b"b"))
TOP = tar_of(member("etc/.wh.a"), member("c", b"top"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def parts(store: Store) -> list[Path]:
    """What is left of unfinished work."""
    return [path for path in store.layout.directory.rglob("*") if ".part" in str(path)]


@pytest.mark.parametrize("how", ["", "gzip", "zstd"])
def test_an_image_of_a_layout(tmp_path: Path, store: Store, how: Compression) -> None:
    oci_layout(tmp_path / "oci", BASE, TOP, how=how)
    image = store.ensure(f"oci:{tmp_path}/oci:t")
    assert [layer.read_bytes() for layer in image.layers] == [BASE, TOP]
    assert image.index.read_bytes()[1024:1028] == b"\xe2\xe1\xf5\xe0"
    assert (image.env["A"], image.user, image.workdir, image.cmd) == ("b=c", "1000", "/w", ("sh",))
    assert image.size_bytes == len(BASE) + len(TOP)
    assert store.find(image.digest) == image
    assert store.images() == [image]
    assert store.references() == {image.digest: [f"oci:{tmp_path}/oci:t"]}
    assert parts(store) == []


def test_however_it_comes_it_is_the_same_image(tmp_path: Path, store: Store) -> None:
    for how in ("", "gzip", "zstd"):
        oci_layout(tmp_path / f"oci-{how}", BASE, TOP, how=how, history=[how])
    docker_archive(tmp_path / "a.tar", BASE, TOP)
    references = [*(f"oci:{tmp_path}/oci-{how}" for how in ("", "gzip", "zstd")), f"docker-archive:{tmp_path}/a.tar"]
    assert len({store.ensure(reference).digest for reference in references}) == 1
    assert len(list(store.layout.layers.iterdir())) == 2


def test_a_layer_is_there_once_however_many_images_have_it(tmp_path: Path, store: Store) -> None:
    tops = [tar_of(member(f"f{n}", b"x")) for n in range(3)]
    found = [store.ensure(f"oci:{oci_layout(tmp_path / str(n), BASE, top).directory}") for n, top in enumerate(tops)]
    assert len({image.layers[0] for image in found}) == 1
    assert len(list(store.layout.layers.iterdir())) == 4
    assert store.size_bytes() == sum(len(layer) for layer in (BASE, *tops)) + sum(
        image.index.stat().st_size for image in found
    )


@pytest.mark.parametrize("there", [[], [BASE], [TOP], [BASE, TOP], [BASE, tar_of(member("b", b"other"))]])
def test_an_image_is_the_same_whichever_of_its_layers_are_there(
    tmp_path: Path, store: Store, there: list[bytes]
) -> None:
    above = tar_of(member("b", b"other"))
    if there:
        oci_layout(tmp_path / "before", *there)
        store.ensure(f"oci:{tmp_path}/before:t")
    oci_layout(tmp_path / "oci", BASE, TOP, above)
    found = store.ensure(f"oci:{tmp_path}/oci:t")
    fresh = Store.open(tmp_path / "fresh").ensure(f"oci:{tmp_path}/oci:t")
    assert found.digest == fresh.digest
    assert found.index.read_bytes() == fresh.index.read_bytes()
    assert gc.isenabled()


def test_an_image_may_have_no_layer_or_one_twice(tmp_path: Path, store: Store) -> None:
    assert store.ensure(f"oci:{oci_layout(tmp_path / 'none').directory}").layers == ()
    twice = store.ensure(f"oci:{oci_layout(tmp_path / 'twice', BASE, BASE).directory}")
    assert twice.layers[0] == twice.layers[1]
    assert twice.size_bytes == len(BASE)


def test_the_steps_are_told(tmp_path: Path, store: Store) -> None:
    told: list[BuildStep] = []
    store.ensure(f"oci:{oci_layout(tmp_path / 'oci', BASE, TOP).directory}", progress=told.append)
    assert {step.name for step in told} == {"layers", "index"}
    assert all(0 <= step.done <= step.total for step in told)


def broken_layer(directory: Path) -> None:
    layout = oci_layout(directory, BASE, TOP, how="")
    layout.path(sha256(TOP)).write_bytes(TOP[:-1] + b"x")


def wrong_diff_id(directory: Path) -> None:
    oci_layout(directory, BASE, rootfs={"diff_ids": [sha256(TOP)]})


def too_few_layers(directory: Path) -> None:
    oci_layout(directory, BASE, rootfs={"diff_ids": []})


def hostile_tar(directory: Path) -> None:
    oci_layout(directory, tar_of(member("../../etc/passwd", b"x")))


def no_tar(directory: Path) -> None:
    oci_layout(directory, b"x" * 2000)


def other_machine(directory: Path) -> None:
    oci_layout(directory, BASE, architecture="riscv64")


def too_large(directory: Path) -> None:
    oci_layout(directory, BASE, bytes(300_000))


def too_large_by_a_layer_that_comes_again(directory: Path) -> None:
    oci_layout(directory, *[bytes(110_000)] * 2)


def too_many_layers(directory: Path) -> None:
    oci_layout(directory, *[b""] * 513)


def too_many(directory: Path) -> None:
    oci_layout(directory, tar_of(*(member(str(n)) for n in range(101))))


@pytest.mark.parametrize(
    "make",
    [
        *(broken_layer, wrong_diff_id, too_few_layers, hostile_tar, no_tar, other_machine, too_large),
        *(too_large_by_a_layer_that_comes_again, too_many_layers, too_many),
    ],
    ids=lambda make: make.__name__,
)
def test_of_a_bad_image_nothing_is_there_afterwards(tmp_path: Path, make: Callable[[Path], None]) -> None:
    limits = StoreLimits(image_bytes=200_000, tree=TreeLimits(entries=100))
    store = Store.open(tmp_path / "store", limits=limits)
    make(tmp_path / "oci")
    with pytest.raises(BadImageError):
        store.ensure(f"oci:{tmp_path}/oci")
    assert (store.images(), store.references(), parts(store)) == ([], {}, [])
    store.gc(budget_bytes=0)
    assert list(store.layout.layers.iterdir()) == []


def test_what_cannot_be_read_is_told(tmp_path: Path, store: Store) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        store.ensure(f"oci:{tmp_path}/nothing")
    with pytest.raises(ConfigError, match="built first"):
        store.ensure(f"dockerfile:{tmp_path}")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="store: cannot be created"):
        Store.open(tmp_path / "file")


def test_a_full_disk_is_told_and_nothing_stays(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    oci_layout(tmp_path / "oci", BASE)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ImageUnavailableError, match="No space left"):
            store.ensure(f"oci:{tmp_path}/oci")
    assert list(store.layout.layers.iterdir()) == []
    assert store.ensure(f"oci:{tmp_path}/oci").layers[0].read_bytes() == BASE


def test_find_knows_only_digests_of_images(store: Store) -> None:
    assert store.find("sha256:" + "0" * 64) is None
    assert store.find("../../etc/passwd") is None


def test_a_pin_needs_an_image(store: Store) -> None:
    with pytest.raises(ImageUnavailableError, match="agentenv images pull"), store.pin("sha256:" + "0" * 64):
        pytest.fail("it was pinned")


def test_a_pinned_image_stays_and_counts_as_used(tmp_path: Path, store: Store) -> None:
    image = store.ensure(f"oci:{oci_layout(tmp_path / 'oci', BASE).directory}")
    manifest = store.layout.manifest(image.digest)
    os.utime(manifest, (0, 0))
    with store.pin(image.digest) as pinned, store.pin(image.digest):
        assert pinned == image
        assert manifest.stat().st_mtime > time.time() - 600
        assert [kept.pinned for kept in store.usage()] == [True]
        assert store.gc(budget_bytes=0, keep_s=0).images == ()
        assert store.images() == [image]
    assert [kept.pinned for kept in store.usage()] == [False]
    done = store.gc(budget_bytes=0, keep_s=0)
    assert (done.images, done.layers, done.kept_bytes) == ((image.digest,), image.diff_ids, 0)
    assert (store.images(), store.references()) == ([], {})
    kept = store.layout.ranges
    left = [path for path in store.layout.directory.rglob("*") if path.is_file() and path.parent != kept]
    assert left == [store.layout.probe]


def test_a_dry_run_removes_nothing(tmp_path: Path, store: Store) -> None:
    image = store.ensure(f"oci:{oci_layout(tmp_path / 'oci', BASE).directory}")
    assert store.gc(budget_bytes=0, keep_s=0, dry_run=True).images == (image.digest,)
    assert store.images() == [image]


def test_an_index_whose_manifest_is_missing_is_made_again(tmp_path: Path, store: Store) -> None:
    image = store.ensure(f"oci:{oci_layout(tmp_path / 'oci', BASE).directory}")
    before = image.index.read_bytes()
    store.layout.manifest(image.digest).unlink()
    assert store.find(image.digest) is None
    assert store.ensure(f"oci:{tmp_path}/oci") == image
    assert image.index.read_bytes() == before


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_pinned_images_stay_and_the_budget_is_kept(tmp_path: Path, store: Store, seed: int) -> None:
    """Random pulls, pins and collections over images that share layers."""
    chance = random.Random(seed)
    layers = [tar_of(member(f"l{n}", bytes(chance.randrange(5000)))) for n in range(5)]
    layout = OciLayout(tmp_path / "oci")
    for tag in range(6):
        layout.name(layout.manifest(chance.sample(layers, chance.randrange(1, 5)), ""), str(tag))
    pins: list[tuple[str, contextlib.ExitStack]] = []
    for _ in range(60):
        match chance.choice(["pull", "pull", "pin", "unpin", "gc"]):
            case "pull":
                store.ensure(f"oci:{tmp_path}/oci:{chance.randrange(6)}")
            case "pin" if images := store.images():
                digest = chance.choice(images).digest
                pins.append((digest, contextlib.ExitStack()))
                pins[-1][1].enter_context(store.pin(digest))
            case "unpin" if pins:
                pins.pop(chance.randrange(len(pins)))[1].close()
            case "gc":
                budget = chance.randrange(60_000)
                done = store.gc(budget_bytes=budget, keep_s=0)
                pinned = {digest for digest, _ in pins}
                assert done.kept_bytes == store.size_bytes()
                assert done.kept_bytes <= budget or {image.digest for image in store.images()} == pinned
        there = {image.digest: image for image in store.images()}
        assert {digest for digest, _ in pins} <= there.keys()
        assert all(path.exists() for image in there.values() for path in (image.index, *image.layers))
    for _, pin in pins:
        pin.close()
    assert parts(store) == []


def test_a_registrys_name_can_be_given_here(tmp_path: Path, store: Store) -> None:
    oci_layout(tmp_path / "oci", BASE)
    image = store.ensure(f"oci:{tmp_path}/oci:t")
    store.name("debian:trixie", image)
    assert store.ensure("docker.io/library/debian:trixie") == image
    with pytest.raises(ConfigError, match="only registry references can"):
        store.name("oci:a", image)


def test_what_was_committed_has_a_name_and_is_kept_for_its_sake(tmp_path: Path, store: Store) -> None:
    image = store.ensure(f"oci:{oci_layout(tmp_path / 'oci', BASE).directory}")
    other = store.ensure(f"oci:{oci_layout(tmp_path / 'other', TOP).directory}")
    with pytest.raises(ImageUnavailableError, match=r"is named localhost/prepared:1 \(any more\)"):
        store.ensure("committed:prepared:1")
    store.name("committed:prepared:1", image)
    assert store.ensure("committed:prepared:1", refresh=True) == image
    assert store.gc(budget_bytes=0, keep_s=0).images == (other.digest,)
    gone = store.gc(budget_bytes=0, keep_s=0, keep_committed_s=0)
    assert (gone.images, gone.committed) == ((image.digest,), ("committed:prepared:1",))
    assert store.references() == {}


def test_an_image_named_here_is_named_to_who_asks_a_registry_for_it(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> Path:
        raise ImageUnavailableError("no such host", next_step="check the name")

    monkeypatch.setattr(registry, "download", unreachable)
    store.name("localhost/base:1", store.ensure(f"oci:{oci_layout(tmp_path / 'oci', BASE).directory}"))
    for asked, next_step in (("base:1", "write localhost/base:1,"), ("base:2", "check the name")):
        with pytest.raises(ImageUnavailableError) as caught:
            store.ensure(asked)
        assert caught.value.next_step.startswith(next_step)
