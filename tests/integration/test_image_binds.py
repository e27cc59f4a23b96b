"""Binds of a container, in its slots with images: read-only, of files and directories, wherever the image has room."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv import AsyncFarm, AsyncSandbox, ImageRoot
from agentenv.errors import ConfigError, SandboxUnavailableError
from tests.small_image import small_image

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="image slots need root, or ids of its own")


def _layer(*entries: tuple[str, bytes, str]) -> bytes:
    """A tar of entries: path, type, and a file's content or a link's target."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path, kind, content in entries:
            entry = tarfile.TarInfo(path)
            entry.type, entry.mode = kind, 0o755
            if kind == tarfile.SYMTYPE:
                entry.linkname = content
                tar.addfile(entry)
            else:
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content.encode()))
    return packed.getvalue()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place = tmp_path_factory.mktemp("images")
    odd = _layer(("opt/file", tarfile.REGTYPE, "the image's"), ("opt/link", tarfile.SYMTYPE, "/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTENV_CACHE_DIR", str(place / "cache"))
        yield small_image(place / "layout", odd)


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """Below a directory that only root may enter."""
    (tmp_path / "home").mkdir(mode=0o700)
    data = tmp_path / "home/data"
    (data / "below").mkdir(parents=True)
    (data / "below/file").write_text("given")
    (data / "tool").write_text("#!/bin/sh\necho ran\n")
    (data / "tool").chmod(0o755)
    return data


async def test_files_and_directories_are_there_read_only(image: str, given: Path) -> None:
    binds = [f"{given}:/opt/new/place", f"{given}/tool:/opt/file", f"{given}/below/file:/etc/hosts"]
    async with AsyncSandbox(image=image, memory_mib=512, storage_mib=64, binds=binds) as box:
        assert await box.read_file("/opt/new/place/below/file") == "given"
        assert (await box.exec(["/opt/file"])).stdout == "ran\n", "a bind covers the image's file"
        assert await box.read_file("/etc/hosts") == "given", "nor is it written over"
        for written in ("/opt/new/place/x", "/opt/new/place/below/file", "/opt/file"):
            with pytest.raises(OSError, match=r"Read-only|Permission denied"):
                await box.write_file(written, "x")
        await box.write_file("/opt/new/beside", "x")
        checkpoint = await box.checkpoint()
        await box.restore(checkpoint)
        assert await box.read_file("/opt/new/place/below/file") == "given"
        assert await box.read_file("/opt/new/beside") == "x"
    assert (given / "below/file").read_text() == "given"


async def test_plain_slots_and_slots_with_images_of_a_farm_have_the_same(image: str, given: Path) -> None:
    async with AsyncFarm(slots=2, binds=[f"{given}:/opt/given", f"{given}/below:/opt/given/below"]) as farm:
        for root in (None, ImageRoot(image, memory_mib=512, storage_mib=64)):
            async with farm.sandbox(root) as box:
                assert await box.read_file("/opt/given/below/file") == "given"


@pytest.mark.parametrize("target", ["/opt/link/x", "/opt/link", "/opt/file/x", "/opt/file"])
async def test_a_bind_that_an_image_has_no_place_for_is_refused_by_name(image: str, given: Path, target: str) -> None:
    """Links of an image lead anywhere, and a file is not replaced by a directory."""
    with pytest.raises(ConfigError, match=rf"binds.*{target}"):
        async with AsyncSandbox(image=image, memory_mib=512, storage_mib=64, binds=[f"{given}:{target}"]):
            pass


@pytest.mark.parametrize("target", ["/run/agentenv/x", "/proc/x", "/dev/x"])
async def test_what_is_the_slots_own_cannot_be_covered(image: str, given: Path, target: str) -> None:
    with pytest.raises(SandboxUnavailableError, match="the slot's own"):
        async with AsyncSandbox(image=image, binds=[f"{given}:{target}"]):
            pass
