"""Images of the Docker engine, by stand-ins for the SDK; with a real engine in tests/nomad/test_store_engine.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import MissingExtraError
from agentenv.store import Store
from agentenv.store.sources import engine_image
from tests.image_sources import RUNTIME, config_of, docker_archive, member, oci_layout, tar_of

LAYERS = [tar_of(member("a", b"a")), tar_of(member("b", b"b"))]


class EngineImage:
    """As ``docker.models.images.Image``, as far as it is used."""

    def __init__(self, archive: Path) -> None:
        config = config_of(LAYERS)
        self.attrs = {
            "Architecture": config["architecture"],
            "Os": "linux",
            "RootFS": {"Layers": config["rootfs"]["diff_ids"]},
            "Config": RUNTIME,
        }
        self.archive = archive
        self.exports = 0

    def save(self) -> Iterator[bytes]:
        self.exports += 1
        yield self.archive.read_bytes()


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineImage:
    made = EngineImage(docker_archive(tmp_path / "a.tar", *LAYERS))

    @contextmanager
    def found(name: str) -> Iterator[Any]:
        assert name == "app:1"
        yield made

    monkeypatch.setattr("agentenv.store.store.engine_image", found)
    return made


def test_an_image_is_exported(tmp_path: Path, image: EngineImage) -> None:
    store = Store.open(tmp_path / "store")
    stored = store.ensure("docker-daemon:app:1")
    assert [layer.read_bytes() for layer in stored.layers] == LAYERS
    assert list(store.layout.pulls.iterdir()) == []
    assert store.ensure("docker-daemon:app:1") == stored
    assert image.exports == 1


def test_an_image_whose_layers_are_stored_is_not_exported(tmp_path: Path, image: EngineImage) -> None:
    store = Store.open(tmp_path / "store")
    known = store.ensure(f"oci:{oci_layout(tmp_path / 'oci', *LAYERS).directory}")
    assert store.ensure("docker-daemon:app:1") == known
    assert store.ensure("docker-daemon:app:1", refresh=True) == known
    assert image.exports == 0


def test_a_missing_sdk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker.errors", None)
    with pytest.raises(MissingExtraError, match=r"agentenv\[farm\]"), engine_image("x"):
        pytest.fail("there is no SDK")
