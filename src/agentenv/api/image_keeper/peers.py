"""The other nodes' keepers, which are asked for an image before its registry."""

from __future__ import annotations

import asyncio
import http.client
import logging
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp
from pydantic import ValidationError

from agentenv.deadlines import scaled
from agentenv.errors import BadImageError, ImageUnavailableError
from agentenv.image.progress import Report
from agentenv.image_placement.placement import rendezvous
from agentenv.store import Store, StoredImage
from agentenv.store.layers import CHUNK_BYTES, Blob
from agentenv.store.manifest import StoredLayer, config_of_manifest
from agentenv.store.sources import MAX_DOCUMENT_BYTES, SourceImage
from agentenv.wire import images as wire

logger = logging.getLogger(__name__)

_LOOK_S: Final = scaled(3.0)
"""Time limit of a peer's answer whether it has an image."""
_AT_ONCE: Final = 8
_STALL_S: Final = 30.0
"""Longest time without a byte."""
DISTRUST_S: Final = 600.0
"""How long a peer is not asked after it sent what its digest denies."""


class Peers:
    """See the module. They share one token."""

    def __init__(
        self, urls: Callable[[], Sequence[str]], token: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``urls``: the peers of the moment; the keeper itself may be among them, under another name."""
        self._urls = urls
        self._headers = {"Authorization": f"Bearer {token}"}
        self._clock = clock
        self._distrusted_until_s: dict[str, float] = {}
        self.lies = 0

    async def fetch(self, store: Store, digest: str, reference: str, progress: Report) -> StoredImage | None:
        """The image from the first peer that has it and sends it as it should be; None if none does."""
        for url in await self._having(digest):
            try:
                return await asyncio.to_thread(self._take, store, url, digest, reference, progress)
            except BadImageError as error:
                self.lies += 1
                self._distrusted_until_s[url] = self._clock() + DISTRUST_S
                logger.warning("peer %s is skipped for a while: %s", url, error)
            except ImageUnavailableError as error:
                logger.info("peer %s: %s", url, error)
        return None

    async def named(self, reference: str) -> list[wire.NamedImage]:
        """What a name of ``commit`` means to the peers that know it."""
        turns = asyncio.Semaphore(_AT_ONCE)
        timeout = aiohttp.ClientTimeout(total=_LOOK_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=self._headers) as http:
            answers = await asyncio.gather(*(_meaning(http, turns, url, reference) for url in self._urls()))
        return [named for named in answers if named is not None]

    def _take(self, store: Store, url: str, digest: str, reference: str, progress: Report) -> StoredImage:
        return store.take(digest, image_of_peer(url, self._headers, digest), reference=reference, progress=progress)

    async def _having(self, digest: str) -> list[str]:
        """Peers that say they have an image. Each image has its own order of peers, so that no peer serves all."""
        now = self._clock()
        asked = [url for url in self._urls() if self._distrusted_until_s.get(url, 0.0) <= now]
        asked.sort(key=lambda url: rendezvous(digest, url))
        turns = asyncio.Semaphore(_AT_ONCE)
        timeout = aiohttp.ClientTimeout(total=_LOOK_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=self._headers) as http:
            answers = await asyncio.gather(*(_has(http, turns, url, digest) for url in asked))
        return [url for url, has in zip(asked, answers, strict=True) if has]


async def _has(http: aiohttp.ClientSession, turns: asyncio.Semaphore, url: str, digest: str) -> bool:
    try:
        async with turns, http.head(f"{url}/v1/manifests/{digest}") as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def _meaning(
    http: aiohttp.ClientSession, turns: asyncio.Semaphore, url: str, reference: str
) -> wire.NamedImage | None:
    try:
        async with turns, http.get(f"{url}/v1/names", params={"reference": reference}) as answer:
            named = wire.NamedImage.model_validate_json(await answer.read()) if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValidationError) as error:
        logger.info("peer %s: %s", url, error)
        return None
    return named if named is not None and named.reference == reference else None


def peers_of(urls: Sequence[str], file: Path | None) -> Callable[[], Sequence[str]]:
    """The peers that are named, and those that a file has now, one URL on a line; it may change, or be missing."""

    def read() -> Sequence[str]:
        try:
            lines = file.read_text().split() if file is not None else []
        except FileNotFoundError:
            lines = []
        return [*dict.fromkeys(url.rstrip("/") for url in (*urls, *lines))]

    return read


def authorization(token: str) -> Mapping[str, str]:
    """The header of a keeper's clients."""
    return {"Authorization": f"Bearer {token}"}


def image_of_peer(url: str, headers: Mapping[str, str], digest: str) -> SourceImage:
    """An image as the keeper at ``url`` has it; layers are asked for when they are read.

    Raises ImageUnavailableError when it does not have it or cannot be reached, also while a layer is read;
    BadImageError when its manifest is not that of the digest.
    """
    manifest = b"".join(_body(f"{url}/v1/manifests/{digest}", headers, limit_bytes=MAX_DOCUMENT_BYTES))
    config, layers = config_of_manifest(manifest, digest)
    return SourceImage(config, tuple(_layer(url, headers, layer) for layer in layers))


def _layer(url: str, headers: Mapping[str, str], layer: StoredLayer) -> Blob:
    read = partial(_body, f"{url}/v1/layers/{layer.diff_id}", headers, limit_bytes=layer.size_bytes)
    return Blob(read, layer.size_bytes)


def _body(url: str, headers: Mapping[str, str], *, limit_bytes: int) -> Iterator[bytes]:
    """The body of an answer, in parts."""
    read = 0
    try:
        asked = urllib.request.Request(url, headers=dict(headers))  # noqa: S310 - a keeper's URL, from its settings
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(asked, timeout=_STALL_S) as answer:
            while chunk := answer.read(CHUNK_BYTES):
                read += len(chunk)
                if read > limit_bytes:
                    raise BadImageError(f"{url} has more than the {limit_bytes} bytes it should have")
                yield chunk
    except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        raise ImageUnavailableError(f"{url} could not be read: {error}") from error
