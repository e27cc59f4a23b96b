"""From an image as its source has it to an image in the store: every layer verified, one index, then the manifest."""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Final, Self

from agentenv.errors import BadImageError, ImageUnavailableError
from agentenv.image.progress import BuildStep, Report
from agentenv.locks import hold
from agentenv.store import layout as files
from agentenv.store.erofs import MAX_LAYERS, Layer, index_of
from agentenv.store.layers import Blob, write_tar
from agentenv.store.layout import Layout, digest_of, written
from agentenv.store.manifest import Config, digest_of_manifest, machine_architecture, manifest_of, parse_config
from agentenv.store.sources import SourceImage
from agentenv.store.tree import Tree, TreeLimits, layer_entries
from agentenv.tar_headers import mapped

_NONE_ABSENT: Final[Mapping[str, int]] = {}


@dataclass(frozen=True)
class StoreLimits:
    """What one image may cost; more is refused as a bad image."""

    image_bytes: int = 64 * 1024**3
    """Of its layers, uncompressed; each time that a layer comes counts."""
    tree: TreeLimits = field(default_factory=TreeLimits)


class Intake:
    """Stores images. ``progress`` is called at every step."""

    def __init__(self, layout: Layout, limits: StoreLimits, progress: Report) -> None:
        self._layout = layout
        self._limits = limits
        self._progress = progress

    def has(self, diff_id: str) -> bool:
        """Whether the store has a layer."""
        return self._layout.layer(diff_id).exists()

    def stored_blobs(self) -> dict[str, int]:
        """The compressed blobs whose layers the store has, with their sizes."""
        found = {}
        for path in self._layout.blobs.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                blob = json.loads(path.read_bytes())
                if self.has(blob["diff_id"]):
                    found[digest_of(path)] = int(blob["size_bytes"])
        return found

    def take(self, source: SourceImage, *, absent: Mapping[str, int] = _NONE_ABSENT) -> str:
        """Store an image and return its digest. ``absent``: blobs that the source does not have, because their layers
        were stored when it was called.

        Raises BadImageError; ImageUnavailableError when such a layer was removed since, or the zstd program is
        needed and missing; OSError.
        """
        config = parse_config(source.config, machine_architecture())
        if len(config.diff_ids) != len(source.layers):
            raise BadImageError(
                f"the image's configuration names {len(config.diff_ids)} layers, its manifest {len(source.layers)}"
            )
        if len(source.layers) > MAX_LAYERS:
            raise BadImageError(f"the image has {len(source.layers)} layers (at most {MAX_LAYERS})")
        with ExitStack() as held, _TreeReader(self._layout, self._limits.tree) as reader:
            sizes_bytes: list[int] = []
            for number, (blob, diff_id) in enumerate(zip(source.layers, config.diff_ids, strict=True), 1):
                step = BuildStep("layers", f"{number} of {len(source.layers)}", total=blob.size_bytes)
                room_bytes = self._limits.image_bytes - sum(sizes_bytes)
                missing = not self.has(diff_id)
                descriptor = self._held_layer(blob, diff_id, room_bytes, step, absent=blob.digest in absent)
                held.callback(os.close, descriptor)
                sizes_bytes.append(os.fstat(descriptor).st_size)
                reader.add(diff_id, now=missing)
            if sum(sizes_bytes) > self._limits.image_bytes:  # of layers that were there
                raise BadImageError(f"the image has more than {self._limits.image_bytes} bytes uncompressed")
            manifest = manifest_of(config, sizes_bytes)
            digest = digest_of_manifest(manifest)
            with written(self._layout.manifest(digest)) as file:
                if file is not None:
                    self._progress(BuildStep("index", f"{len(sizes_bytes)} layers"))
                    self._write_index(digest, config, sizes_bytes, reader)
                    file.write(manifest)
        return digest

    def _held_layer(self, blob: Blob, diff_id: str, room_bytes: int, step: BuildStep, *, absent: bool) -> int:
        """A descriptor of a layer's tar that keeps it from being removed; the tar is written first if it is missing."""
        path = self._layout.layer(diff_id)
        while True:
            with contextlib.suppress(FileNotFoundError):
                return hold(path, shared=True)
            if absent:
                raise ImageUnavailableError("a layer was removed from the store during this", next_step="try again")
            self._write_layer(blob, diff_id, room_bytes, step)

    def _write_layer(self, blob: Blob, diff_id: str, room_bytes: int, step: BuildStep) -> None:
        """Write a layer's tar, unless another process does so; and what its blob held."""
        waiting = replace(step, detail=f"{step.detail}, which another process is writing")

        def done(done_bytes: int) -> None:
            self._progress(replace(step, done=done_bytes))

        with written(self._layout.layer(diff_id), lambda: self._progress(waiting)) as tar:
            if tar is None:
                return
            if blob.size_bytes > room_bytes:
                raise BadImageError(f"a layer's blob has {blob.size_bytes} bytes, and the image may have {room_bytes}")
            files.check_room(tar.fileno(), blob.size_bytes)
            write_tar(blob, diff_id, tar, limit_bytes=room_bytes, done=done)
            if blob.digest:  # noted only here, where it has been verified; and before the layer, or a kill loses it
                held = {"diff_id": diff_id, "size_bytes": blob.size_bytes}
                files.replace(self._layout.blob(blob.digest), json.dumps(held).encode())

    def _write_index(self, digest: str, config: Config, sizes_bytes: Sequence[int], reader: _TreeReader) -> None:
        with written(self._layout.index(digest)) as file:
            if file is None:
                return  # its writer was killed before it wrote the manifest
            names = [diff_id.removeprefix("sha256:") for diff_id in config.diff_ids]
            layers = [Layer(*pair) for pair in zip(names, sizes_bytes, strict=True)]
            tree = reader.tree()
            with _without_collections():
                file.write(index_of(tree.root, layers))


class _TreeReader:
    """Reads the tars of an image's layers, in a thread: each while those after it are fetched and written."""

    def __init__(self, layout: Layout, limits: TreeLimits) -> None:
        self._layout = layout
        self._tree = Tree(limits)
        self._thread = ThreadPoolExecutor(1, "index")
        self._waiting: list[str] = []
        self._reading: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def add(self, diff_id: str, *, now: bool) -> None:
        """The next layer, which is in the store. It is read when there is one with ``now``, or the tree is needed:
        of an image whose layers were all there the store may have the index as well."""
        self._waiting.append(diff_id)
        if now or self._reading:
            self._read()

    def tree(self) -> Tree:
        """The tree of all layers. Raises BadImageError."""
        self._read()
        for read in self._reading:
            read.result()
        return self._tree

    def _read(self) -> None:
        self._reading += [self._thread.submit(self._apply, diff_id) for diff_id in self._waiting]
        self._waiting.clear()

    def _apply(self, diff_id: str) -> None:
        with mapped(self._layout.layer(diff_id)) as tar, _without_collections():
            self._tree.apply(layer_entries(tar))


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Python's collector looks at all nodes of a tree again and again while it grows, and finds nothing: that takes as
    long as the tree. With several threads, the first to end restores it for all."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
