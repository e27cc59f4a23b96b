"""Images that are built, named, and the base of others, without a registry. As root: builds need image slots."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentenv.store import Store
from tests.cli import Command
from tests.small_image import small_image

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="image slots need root, or ids of its own")


def test_a_built_image_is_the_base_of_the_next_by_its_name_or_digest(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    small = small_image(tmp_path / "layout")
    command = Command({"AGENTENV_CACHE_DIR": str(cache), "AGENTENV_STATE_DIR": str(tmp_path / "state")})
    assert command.told("images", "tag", small, "small:1")["name"] == "committed:small:1"

    def built(text: str, *arguments: str) -> str:
        (tmp_path / "Dockerfile").write_text(text)
        return str(command.told("images", "build", str(tmp_path), *arguments)["digest"])

    base = built("FROM localhost/small:1\nRUN echo one > /one\n", "-t", "base:1", "-t", "other")
    for name in ("localhost/base:1", "committed:other", base):
        above = built(f"FROM {name} AS a\nRUN cat /one > /two\nFROM scratch\nCOPY --from={name} /one /one\n")
        image = Store(cache / "store").find(above)
        assert image is not None
        assert len(image.layers) == 2
    code, said, _ = command.run("exec", "--image", "localhost/base:1", "--", "cat", "/one")
    assert (code, said) == (0, "one\n")
    changed = built("FROM localhost/small:1\nRUN echo two > /one\n", "--tag", "localhost/base:1")
    assert command.told("images", "pull", "localhost/base:1")["images"][0]["digest"] == changed
    assert command.told("images", "pull", "localhost/other")["images"][0]["digest"] == base
