"""Odd trees go into a slot and come out of it as they were: by transfers, and as tars."""

from __future__ import annotations

import os
import random
import stat
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from agentenv import AsyncSandbox
from tests.odd_trees import described, make
from tests.small_image import small_image
from tests.sweeps import Sweep

REFUSED: Final = ("pipes", "sockets", "devices")
NOT_KEPT: Final = ("owners", "set-id", "attributes", "links", "holes")
FOREIGN: Final = ("outward", "unreadable")
"""What the slot's user may not read, or a download does not follow."""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place = tmp_path_factory.mktemp("images")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTENV_CACHE_DIR", str(place / "cache"))
        yield small_image(place / "layout")


ROOT_ONLY: Final = pytest.mark.skipif(os.geteuid() != 0, reason="image slots need root, or ids of their own")


@pytest.fixture(params=["plain", pytest.param("image", marks=ROOT_ONLY)])
async def box(image: str, request: pytest.FixtureRequest) -> AsyncIterator[AsyncSandbox]:
    async with AsyncSandbox(image=image if request.param == "image" else None) as opened:
        yield opened


def seen(tree: Path) -> dict[str, dict[str, Any]]:
    """Without owners, and without the times of directories, which transfers and archives do not keep."""
    found = described(tree, ("uid", "gid", "first", "attributes"))
    for entry in found.values():
        if entry["kind"] == "d":
            del entry["modified_ns"]
        elif entry["kind"] == "l":
            entry["modified_ns"] = 0
    return found


def grown(place: Path, seed: int) -> dict[str, dict[str, Any]]:
    place.mkdir()
    make(place, random.Random(seed), (*REFUSED, *NOT_KEPT, *FOREIGN))
    return seen(place)


async def test_a_tree_comes_back_by_transfers(box: AsyncSandbox, tmp_path: Path, sweep: Sweep) -> None:
    for seed in sweep.seeds():
        tree = grown(tmp_path / f"tree-{seed}", seed)
        sent = await box.upload(tmp_path / f"tree-{seed}", f"tree-{seed}")
        for attempt in ("once", "again"):  # over what is there, read-only directories among it
            got = await box.download(f"tree-{seed}", tmp_path / f"copy-{seed}")
            assert seen(tmp_path / f"copy-{seed}") == tree, (seed, attempt)
            assert sent == got


async def test_a_tree_comes_back_as_an_archive(box: AsyncSandbox, tmp_path: Path, sweep: Sweep) -> None:
    for seed in sweep.seeds():
        tree = grown(tmp_path / f"tree-{seed}", seed)
        await box.upload(tmp_path / f"tree-{seed}", f"tree-{seed}")
        archive = await box.archive(f"tree-{seed}")
        assert archive.data is not None
        (by_gnu := tmp_path / f"gnu-{seed}").mkdir()
        subprocess.run(["tar", "-xpf", "-", "-C", by_gnu], input=archive.data, check=True, capture_output=True)
        assert seen(by_gnu) == tree, seed
        await box.extract(archive.data, f"copy-{seed}")
        await box.download(f"copy-{seed}", tmp_path / f"copy-{seed}")
        assert seen(tmp_path / f"copy-{seed}") == tree, seed


async def test_a_download_has_the_modes_of_its_directories(box: AsyncSandbox, tmp_path: Path) -> None:
    await box.run("mkdir -p t/closed/in t/open && chmod 555 t/closed && chmod 500 t/closed/in && chmod 777 t/open")
    for _ in range(2):
        await box.download("t", tmp_path / "t")
        modes = {name: stat.S_IMODE((tmp_path / "t" / name).stat().st_mode) for name in ("closed", "closed/in", "open")}
        assert modes == {"closed": 0o555, "closed/in": 0o500, "open": 0o777}
