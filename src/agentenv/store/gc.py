"""Which images a store removes, and removing them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentenv.locks import hold
from agentenv.store import names, unpacked
from agentenv.store.layout import Layout, digest_of, part_of, sweep


@dataclass(frozen=True)
class KeptImage:
    """An image as the decision sees it."""

    digest: str
    layers: tuple[str, ...]
    """Diff ids, and the names of those that are unpacked."""
    index_bytes: int
    last_use_s: float
    pinned: bool
    committed: bool = False
    """Whether it has a name that ``commit`` gave it."""


@dataclass(frozen=True)
class Deletions:
    """What to remove: images, and layers that no image has any more."""

    images: tuple[str, ...]
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Collected:
    """What went."""

    images: tuple[str, ...]
    layers: tuple[str, ...]
    freed_bytes: int
    kept_bytes: int
    """What is left in the store."""
    committed: tuple[str, ...] = ()
    """Names that ``commit`` gave to images that went."""


def choose(
    images: Iterable[KeptImage],
    layer_bytes: Mapping[str, int],
    *,
    budget_bytes: int,
    keep_s: float,
    keep_committed_s: float = 0.0,
    now_s: float,
) -> Deletions:
    """What to delete so that the rest fits into ``budget_bytes``: the images that have not been used for longest.

    Neither a pinned image is deleted nor one that was used in the last ``keep_s`` seconds (one with a committed name:
    also in the last ``keep_committed_s``), so the rest may still be larger. A layer (``layer_bytes`` has them all) goes
    with the last image that has it, and at once if none has.
    """
    images = sorted(images, key=lambda image: (image.last_use_s, image.digest))
    users = Counter(layer for image in images for layer in set(image.layers))
    orphans = [layer for layer in layer_bytes if not users[layer]]
    total = sum(image.index_bytes for image in images) + sum(layer_bytes.get(layer, 0) for layer in users)
    gone: list[str] = []
    for image in images:
        if total <= budget_bytes:
            break
        least_s = max(keep_s, keep_committed_s) if image.committed else keep_s
        if image.pinned or now_s - image.last_use_s < least_s:
            continue
        gone.append(image.digest)
        total -= image.index_bytes
        for layer in set(image.layers):
            users[layer] -= 1
            if not users[layer]:
                orphans.append(layer)
                total -= layer_bytes.get(layer, 0)
    return Deletions(tuple(gone), tuple(sorted(orphans)))


def collect(
    layout: Layout, *, budget_bytes: int, keep_s: float, keep_committed_s: float = 0.0, dry_run: bool = False
) -> Collected:
    """Delete what :func:`choose` returns, and what dead processes left. What is pinned by then stays, as do layers that
    a process is making an image of. Raises OSError."""
    if not dry_run:
        sweep(layout, downloads=True)
        unpacked.sweep_trees(layout)
    layer_bytes, named = _layer_bytes(layout), list(names.all_of(layout))
    images = kept_images(layout)
    chosen = choose(
        images,
        layer_bytes,
        budget_bytes=budget_bytes,
        keep_s=keep_s,
        keep_committed_s=keep_committed_s,
        now_s=time.time(),
    )
    index_bytes = {image.digest: image.index_bytes for image in images}
    if dry_run:
        removed, layers = chosen.images, chosen.layers
    else:
        removed = tuple(digest for digest in chosen.images if _remove_image(layout, digest))
        layers = tuple(_remove_layers(layout, chosen.layers))
        _forget(layout)
    lost = tuple(name.reference for name in named if name.committed and name.digest in removed)
    freed = sum(index_bytes[digest] for digest in removed) + sum(layer_bytes[layer] for layer in layers)
    whole = sum(index_bytes.values()) + sum(layer_bytes.values())
    return Collected(removed, layers, freed, whole - freed, lost)


def kept_images(layout: Layout) -> list[KeptImage]:
    """The images of a store. One that is just being removed may be missing."""
    found = []
    trees = unpacked.bytes_of(layout)
    committed = {name.digest for name in names.all_of(layout) if name.committed}
    for path in sorted(layout.images.glob("*.json")):
        digest = digest_of(path)
        with contextlib.suppress(FileNotFoundError):
            diff_ids = _layers_of(path)
            found.append(
                KeptImage(
                    digest=digest,
                    layers=(*diff_ids, *(name for name in unpacked.all_names_of(diff_ids) if name in trees)),
                    index_bytes=layout.index(digest).stat().st_size,
                    last_use_s=path.stat().st_mtime,
                    pinned=is_pinned(path),
                    committed=digest in committed,
                )
            )
    return found


def size_bytes(layout: Layout) -> int:
    """What layers and indexes take."""
    return sum(_layer_bytes(layout).values()) + sum(image.index_bytes for image in kept_images(layout))


def _layer_bytes(layout: Layout) -> dict[str, int]:
    found = {}
    for tar in layout.layers.glob("*.tar"):
        with contextlib.suppress(FileNotFoundError):
            found[digest_of(tar)] = tar.stat().st_size
    return found | unpacked.bytes_of(layout)


def is_pinned(manifest: Path) -> bool:
    """Whether any process uses the image of this manifest. Raises FileNotFoundError."""
    try:
        os.close(hold(manifest, wait=False))
    except BlockingIOError:
        return True
    return False


def _layers_of(manifest: Path) -> tuple[str, ...]:
    return tuple(layer["diff_id"] for layer in json.loads(manifest.read_bytes())["layers"])


def _remove_image(layout: Layout, digest: str) -> bool:
    """Remove an image that is neither used nor being written. Its manifest goes first: without it no process finds the
    index."""
    manifest = layout.manifest(digest)
    part = part_of(manifest)
    with contextlib.ExitStack() as held:
        try:
            held.callback(os.close, hold(manifest, wait=False))
            held.callback(os.close, hold(part, flags=os.O_RDWR | os.O_CREAT, wait=False))
        except (BlockingIOError, FileNotFoundError):
            return False
        for path in (manifest, layout.index(digest), part):
            path.unlink(missing_ok=True)
    return True


def _remove_layers(layout: Layout, diff_ids: Sequence[str]) -> list[str]:
    """Remove layers that no image has, as tars or unpacked. They are locked first and looked for in all manifests
    afterwards: who makes an image holds its layers until it has a manifest."""
    with contextlib.ExitStack() as held:
        locked = []
        for diff_id in diff_ids:
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                held.callback(os.close, hold(_place(layout, diff_id), wait=False))
                locked.append(diff_id)
        used: set[str] = set()
        for manifest in layout.images.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                diff_ids_of_it = _layers_of(manifest)
                used.update(diff_ids_of_it, unpacked.all_names_of(diff_ids_of_it))
        removed = [diff_id for diff_id in locked if diff_id not in used]
        for diff_id in removed:
            if _place(layout, diff_id) == layout.layer(diff_id):
                layout.layer(diff_id).unlink()
            else:
                unpacked.drop(layout, diff_id)
    return removed


def _place(layout: Layout, layer: str) -> Path:
    """Of a layer's tar, or of an unpacked layer."""
    return layout.tree(layer) if layout.tree(layer).exists() else layout.layer(layer)


def _forget(layout: Layout) -> None:
    """Remove records of images and layers that no longer exist."""
    for name in names.all_of(layout):
        if not layout.manifest(name.digest).exists():
            layout.name(name.reference).unlink(missing_ok=True)
    for blob in layout.blobs.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            if not layout.layer(json.loads(blob.read_bytes())["diff_id"]).exists():
                blob.unlink(missing_ok=True)
