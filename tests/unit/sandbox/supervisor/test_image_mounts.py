"""What an image says of its programs is read beside the event loop, and once."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from agentenv.errors import SandboxUnavailableError
from agentenv.sandbox.supervisor import image_mounts
from agentenv.sandbox.supervisor.image_mounts import ImageConfig, ImageMounts
from tests.waiting import until

DIGEST = f"sha256:{'0' * 64}"


async def test_nobody_waits_for_the_reading_of_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go, read = threading.Event(), threading.Event(), []

    def config_of(said: object, layers: object) -> ImageConfig:
        read.append((said, layers))
        reading.set()
        assert go.wait(60)
        return ImageConfig(user="one")

    monkeypatch.setattr(image_mounts, "config_of", config_of)
    monkeypatch.setattr(ImageMounts, "_mount", lambda *_: image_mounts._Mounted(tmp_path, {}, -1))
    images = ImageMounts(tmp_path, tmp_path)
    waiting = [asyncio.create_task(images.ready(DIGEST)) for _ in range(3)]
    await until(reading.is_set)
    with pytest.raises(SandboxUnavailableError):
        images.take(DIGEST)
    go.set()
    await asyncio.gather(*waiting)
    assert images.take(DIGEST)[1].user == "one"
    assert read == [({}, [tmp_path])]


@pytest.mark.parametrize("link", ["usr", "/usr", "../usr", "../../../../../usr/bin", "/proc/1/root/usr"])
def test_links_of_an_image_end_in_it(tmp_path: Path, link: str) -> None:
    (tmp_path / "usr").symlink_to(link)
    found = image_mounts.config_of({"env": {}, "user": "", "workdir": ""}, [tmp_path])
    assert (found.has_bash, found.has_tmux, found.bash_build) == (False, False, "")


def test_programs_behind_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "opt/bin").mkdir(parents=True)
    (tmp_path / "opt/bin/tmux").write_text("")
    (tmp_path / "usr").symlink_to("/opt")
    assert image_mounts.config_of({"env": {}, "user": "", "workdir": ""}, [tmp_path]).has_tmux
