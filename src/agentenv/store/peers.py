"""Images from another node's keeper: manifests and layers by their digests, verified as those of a registry are."""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final

from agentenv.errors import BadImageError, ImageUnavailableError
from agentenv.store.layers import CHUNK_BYTES, Blob
from agentenv.store.manifest import StoredLayer, config_of_manifest
from agentenv.store.sources import MAX_DOCUMENT_BYTES, SourceImage

STALL_S: Final = 30.0
"""Longest time without a byte."""


def image_of_peer(url: str, headers: Mapping[str, str], digest: str, *, stall_s: float = STALL_S) -> SourceImage:
    """An image as the keeper at ``url`` has it; layers are asked for when they are read.

    Raises ImageUnavailableError when it does not have it or cannot be reached, also while a layer is read;
    BadImageError when its manifest is not that of the digest.
    """
    manifest = b"".join(_body(f"{url}/v1/manifests/{digest}", headers, stall_s, limit_bytes=MAX_DOCUMENT_BYTES))
    config, layers = config_of_manifest(manifest, digest)
    return SourceImage(config, tuple(_layer(url, headers, layer, stall_s) for layer in layers))


def _layer(url: str, headers: Mapping[str, str], layer: StoredLayer, stall_s: float) -> Blob:
    read = partial(_body, f"{url}/v1/layers/{layer.diff_id}", headers, stall_s, limit_bytes=layer.size_bytes)
    return Blob(read, layer.size_bytes)


def _body(url: str, headers: Mapping[str, str], stall_s: float, *, limit_bytes: int) -> Iterator[bytes]:
    """The body of an answer, in parts."""
    read = 0
    try:
        asked = urllib.request.Request(url, headers=dict(headers))  # noqa: S310 - a keeper's URL, from its settings
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(asked, timeout=stall_s) as answer:
            while chunk := answer.read(CHUNK_BYTES):
                read += len(chunk)
                if read > limit_bytes:
                    raise BadImageError(f"{url} has more than the {limit_bytes} bytes it should have")
                yield chunk
    except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        raise ImageUnavailableError(f"{url} could not be read: {error}") from error
