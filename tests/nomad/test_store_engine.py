"""Images of a real Docker engine in the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.errors import ConfigError
from agentenv.store import Store
from tests.image_sources import docker_archive, member, tar_of
from tests.nomad.cluster import Cluster

NAME = "agentenv-test-of-the-store:1"
LAYERS = [tar_of(member("a", b"a" * 1000)), tar_of(member("b", b"b"))]


@pytest.fixture
def archive(tmp_path: Path, cluster: Cluster) -> Iterator[Path]:
    """The archive of an image that the engine has."""
    path = docker_archive(tmp_path / "image.tar", *LAYERS, name=NAME)
    cluster.docker.images.load(path.read_bytes())
    yield path
    cluster.docker.images.remove(NAME)


def test_an_image_of_the_engine_is_that_of_its_archive(tmp_path: Path, archive: Path) -> None:
    store = Store.open(tmp_path / "store")
    image = store.ensure(f"docker-daemon:{NAME}")
    assert [layer.read_bytes() for layer in image.layers] == LAYERS
    assert store.ensure(f"docker-archive:{archive}") == image
    assert store.ensure(f"docker-daemon:{NAME}", refresh=True) == image


def test_an_image_that_the_engine_does_not_have(tmp_path: Path, cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="docker pull agentenv-test-of-nothing"):
        Store.open(tmp_path).ensure("docker-daemon:agentenv-test-of-nothing")
