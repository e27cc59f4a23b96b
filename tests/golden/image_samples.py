"""Samples of what keepers, farms and clients say of images."""

from __future__ import annotations

from agentenv.errors import ImageUnavailableError
from agentenv.wire import images
from agentenv.wire.server import ErrorReply

_ONE, _TWO = (f"sha256:{digit * 64}" for digit in "12")
_NAME = "committed:prepared:1"
_IMAGE = images.ImageRef(reference=f"registry.example/team/app@{_TWO}", digest=_ONE)
_FETCHING = images.ImageState(
    wanted="debian:trixie", state="fetching", step="download debian:trixie", problem="p", done_bytes=1, total_bytes=2
)
_FAILED = images.ImageState(wanted="a", state="failed", error=ErrorReply.of(ImageUnavailableError("m", next_step="n")))
_NODE = images.NodeImages(node="n", stored=(_ONE,), fetching=(_TWO,))

IMAGE_MODELS = (
    _IMAGE,
    images.ImagesRequest(references=("debian:trixie",), images=(_IMAGE,), wait_s=20.0),
    images.ImageState(wanted="debian:trixie", state="ready", image=_IMAGE),
    images.ImagesReply(images=(_FETCHING, _FAILED)),
    images.CommitRequest(container="c", checkpoint="0" * 32, image=_ONE, name=_NAME, run="team/a", wait_s=20.0),
    images.LayersRequest(
        container="c",
        checkpoint="0" * 32,
        image=_ONE,
        name=_NAME,
        base_url="http://10.0.0.7:8000",
        token="t",
        wait_s=20.0,
    ),
    images.NamedImage(reference=_NAME, digest=_ONE, named_s=1.5),
    images.StoredList(version="0011223344556677", digests=(_ONE, _TWO)),
    _NODE,
    images.ImageMap(nodes=(_NODE,)),
)
