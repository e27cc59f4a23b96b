"""Images in the messages of keepers, farms and their clients. A tag is resolved once, by a keeper; from then on an
image is named by its digest."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from agentenv.wire.base import CheckpointName, WireModel
from agentenv.wire.farm import RunName
from agentenv.wire.server import ErrorReply

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
"""Digest of an image in a store: of its content, whatever its source."""
Reference = Annotated[str, Field(min_length=1, max_length=1_000, pattern=r"^[^\s\x00-\x1f]+$")]
"""What a user writes: ``debian:trixie``, ``registry.example:5000/a/b@sha256:…``, ``oci:PATH`` on every node."""
CommittedName = Annotated[str, Field(max_length=1_000, pattern=r"^(committed:[^\s\x00-\x1f]+)?$")]
"""The reference that an image gets; empty: none."""
MAX_WANTED: Final = 256
"""Images in one request."""
MAX_LISTED: Final = 10_000
"""Images of one node in one response; a node that has more lists those it used last."""
MAX_WAIT_S: Final = 25.0
"""Longest time that a response is held back."""


class ImageRef(WireModel):
    """An image: ``reference`` is where it comes from, with the digest of the registry's manifest in the place of a tag,
    so that it means the same tomorrow; ``digest`` is what leases name."""

    reference: Reference
    digest: Digest


class ImagesRequest(WireModel):
    """``POST /v1/images``: have these images fetched. The response is sent at once, or when all of them are decided, at
    the latest after ``wait_s``; repeat the request to follow them."""

    references: Annotated[tuple[Reference, ...], Field(max_length=MAX_WANTED)] = ()
    images: Annotated[tuple[ImageRef, ...], Field(max_length=MAX_WANTED)] = ()
    """Images that were resolved before: the keeper looks for them on other nodes first."""
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S)] = 0.0


class ImageState(WireModel):
    """One of them: ``image`` when it is there, ``error`` when it cannot be fetched (requested again later, it is tried
    again)."""

    wanted: str
    state: Literal["fetching", "ready", "failed"]
    image: ImageRef | None = None
    error: ErrorReply | None = None
    step: str = ""
    problem: str = ""
    """Why the fetch makes no progress and is retried: the registry's last failure."""
    done_bytes: int | None = None
    total_bytes: int | None = None


class ImagesReply(WireModel):
    """The response, in the order of the request: references, then images."""

    images: tuple[ImageState, ...]


class CommitRequest(WireModel):
    """``POST /v1/images/commit`` of a farm: make an image of a checkpoint, in the store of its container's node. The
    response is an ImageState, when that is decided, at the latest after ``wait_s``; repeat it to follow it."""

    container: Annotated[str, Field(min_length=1, max_length=200)]
    checkpoint: CheckpointName
    image: Digest
    """Of the slot that the checkpoint is of: what its layers are above."""
    name: CommittedName = ""
    run: RunName = ""
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S)] = 0.0


class LayersRequest(WireModel):
    """``POST /v1/commits`` of a keeper: the same, with the address of the container and a pass that it accepts."""

    container: Annotated[str, Field(max_length=256)]
    checkpoint: CheckpointName
    image: Digest
    name: CommittedName = ""
    base_url: Annotated[str, Field(max_length=2_000, pattern=r"^https?://")]
    token: Annotated[str, Field(max_length=4_096)]
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S)] = 0.0


class NamedImage(WireModel):
    """``GET /v1/names`` of a keeper, for its peers: what a name of ``commit`` means in its store."""

    reference: CommittedName
    digest: Digest
    named_s: float
    """When it was given, by the clock of the node that has made the image: the latest counts."""


class StoredList(WireModel):
    """``GET /v1/images`` of a keeper. With ``version`` of an earlier response and ``wait_s`` in the query it waits
    until something has changed."""

    version: str
    digests: Annotated[tuple[Digest, ...], Field(max_length=MAX_LISTED)]


class NodeImages(WireModel):
    """One node in ``GET /v1/images`` of a farm."""

    node: str
    stored: tuple[Digest, ...]
    fetching: tuple[Digest, ...]


class ImageMap(WireModel):
    """``GET /v1/images`` of a farm: which images are where."""

    nodes: tuple[NodeImages, ...]
