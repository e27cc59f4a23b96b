"""The image keepers of a farm's nodes, as its owner asks them: what each has, fetches, and what references mean."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Final, Self, TypeVar
from urllib.parse import urlsplit

import aiohttp
from pydantic import ValidationError

from agentenv.backoff import Backoff
from agentenv.containers.connection import error_reply, open_session
from agentenv.containers.handle import ContainerHandle
from agentenv.deadlines import scaled
from agentenv.errors import AgentEnvError, ConnectionLostError, ImageUnavailableError, ProtocolError, from_wire
from agentenv.image_placement.placement import rendezvous
from agentenv.store.reference import has_source
from agentenv.wire import images as wire
from agentenv.wire.base import WireModel

Reply = TypeVar("Reply", bound=WireModel)

logger = logging.getLogger(__name__)

_WAIT_S: Final = 20.0
_FETCH_WAIT_S: Final = 5.0
"""The same of a fetch: whoever waits for it is to hear what fails."""
_ANSWER_S: Final = scaled(10.0)
_RETRY_MIN_S, _RETRY_MAX_S = 0.2, 5.0
_SILENT_S: Final = scaled(30.0)
"""How long a keeper that does not answer is asked again for a fetch: it may be restarting."""
_REMEMBERED: Final = 20_000
"""Where so many images came from is remembered; any keeper that has one knows it too."""


def keeper_at(port: int) -> Callable[[ContainerHandle], str]:
    """The keeper's URL, from a container on its node: every node's listens on the same port."""

    def url(handle: ContainerHandle) -> str:
        host = urlsplit(handle.base_url).hostname or ""
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    return url


class Keepers:
    """See the module. Implements :class:`agentenv.slots.container_manager.ImageStores`. An async context manager."""

    def __init__(self, token: str, url_of: Callable[[ContainerHandle], str]) -> None:
        self._token = token
        self._url_of = url_of
        self._urls: dict[str, str] = {}
        """By node; those whose containers are gone are kept, they may still resolve."""
        self._sources: OrderedDict[str, str] = OrderedDict()
        """By digest: a reference that means the image."""
        self._problems: dict[tuple[str, str], str] = {}
        """By node and image: what failed last in a fetch that goes on."""
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._session: aiohttp.ClientSession | None = None
        self._known = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._session = open_session()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def follow(self, handle: ContainerHandle, images: Callable[[str, Iterable[str]], None]) -> None:
        """See :class:`agentenv.slots.container_manager.ImageStores`."""
        self._urls[handle.node] = self._url_of(handle)
        self._known.set()
        async with self._turns[handle.node]:  # one of a node's containers is enough; another takes over
            version, backoff = "", Backoff(_RETRY_MIN_S, _RETRY_MAX_S)
            while True:
                try:
                    query = {"version": version, "wait_s": str(_WAIT_S)} if version else {}
                    listed = await self._ask(wire.StoredList, handle.node, "GET", params=query, wait_s=_WAIT_S)
                except AgentEnvError as error:
                    logger.debug("the keeper of %s: %s", handle.node, error)
                    await asyncio.sleep(backoff.next_s())
                    continue
                backoff.reset()
                if listed.version != version:
                    version = listed.version
                    images(handle.node, listed.digests)

    async def fetch(self, node: str, image: str) -> None:
        """See :class:`agentenv.slots.container_manager.ImageStores`. Raises ImageUnavailableError also when the keeper
        does not answer for a while."""
        try:
            await self._fetch(node, image)
        finally:
            self._problems.pop((node, image), None)

    async def _fetch(self, node: str, image: str) -> None:
        wanted = wire.ImageRef(reference=self._sources.get(image, image), digest=image)
        request = wire.ImagesRequest(images=(wanted,), wait_s=_FETCH_WAIT_S)
        backoff, silent_s = Backoff(_RETRY_MIN_S, _RETRY_MAX_S), 0.0
        while True:
            try:
                reply = await self._ask(wire.ImagesReply, node, "POST", request, wait_s=_FETCH_WAIT_S)
            except ConnectionLostError as error:
                self._problems[node, image] = error.message
                if silent_s >= _SILENT_S:
                    raise ImageUnavailableError(
                        f"node {node} cannot fetch images: {error.message}",
                        next_step="see that its image keeper runs (agentenv images serve)",
                    ) from error
                pause_s = backoff.next_s()
                silent_s += pause_s
                await asyncio.sleep(pause_s)
                continue
            (state,) = reply.images
            if state.error is not None:
                raise from_wire(state.error.error, f"node {node}: {state.error.message}", state.error.next_step)
            if state.image is not None:
                return
            self._problems[node, image] = state.problem

    def problem(self, image: str) -> str:
        """See :class:`agentenv.slots.container_manager.ImageStores`."""
        found = (f"node {node}: {told}" for (node, its), told in self._problems.items() if its == image and told)
        return next(found, "")

    async def commit(self, handle: ContainerHandle, request: wire.CommitRequest, token: str) -> wire.ImageState:
        """An image of a checkpoint of the container, in the store of its node; ``token`` is one that it accepts. A
        keeper that does not answer is asked again for the ``wait_s`` of the request: it may be restarting."""
        asked = wire.LayersRequest(
            container=handle.id,
            checkpoint=request.checkpoint,
            image=request.image,
            name=request.name,
            base_url=handle.base_url,
            token=token,
            wait_s=request.wait_s,
        )
        until_s, backoff = time.monotonic() + request.wait_s, Backoff(_RETRY_MIN_S, _RETRY_MAX_S)
        while True:
            try:
                return await self._ask(
                    wire.ImageState, handle.node, "POST", asked, wait_s=request.wait_s, path="/v1/commits"
                )
            except ConnectionLostError as error:
                if time.monotonic() >= until_s:
                    raise ImageUnavailableError(
                        f"node {handle.node} cannot store images: {error.message}",
                        next_step="see that its image keeper runs (agentenv images serve)",
                    ) from error
            await asyncio.sleep(backoff.next_s())

    async def known(self, wait_s: float) -> bool:
        """Whether there is a node that could be asked; waits so long for the first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._known.wait()
        return self._known.is_set()

    async def resolve(self, reference: str, wait_s: float, stored: Callable[[str, str], None]) -> wire.ImageState:
        """What a reference means: one keeper fetches it, the same for whoever asks, so a tag means the same for all.
        ``stored`` is told the node and the image that it has then. Keepers that do not answer are asked again for
        ``wait_s``: they may be restarting."""
        until_s, backoff = time.monotonic() + wait_s, Backoff(_RETRY_MIN_S, _RETRY_MAX_S)
        while (state := await self._resolved(reference, wait_s, stored)) is None:
            if time.monotonic() >= until_s:
                raise ImageUnavailableError(
                    "no node's image keeper can be reached",
                    next_step="see that one runs on every node (agentenv images serve), at the farm's keeper_port",
                )
            await asyncio.sleep(backoff.next_s())
        return state

    async def _resolved(
        self, reference: str, wait_s: float, stored: Callable[[str, str], None]
    ) -> wire.ImageState | None:
        """What the first keeper says that answers; None if none does."""
        request = wire.ImagesRequest(references=(reference,), wait_s=wait_s)
        order = sorted(self._urls, key=lambda node: rendezvous(reference, node), reverse=True)
        for node in order:
            try:
                (state,) = (await self._ask(wire.ImagesReply, node, "POST", request, wait_s=wait_s)).images
            except ConnectionLostError as error:
                logger.warning("the keeper of %s: %s", node, error)
                continue
            if state.image is not None:
                self.remember(state.image.digest, state.image.reference)
                stored(node, state.image.digest)
            return state
        return None

    def remember(self, digest: str, reference: str) -> None:
        """Where an image comes from, for nodes whose peers do not have it."""
        if has_source(reference):
            self._sources[digest] = reference
            self._sources.move_to_end(digest)
            if len(self._sources) > _REMEMBERED:
                self._sources.popitem(last=False)

    async def _ask(
        self,
        model: type[Reply],
        node: str,
        method: str,
        body: WireModel | None = None,
        *,
        params: Mapping[str, str] = {},
        wait_s: float,
        path: str = "/v1/images",
    ) -> Reply:
        """As :func:`ask_keeper`."""
        assert self._session is not None, "used inside `async with`"
        url, token = self._urls[node], self._token
        return await ask_keeper(self._session, url, token, model, method, body, params=params, wait_s=wait_s, path=path)

    def __repr__(self) -> str:
        return f"<Keepers of {len(self._urls)} nodes>"


async def ask_keeper(
    session: aiohttp.ClientSession,
    url: str,
    token: str,
    model: type[Reply],
    method: str,
    body: WireModel | None = None,
    *,
    params: Mapping[str, str] = {},
    wait_s: float,
    path: str = "/v1/images",
) -> Reply:
    """What the keeper at ``url`` answers to somebody who may be held back for ``wait_s``. Raises
    ConnectionLostError, ProtocolError, or what it refused."""
    place = f"{url.rstrip('/')}{path}"
    timeout = aiohttp.ClientTimeout(total=wait_s + _ANSWER_S)
    headers = {"Authorization": f"Bearer {token}"}
    data = None if body is None else body.model_dump_json().encode()
    try:
        async with session.request(
            method, place, data=data, params=params, headers=headers, timeout=timeout, allow_redirects=False
        ) as answer:
            raw = await answer.read()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ConnectionLostError(f"{place} cannot be reached: {error or 'no answer in time'}") from error
    if answer.status != 200:
        said = error_reply(raw)
        if said is None:
            raise ConnectionLostError(f"{place} answered HTTP {answer.status}")
        raise from_wire(said.error, f"{place}: {said.message}", said.next_step)
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise ProtocolError(f"{place}: {error}") from error
