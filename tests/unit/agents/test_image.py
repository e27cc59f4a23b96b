"""The image with agent programs: a layer for each, in its place, the same whoever made it."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentenv.agents import image
from agentenv.agents.image import PACKAGES, make_image
from agentenv.errors import ConfigError
from agentenv.store import Store


@pytest.fixture
def bases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Sequence[str]]:
    """The packages of each base that is asked for."""
    asked: list[Sequence[str]] = []
    base = tmp_path / "base.tar"
    with tarfile.open(base, "w") as tar:
        tar.add(__file__, "etc/hostname")

    def made(cache: Path, packages: Sequence[str] = ()) -> Path:
        asked.append(packages)
        return base

    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(image, "base_tarball", made)
    return asked


def test_each_tree_is_a_layer_below_the_place_where_recipes_look(bases: list[Sequence[str]], tmp_path: Path) -> None:
    trees = [tmp_path / "codex-0.1.0", tmp_path / "qwen-code-2"]
    for tree in trees:
        (tree / "bin").mkdir(parents=True)
        (tree / "bin/run").write_text(tree.name)
        (tree / "bin/again").symlink_to("run")
    store = Store.open(tmp_path / "store")
    made = make_image(store, "agents:1", trees)
    assert bases == [PACKAGES]
    assert store.ensure("localhost/agents:1").digest == made.digest
    assert (made.workdir, made.env["PATH"].startswith("/usr/local/sbin")) == ("/workspace", True)
    with tarfile.open(made.layers[1]) as first, tarfile.open(made.layers[2]) as second:
        assert [entry.name for entry in first] == [
            f"opt/agents/codex{end}" for end in ("", "/bin", "/bin/again", "/bin/run")
        ]
        assert {(entry.uid, entry.uname, entry.mtime) for entry in second} == {(0, "", 0)}
        assert second.getnames()[0] == "opt/agents/qwen-code"
    for tree in trees:
        os.utime(tree / "bin/run", (1, 1))
    assert make_image(store, "agents:2", trees).digest == made.digest


def test_a_name_that_is_none_is_refused_before_anything_is_made(bases: list[Sequence[str]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        make_image(Store.open(tmp_path / "store"), "Not A Name", [])
    assert bases == []
