"""The hook ``task_image``: what it may return, and that every member of a group gets it, or its failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentenv.env import roots
from agentenv.env.roots import root_of_task
from agentenv.errors import ImageUnavailableError, TaskError
from agentenv.sdk.roots import ImageRoot
from agentenv.wire.roots import RootSpec
from tests.unit.env.env_stubs import AnswerEnv, environment

DIGEST = "sha256:" + "a" * 64


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[ImageRoot]:
    asked: list[ImageRoot] = []

    async def stored(root: ImageRoot) -> RootSpec:
        asked.append(root)
        if root.image == "gone":
            raise ImageUnavailableError("it is gone")
        return root.spec(DIGEST)

    monkeypatch.setattr(roots, "stored", stored)
    return asked


async def test_a_name_an_image_with_limits_or_none(fetched: list[ImageRoot]) -> None:
    async def later(item: Any) -> str:
        return f"image-{item}"

    assert await root_of_task(lambda _: None, 1) is None
    assert await root_of_task(later, 1) == RootSpec(DIGEST)
    limited = await root_of_task(lambda _: ImageRoot("other", memory_mib=2), 1)
    assert limited is not None
    assert limited.memory_bytes == 2 * 2**20
    assert [root.image for root in fetched] == ["image-1", "other"]


async def test_a_hook_that_fails_or_returns_something_else_is_the_tasks_fault() -> None:
    with pytest.raises(TaskError, match="task_image returned int"):
        await root_of_task(lambda _: 7, 1)  # type: ignore[arg-type, return-value]
    with pytest.raises(TaskError, match="task_image raised ZeroDivisionError"):
        await root_of_task(lambda _: str(1 // 0), 1)


async def test_the_members_of_a_group_get_the_image_fetched_once_or_its_failure(
    fetched: list[ImageRoot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ImageEnv(AnswerEnv):
        def task_image(self, item: Any) -> str | None:
            return item.get("image")  # type: ignore[no-any-return]

    asked: list[RootSpec | None] = []

    async with environment(ImageEnv, tmp_path) as env:
        pool = env._group_farms.executor._pool
        lease = pool.lease

        async def plain(trajectory: str, *, root: RootSpec | None = None, **more: Any) -> Any:
            asked.append(root)  # the fake farm has plain slots only
            return await lease(trajectory, **more)

        monkeypatch.setattr(pool, "lease", plain)
        group, _ = await env.collect_trajectories({"id": "with", "image": "debian"})
        assert group is not None
        assert [root.image for root in fetched] == ["debian"]
        assert asked == [RootSpec(DIGEST)] * 4
        group, again = await env.collect_trajectories({"id": "gone", "image": "gone"})
        assert (group, again) == (None, [{"id": "gone", "image": "gone"}])
        assert asked[4:] == [], "no slot was leased for it"
