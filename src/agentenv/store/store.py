"""The image store of a node: images that are fetched once, verified, and mounted without being unpacked."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, Self

from agentenv.errors import BadImageError, ConfigError, ImageUnavailableError
from agentenv.image.progress import BuildStep, Report, silent
from agentenv.locks import hold
from agentenv.store import gc, names, registry
from agentenv.store.addition import Runtime, image_above
from agentenv.store.intake import Intake, StoreLimits
from agentenv.store.layout import Layout, digest_of, downloading, sweep
from agentenv.store.manifest import StoredImage, read_manifest
from agentenv.store.names import Name
from agentenv.store.reference import Reference, committed, is_digest, located, parse
from agentenv.store.registry import RegistrySettings
from agentenv.store.route import Route
from agentenv.store.sources import (
    DirectoryFiles,
    SourceImage,
    engine_image,
    engine_image_without_layers,
    files_of,
    image_of_archive,
    image_of_layout,
    save_engine_image,
)

DEFAULT_KEEP_S: Final = 3600.0
"""An image that was used in the last hour is not deleted to make room."""
COMMITTED_KEEP_S: Final = 7 * 86_400.0
"""The same of an image that ``commit(NAME)`` has named: nothing can fetch it again."""


class Store:
    """A directory of images, which any number of processes may use at once. Every method blocks; from a coroutine,
    call it in a thread."""

    def __init__(
        self, directory: Path, *, registries: RegistrySettings | None = None, limits: StoreLimits | None = None
    ) -> None:
        self.layout = Layout(directory)
        self._registries = registries or RegistrySettings()
        self._limits = limits or StoreLimits()

    @classmethod
    def open(
        cls, directory: Path, *, registries: RegistrySettings | None = None, limits: StoreLimits | None = None
    ) -> Self:
        """The store in that directory, which is made if it is missing. Raises ConfigError (``store``)."""
        store = cls(directory, registries=registries, limits=limits)
        try:
            store.layout.create()
        except OSError as error:
            raise ConfigError("store", f"cannot be created: {error}", next_step="use a writable directory") from error
        return store

    def by(self, route: Route) -> Store:
        """The same store, whose registries are reached by that route only."""
        registries = replace(self._registries, route=route)
        return Store(self.layout.directory, registries=registries, limits=self._limits)

    @property
    def mirrors(self) -> Collection[str]:
        """The configured mirrors of registries."""
        return self._registries.mirrors.values()

    def is_mirrored(self, reference: Reference) -> bool:
        """Whether a mirror serves an image, and not the registry that it names."""
        return registry.mirrored(reference.name, self._registries.mirrors) != reference.name

    def ensure(self, reference: str | Reference, *, refresh: bool = False, progress: Report = silent) -> StoredImage:
        """The image that a reference means, fetched if the store does not have it.

        A registry's or an engine's name means what it meant at its last fetch, until ``refresh`` resolves it again;
        directories and archives are always read. One process fetches a reference at a time, others wait.

        Raises ConfigError when the reference is malformed or means nothing, or a program is missing; BadImageError;
        ImageUnavailableError when the registry, the engine or the disk fails; SandboxUnavailableError without an
        engine.
        """
        wanted = located(parse(reference) if isinstance(reference, str) else reference)
        if (known := self._known(wanted, refresh=refresh)) is not None:
            return known
        waiting = BuildStep("wait", f"another process is fetching {wanted}")
        try:
            sweep(self.layout)
            with downloading(self.layout.pull(str(wanted)), lambda: progress(waiting)) as lock:
                if (known := self._known(wanted, refresh=refresh)) is not None:
                    return known
                digest = self._fetch(wanted, lock, progress)
                self._note(str(wanted), digest)
                with self.pin(digest) as image:
                    return image
        except OSError as error:
            raise ImageUnavailableError(
                f"{wanted} could not be stored: {error}",
                next_step="check that the disk is not full (agentenv images gc) and that the files are readable",
            ) from error

    def take(self, digest: str, source: SourceImage, *, reference: str = "", progress: Report = silent) -> StoredImage:
        """The image of that digest from a source that has it (another node's keeper); ``reference`` means
        it from now on. Raises BadImageError when the source's image is another one; ImageUnavailableError."""
        try:
            stored = Intake(self.layout, self._limits, progress).take(source)
            if stored != digest:
                raise BadImageError(f"the image is {stored}, but should be {digest}")
            if reference:
                self._note(reference, digest)
            with self.pin(digest) as image:
                return image
        except OSError as error:
            raise ImageUnavailableError(
                f"{digest} could not be stored: {error}", next_step="check that the disk is not full"
            ) from error

    def pinned(self, reference: Reference) -> Reference:
        """The reference of an image in a registry with the digest that its tag means now. Raises ConfigError,
        ImageUnavailableError."""
        return registry.pinned(reference, self._registries) if reference.kind == "docker" else reference

    def add(self, base: StoredImage | None, tars: Sequence[Path], runtime: Runtime) -> StoredImage:
        """The image of ``base``'s layers and these tars above them, the lowest first, with its programs started as
        ``runtime`` says. Raises BadImageError, ImageUnavailableError."""
        try:
            sweep(self.layout)
            digest = Intake(self.layout, self._limits, silent).take(image_above(base, tars, runtime))
            with self.pin(digest) as image:
                return image
        except OSError as error:
            raise ImageUnavailableError(
                f"an image could not be stored: {error}",
                next_step="check that the disk is not full (agentenv images gc)",
            ) from error

    def name(self, reference: str, image: StoredImage, named_s: float | None = None) -> None:
        """Let a name mean this image here: a registry's, as if it had been fetched by it, for machines that reach no
        registry; or ``committed:NAME``, which keeps the image from :meth:`gc` for a while (``named_s``: when it was
        named, in seconds since 1970; None: now). Raises ConfigError when it is not such a name."""
        wanted = parse(reference)
        if wanted.kind not in ("docker", "committed"):
            raise ConfigError("image", f"{reference!r} cannot be named: only registry references can")
        self._note(str(wanted), image.digest, named_s)

    def unname(self, reference: Reference) -> bool:
        """Let a name mean nothing here; its image stays until :meth:`gc`. Returns whether it meant something."""
        return names.remove(self.layout, str(reference))

    def named(self, reference: Reference) -> Name | None:
        """What a name means here, whether or not its image is (still) in the store; None if it means nothing."""
        return names.read(self.layout.name(str(reference)))

    def find(self, digest: str) -> StoredImage | None:
        """The image of that digest (``StoredImage.digest``); None if the store does not have it."""
        if not is_digest(digest):
            return None
        try:
            manifest = self.layout.manifest(digest).read_bytes()
        except FileNotFoundError:
            return None
        return read_manifest(manifest, self.layout.index(digest), self.layout.layer)

    def used(self, digest: str) -> StoredImage | None:
        """As :meth:`find`; it counts as used now."""
        image = self.find(digest)
        if image is not None:
            with contextlib.suppress(OSError):  # of a reader who may not write
                os.utime(self.layout.manifest(digest))
        return image

    def digests(self) -> list[str]:
        """The digests of all images, those used last first."""
        found = []
        for path in self.layout.images.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                found.append((-path.stat().st_mtime, digest_of(path)))
        return [digest for _, digest in sorted(found)]

    def images(self) -> list[StoredImage]:
        """All images, by their digests."""
        found = (self.find(digest_of(path)) for path in sorted(self.layout.images.glob("*.json")))
        return [image for image in found if image is not None]

    def references(self) -> dict[str, list[str]]:
        """The references that were fetched, by the digests of the images that they meant."""
        found: dict[str, list[str]] = {}
        for name in names.all_of(self.layout):
            found.setdefault(name.digest, []).append(name.reference)
        return found

    def usage(self) -> list[gc.KeptImage]:
        """When the images were used last, and whether a process has pinned them."""
        return gc.kept_images(self.layout)

    def size_bytes(self) -> int:
        """What the images take together, each layer once."""
        return gc.size_bytes(self.layout)

    @contextmanager
    def pin(self, digest: str) -> Iterator[StoredImage]:
        """Keep an image while the block runs: no process deletes it, and it counts as used now. The pin ends with
        this process, however that ends.

        Raises ImageUnavailableError when the store does not have it (any more).
        """
        try:
            descriptor = hold(self.layout.manifest(digest), shared=True)
        except FileNotFoundError:
            raise ImageUnavailableError(
                f"the image {digest} is not in the store", next_step="fetch it: agentenv images pull REFERENCE"
            ) from None
        try:
            with contextlib.suppress(OSError):  # of a reader who may not write
                os.utime(self.layout.manifest(digest))
            image = self.find(digest)
            assert image is not None, "its manifest is locked"
            yield image
        finally:
            os.close(descriptor)

    def gc(
        self,
        *,
        budget_bytes: int,
        keep_s: float = DEFAULT_KEEP_S,
        keep_committed_s: float = COMMITTED_KEEP_S,
        dry_run: bool = False,
    ) -> gc.Collected:
        """Delete what was not used for longest until the rest fits into ``budget_bytes`` (:func:`gc.choose`), and what
        dead processes left."""
        return gc.collect(
            self.layout, budget_bytes=budget_bytes, keep_s=keep_s, keep_committed_s=keep_committed_s, dry_run=dry_run
        )

    def _note(self, reference: str, digest: str, named_s: float | None = None) -> None:
        names.write(self.layout, Name(reference, digest, time.time() if named_s is None else named_s))

    def _known(self, wanted: Reference, *, refresh: bool) -> StoredImage | None:
        """The image that a reference meant, unless it has to be resolved again."""
        if wanted.kind == "sha256":
            return self.used(str(wanted))
        if wanted.kind not in ("docker", "docker-daemon", "committed"):
            return None
        if refresh and wanted.moves and wanted.kind != "committed":
            return None
        name = self.named(wanted)
        return None if name is None else self.used(name.digest)

    def _fetch(self, wanted: Reference, lock: int, progress: Report) -> str:
        """Store what a reference means. Returns its digest."""
        directory = self.layout.pull(str(wanted))
        intake = Intake(self.layout, self._limits, progress)
        match wanted.kind:
            case "docker":
                stored = intake.stored_blobs()
                limit_bytes = self._limits.image_bytes  # compressed it is no larger
                try:
                    layout = registry.download(
                        wanted, self._registries, directory, stored, lock, progress, limit_bytes=limit_bytes
                    )
                except ImageUnavailableError as error:
                    here = None if wanted.digest else committed(str(wanted))
                    if here is not None and self.named(here) is not None:
                        error.next_step = f"write {here.as_written}, which is the image that was named here"
                    raise
                return intake.take(image_of_layout(DirectoryFiles(layout), registry.TAG), absent=stored)
            case "docker-daemon":
                with engine_image(wanted.name) as image:
                    if (known := engine_image_without_layers(image, intake.has)) is not None:
                        return intake.take(known)
                    with files_of(save_engine_image(image, wanted.name, directory, progress)) as files:
                        return intake.take(image_of_archive(files, ""))
            case "oci":
                with files_of(Path(wanted.name)) as files:
                    return intake.take(image_of_layout(files, wanted.tag))
            case "docker-archive":
                with files_of(Path(wanted.name)) as files:
                    return intake.take(image_of_archive(files, wanted.tag))
            case "committed":
                raise ImageUnavailableError(
                    f"no image in this store is named {wanted.as_written} (any more)",
                    next_step="make it again (commit, agentenv images build -t), or name another (agentenv images tag)",
                )
            case "sha256":
                raise ImageUnavailableError(
                    f"no image in this store has the digest {wanted} (any more)", next_step="pull or build it again"
                )
            case "dockerfile":
                raise ConfigError(
                    "image", f"{wanted} has to be built first", next_step="docker build, then docker-daemon:NAME"
                )
