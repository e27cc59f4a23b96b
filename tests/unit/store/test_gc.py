"""Which images go: never one in use, and no more than the budget asks for."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agentenv.store.gc import KeptImage, choose

NOW_S = 1000.0
LAYER_BYTES = {layer: 10 * (number + 1) for number, layer in enumerate("abcdef")}


def image(digest: str, layers: str, *, used_s: float = 0.0, pinned: bool = False, committed: bool = False) -> KeptImage:
    return KeptImage(digest, tuple(layers), 1, used_s, pinned, committed)


def chosen(*images: KeptImage, budget_bytes: int = 0, keep_s: float = 0.0) -> tuple[tuple[str, ...], tuple[str, ...]]:
    used = {layer: LAYER_BYTES[layer] for image in images for layer in image.layers}
    made = choose(images, used, budget_bytes=budget_bytes, keep_s=keep_s, now_s=NOW_S)
    return made.images, made.layers


def test_within_the_budget_nothing_goes() -> None:
    assert chosen(image("x", "ab"), budget_bytes=31) == ((), ())


def test_the_least_recently_used_goes_first_and_no_more_than_needed() -> None:
    found = chosen(image("new", "a", used_s=2), image("old", "b", used_s=1), budget_bytes=15)
    assert found == (("old",), ("b",))


def test_a_shared_layer_goes_with_the_last_image_that_has_it() -> None:
    old, new = image("old", "ab", used_s=1), image("new", "ac", used_s=2)
    assert chosen(old, new, budget_bytes=45) == (("old",), ("b",))
    assert chosen(old, new) == (("old", "new"), ("a", "b", "c"))


def test_pinned_and_young_images_stay_whatever_the_budget() -> None:
    assert chosen(image("pinned", "a", pinned=True), image("young", "b", used_s=990), keep_s=60) == ((), ())


def test_what_commit_has_named_stays_for_longer() -> None:
    named, fetched = image("named", "a", used_s=500, committed=True), image("fetched", "b", used_s=500)
    for keep_committed_s, gone in ((600, ("fetched",)), (400, ("fetched", "named"))):
        made = choose([named, fetched], {}, budget_bytes=0, keep_s=60, keep_committed_s=keep_committed_s, now_s=NOW_S)
        assert made.images == gone


def test_a_layer_of_no_image_goes_at_once() -> None:
    found = choose([], {"a": 5}, budget_bytes=100, keep_s=60, now_s=NOW_S)
    assert (found.images, found.layers) == ((), ("a",))


def test_a_layer_that_an_image_has_twice_counts_once() -> None:
    assert chosen(image("x", "aa"), budget_bytes=11) == ((), ())
    assert chosen(image("x", "aa"), budget_bytes=10) == (("x",), ("a",))


IMAGES = st.lists(st.tuples(st.text("abcdef", max_size=4), st.integers(0, 1000), st.booleans()), max_size=8).map(
    lambda rows: [image(str(n), layers, used_s=used, pinned=pin) for n, (layers, used, pin) in enumerate(rows)]
)


@given(IMAGES, st.integers(0, 300), st.integers(0, 1000), st.sets(st.sampled_from("abcdef")))
def test_whatever_there_is(images: list[KeptImage], budget_bytes: int, keep_s: int, orphans: Any) -> None:
    layer_bytes = {layer: LAYER_BYTES[layer] for image in images for layer in image.layers}
    layer_bytes |= {layer: LAYER_BYTES[layer] for layer in orphans}
    made = choose(images, layer_bytes, budget_bytes=budget_bytes, keep_s=keep_s, now_s=NOW_S)
    gone = [image for image in images if image.digest in made.images]
    left = [image for image in images if image.digest not in made.images]
    assert not any(image.pinned or NOW_S - image.last_use_s < keep_s for image in gone)
    needed = {layer for image in left for layer in image.layers}
    assert set(made.layers) == layer_bytes.keys() - needed
    size = sum(layer_bytes[layer] for layer in needed) + len(left)
    removable = [image for image in left if not image.pinned and NOW_S - image.last_use_s >= keep_s]
    assert size <= budget_bytes or not removable
    if gone:  # without the last of them the budget would not have been kept
        last = max(gone, key=lambda image: (image.last_use_s, image.digest))
        more = needed | set(last.layers)
        assert sum(layer_bytes[layer] for layer in more) + len(left) + 1 > budget_bytes
