from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from agentenv.errors import ConfigError
from agentenv.sdk.images import StoredImages, stored
from agentenv.sdk.roots import ImageRoot
from tests.image_sources import member, oci_layout, tar_of

LAYER = tar_of(member("a", b"a"))


async def test_a_reference_means_one_image_for_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(tmp_path / "cache"))
    oci_layout(tmp_path / "oci", LAYER)
    image, images = f"oci:{tmp_path}/oci:t", StoredImages()
    roots = await asyncio.gather(*(images.root(ImageRoot(image, memory_mib=1024 + n)) for n in range(3)))
    assert {root.image for root in roots} == {roots[0].image}
    assert [root.memory_bytes >> 20 for root in roots] == [1024, 1025, 1026]
    shutil.rmtree(tmp_path / "oci")
    assert (await images.root(ImageRoot(image))).image == roots[0].image


async def test_what_failed_is_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(tmp_path / "cache"))
    image, images = f"oci:{tmp_path}/oci:t", StoredImages()
    with pytest.raises(ConfigError):
        await images.root(ImageRoot(image))
    oci_layout(tmp_path / "oci", LAYER)
    assert (await images.root(ImageRoot(image))).image.startswith("sha256:")


async def test_a_digest_means_the_image_that_has_it() -> None:
    digest = "sha256:" + "a" * 64
    assert (await stored(ImageRoot(digest))).image == digest
