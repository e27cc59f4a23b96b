"""Where images are read from: OCI image layouts and ``docker save`` archives, as directories or as tars; and this
machine's Docker engine, which writes such an archive.

The files say which configuration and which blobs an image has; everything by a digest is checked against it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from agentenv.errors import BadImageError, ConfigError, ImageUnavailableError, missing_extra
from agentenv.image.progress import BuildStep, Report
from agentenv.store.layers import CHUNK_BYTES, Blob
from agentenv.store.layout import check_room
from agentenv.store.manifest import machine_architecture, parse_object
from agentenv.store.reference import is_digest
from agentenv.store.tree import layer_entries
from agentenv.tar_headers import Kind, mapped

MAX_DOCUMENT_BYTES: Final = 4 * 1024 * 1024
"""Of an index, a manifest or a configuration: as much as registries accept."""
MAX_FILES: Final = 100_000
"""In a tar of an image."""

_NAME: Final = "org.opencontainers.image.ref.name"
_DEPTH: Final = 4
"""Indexes in indexes."""
_ENGINE_TIMEOUT_S: Final = 1800

Descriptor = Mapping[str, Any]


@dataclass(frozen=True)
class SourceImage:
    """An image as its source has it; to be read while the source is open."""

    config: bytes
    layers: tuple[Blob, ...]


class Files(Protocol):
    """The files of a source, by their names with ``/``."""

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """Its content."""


class DirectoryFiles:
    """The files below a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""
        path = self._directory / name
        return path.stat().st_size if path.is_file() else None

    def chunks(self, name: str) -> Iterator[bytes]:
        """Its content."""
        with (self._directory / name).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk


class TarFiles:
    """The files in a tar, links among them followed."""

    def __init__(self, tar: mmap.mmap | bytes) -> None:
        self._tar = tar
        self._places: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        for count, entry in enumerate(layer_entries(tar)):
            if count == MAX_FILES:
                raise BadImageError(f"the archive has more than {MAX_FILES} files")
            name = posixpath.normpath(entry.name.decode("utf-8", "replace"))
            if entry.kind is Kind.FILE:
                self._places[name] = (entry.offset, entry.size)
            elif entry.kind in (Kind.SYMLINK, Kind.HARD_LINK):
                base = posixpath.dirname(name) if entry.kind is Kind.SYMLINK else ""
                self._links[name] = posixpath.normpath(posixpath.join(base, entry.link.decode("utf-8", "replace")))

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""
        place = self._place(name)
        return place[1] if place else None

    def chunks(self, name: str) -> Iterator[bytes]:
        """Its content."""
        begin, size = self._place(name) or (0, 0)
        for at in range(begin, begin + size, CHUNK_BYTES):
            yield self._tar[at : min(at + CHUNK_BYTES, begin + size)]

    def _place(self, name: str) -> tuple[int, int] | None:
        name = posixpath.normpath(name)
        return self._places.get(name) or self._places.get(self._links.get(name, ""))


@contextmanager
def files_of(path: Path) -> Iterator[Files]:
    """The files of a directory or a tar. Raises ConfigError (``image``) when there is neither; BadImageError."""
    if path.is_dir():
        yield DirectoryFiles(path)
        return
    if not path.is_file():
        raise ConfigError("image", f"{path} does not exist", next_step="give an existing directory or tar")
    with mapped(path) as tar:
        yield TarFiles(tar)


def image_of_layout(files: Files, tag: str) -> SourceImage:
    """An image of an OCI layout: the one with that tag (if empty, the only one), for this machine.

    Raises BadImageError; ConfigError (``image``) naming the tags there are.
    """
    index = parse_object(_read(files, "index.json"), "index.json")
    chosen = _by_tag(_descriptors(index, "manifests"), tag)
    manifest = _document(files, chosen)
    for _ in range(_DEPTH):
        if "manifests" not in manifest:
            break
        manifest = _document(files, _for_this_machine(_descriptors(manifest, "manifests")))
    if not isinstance(manifest.get("config"), dict):
        raise BadImageError("the manifest names no configuration")
    config = _read_blob(files, manifest["config"])
    layers = [_blob(files, descriptor) for descriptor in _descriptors(manifest, "layers")]
    return SourceImage(config, tuple(layers))


def image_of_archive(files: Files, name: str) -> SourceImage:
    """An image of a ``docker save`` archive: the one of that name (if empty, the only one). Raises as
    :func:`image_of_layout`."""
    listed = parse_object(b'{"images":' + _read(files, "manifest.json") + b"}", "manifest.json")["images"]
    images = [image for image in listed if isinstance(image, dict)] if isinstance(listed, list) else []
    names = {id(image): [str(tag) for tag in image.get("RepoTags") or ()] for image in images}
    wanted = {name, f"{name}:latest"}
    chosen = [image for image in images if not name or wanted & set(names[id(image)])]
    if len(chosen) != 1:
        raise _not_one("image", name, [tag for tags in names.values() for tag in tags])
    config, layers = chosen[0].get("Config"), chosen[0].get("Layers") or []
    if not isinstance(config, str) or not all(isinstance(layer, str) for layer in layers):
        raise BadImageError("manifest.json of the archive is malformed")
    return SourceImage(_read(files, config), tuple(_part(files, layer) for layer in layers))


@contextmanager
def engine_image(name: str) -> Iterator[Any]:
    """The engine's image of a name or id, as the SDK has it, while the connection is open. The docker SDK
    (``agentenv[farm]``) is imported here, at first use.

    Raises ConfigError (``image``) when there is none of that name, MissingExtraError; SandboxUnavailableError when no
    engine answers.
    """
    try:
        from docker.errors import DockerException, ImageNotFound

        from agentenv.image.engine import connect
    except ModuleNotFoundError as error:
        raise missing_extra("docker-daemon:", error) or error from None
    with contextlib.closing(connect(timeout_s=_ENGINE_TIMEOUT_S)) as client:
        try:
            yield client.images.get(name)
        except ImageNotFound:
            raise ConfigError(
                "image", f"the Docker engine has no image {name}", next_step=f"docker pull {name}"
            ) from None
        except DockerException as error:
            raise ImageUnavailableError(
                f"the Docker engine failed: {error}", next_step="see the engine's log"
            ) from error


def engine_image_without_layers(image: Any, stored: Callable[[str], bool]) -> SourceImage | None:
    """The image without exporting it, if all its layers are ``stored``."""
    diff_ids = image.attrs["RootFS"].get("Layers") or []
    if not all(is_digest(diff_id) and stored(diff_id) for diff_id in diff_ids):
        return None
    config = {
        "architecture": image.attrs["Architecture"],
        "os": image.attrs["Os"],
        "rootfs": {"diff_ids": diff_ids},
        "config": image.attrs["Config"],
    }
    return SourceImage(json.dumps(config).encode(), tuple(Blob(_removed, 0) for _ in diff_ids))


def _removed() -> Iterator[bytes]:
    raise ImageUnavailableError("a layer of the image was removed from the store during this", next_step="try again")


def save_engine_image(image: Any, name: str, directory: Path, report: Report) -> Path:
    """Write the archive that ``docker save`` writes into a directory. It holds this image only."""
    path = directory / "image.tar"
    done = 0
    with path.open("wb") as target:
        for chunk in image.save():
            check_room(target.fileno(), len(chunk))
            target.write(chunk)
            done += len(chunk)
            report(BuildStep("export", name, done=done))
    return path


def _by_tag(descriptors: Sequence[Descriptor], tag: str) -> Descriptor:
    """The descriptor with the tag. A layout may list it once for every platform."""
    tags = [str((descriptor.get("annotations") or {}).get(_NAME, "")) for descriptor in descriptors]
    chosen = [one for one, its in zip(descriptors, tags, strict=True) if not tag or its == tag]
    if len(chosen) > 1:
        chosen = [one for one in chosen if _fits(one)]
    if len(chosen) != 1:
        raise _not_one("tag", tag, tags)
    return chosen[0]


def _not_one(what: str, wanted: str, there: Sequence[str]) -> ConfigError:
    listed = ", ".join(sorted(filter(None, there))[:20]) or "none has a name"
    problem = f"no {what} {wanted!r}" if wanted else f"not exactly one {what} for this machine"
    return ConfigError("image", f"it has {problem}", next_step=f"name one of: {listed}")


def _fits(descriptor: Descriptor) -> bool:
    platform = descriptor.get("platform")
    if not isinstance(platform, dict):
        return False
    return (platform.get("os"), platform.get("architecture")) == ("linux", machine_architecture())


def _for_this_machine(descriptors: Sequence[Descriptor]) -> Descriptor:
    for descriptor in descriptors:
        if _fits(descriptor):
            return descriptor
    platforms = [descriptor.get("platform") or {} for descriptor in descriptors]
    there = sorted({f"{one.get('os')}/{one.get('architecture')}" for one in platforms if isinstance(one, dict)})
    raise BadImageError(
        f"the image is for {', '.join(there) or 'no machine'}, this machine is linux/{machine_architecture()}",
        next_step="use an image that is built for this machine",
    )


def _descriptors(document: Mapping[str, Any], key: str) -> list[Descriptor]:
    found = document.get(key)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise BadImageError(f"the image's manifest has wrong {key}")
    return found


def _document(files: Files, descriptor: Descriptor) -> dict[str, Any]:
    return parse_object(_read_blob(files, descriptor), "the image's manifest")


def _read_blob(files: Files, descriptor: Descriptor) -> bytes:
    content = _read(files, _path(descriptor))
    if (found := f"sha256:{hashlib.sha256(content).hexdigest()}") != descriptor["digest"]:
        raise BadImageError(f"a blob is {found}, but should be {descriptor['digest']}")
    return content


def _blob(files: Files, descriptor: Descriptor) -> Blob:
    size = descriptor.get("size")
    if not isinstance(size, int):
        raise BadImageError("a layer without a size")
    return Blob(partial(_chunks, files, _path(descriptor)), size, descriptor["digest"])


def _part(files: Files, name: str) -> Blob:
    return Blob(partial(_chunks, files, name), files.size(name) or 0)


def _path(descriptor: Descriptor) -> str:
    digest = descriptor.get("digest")
    if not is_digest(digest):
        raise BadImageError(f"a blob is named {str(digest)[:80]!r}, not by sha256")
    assert isinstance(digest, str)
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _read(files: Files, name: str) -> bytes:
    size = files.size(name)
    if size is None:
        raise BadImageError(f"{name} is missing: is it really an OCI layout, or a docker-save tar?")
    if size > MAX_DOCUMENT_BYTES:
        raise BadImageError(f"{name} has {size} bytes (at most {MAX_DOCUMENT_BYTES})")
    return b"".join(files.chunks(name))


def _chunks(files: Files, name: str) -> Iterator[bytes]:
    """As ``files.chunks``, for a file that must be there."""
    if files.size(name) is None:
        raise BadImageError(f"the layer {name} is not in it")
    yield from files.chunks(name)
