"""The store: images come in from every kind of source, once, and nothing else stays."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from agentenv.store import Store
from tests.image_sources import member, oci_layout, tar_of

BASE = tar_of(member("etc", type=tarfile.DIRTYPE), member("etc/a", b"base" * 300), member("b", b"b"))
TOP = tar_of(member("etc/.wh.a"), member("c", b"top"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


@pytest.mark.parametrize("how", ["", "gzip", "zstd"])
def test_an_image_of_a_layout_is_stored(tmp_path: Path, store: Store, how: str) -> None:
    oci_layout(tmp_path / "oci", BASE, TOP, how=how)  # type: ignore[arg-type]
    image = store.ensure(f"oci:{tmp_path}/oci:t")
    assert [layer.read_bytes() for layer in image.layers] == [BASE, TOP]
    assert store.find(image.digest) == image
