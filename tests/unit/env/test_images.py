"""Items are drawn ahead of need, in their order, and their images announced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from agentenv.env.images import ItemsAhead, RootsOf
from agentenv.errors import TaskError
from agentenv.sdk.images import StoredImages
from agentenv.sdk.roots import ImageRoot


class Items:
    """Gives numbers, and writes down what is asked of it."""

    def __init__(self, count: int) -> None:
        self.left = list(range(count))
        self.drawn = 0
        self.fetched: list[str] = []

    async def draw(self) -> int | None:
        if not self.left:
            return None
        self.drawn += 1
        return self.left.pop(0)

    def prefetch(self, references: Iterable[str]) -> None:
        self.fetched += references


def _image(item: Any) -> str:
    return f"image-{item}"


async def test_items_come_in_their_order_and_end() -> None:
    items = Items(7)
    ahead = ItemsAhead(items.draw, _image, items.prefetch, ahead=3)
    assert [await ahead.next() for _ in range(9)] == [0, 1, 2, 3, 4, 5, 6, None, None]
    assert items.fetched == [f"image-{n}" for n in range(7)]


async def test_no_call_draws_many_and_no_more_than_asked_for_are_drawn_early() -> None:
    items = Items(100)
    ahead = ItemsAhead(items.draw, _image, items.prefetch, ahead=3)
    drawn = []
    for _ in range(6):
        await ahead.next()
        drawn.append(items.drawn)
    assert drawn == [2, 4, 6, 7, 8, 9]


async def test_images_with_limits_are_announced_and_plain_items_are_not() -> None:
    items = Items(3)
    images = [ImageRoot("a", memory_mib=512), None, "b"]
    ahead = ItemsAhead(items.draw, lambda item: images[item], items.prefetch)
    while await ahead.next() is not None:
        pass
    assert items.fetched == ["a", "b"]


async def test_a_hook_that_fails_is_left_to_the_rollouts() -> None:
    items = Items(2)
    ahead = ItemsAhead(items.draw, lambda item: [][item], items.prefetch)
    assert [await ahead.next() for _ in range(3)] == [0, 1, None]
    assert items.fetched == []


async def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(TaskError, match="task_image returned 3"):
        await RootsOf(StoredImages())(3)
