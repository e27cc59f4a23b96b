"""Images of one run on a farm: every reference is resolved once, and from then on means the same."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from agentenv.errors import AgentEnvError, ConfigError, FarmUnreachableError, TooManyRequestsError, from_wire
from agentenv.slots.farm_asks import retries
from agentenv.slots.farm_client import FarmClient
from agentenv.store.reference import located, parse
from agentenv.tasks import TaskSet
from agentenv.wire import images as wire

logger = logging.getLogger(__name__)

_WAIT_S: Final = 20.0


class FarmImages:
    """See the module. ``tasks`` keeps what goes on in the background."""

    def __init__(self, client: FarmClient, tasks: TaskSet) -> None:
        self._client = client
        self._tasks = tasks
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._resolved: dict[str, wire.ImageRef] = {}

    async def resolve(self, reference: str) -> wire.ImageRef:
        """The image that a reference means in this run; the first time, a node of the farm fetches it.

        It takes as long as the fetch; a farm that is away is waited for. Raises what the fetch failed with:
        BadImageError, ImageUnavailableError, ConfigError, also for an image that only this machine could have.
        """
        reference = for_nodes(reference)
        while (known := self._resolved.get(reference)) is None:
            task = self._resolving.get(reference)
            if task is None:
                task = asyncio.create_task(self._resolve(reference), name=f"resolve {reference}")
                self._resolving[reference] = task
                task.add_done_callback(functools.partial(self._over, reference))
            await asyncio.shield(task)
        return known

    def prefetch(self, references: Iterable[str]) -> None:
        """These images are wanted soon: they are resolved, and fetched to some nodes, in the background. What fails is
        told to whoever resolves it."""
        for reference in dict.fromkeys(references):
            self._tasks.start("images", self._ahead(reference), f"prefetch of {reference}")

    async def commit(self, container: str, checkpoint: str, image: str, name: str = "") -> wire.ImageRef:
        """The image of a checkpoint of that container, whose slot has ``image``, in the store of its node; other nodes
        get it from there. ``name``: ``committed:NAME``, which means it from now on. Raises CheckpointError,
        ImageUnavailableError, BadImageError, ConnectionLostError."""
        request = wire.CommitRequest(container=container, checkpoint=checkpoint, image=image, name=name, wait_s=_WAIT_S)
        made = await self._followed(lambda: self._client.commit_image(request))
        self._resolved[made.reference] = made
        return made

    async def _ahead(self, reference: str) -> None:
        try:
            named = for_nodes(reference)
            if named in self._resolved or named in self._resolving:
                return
            image = await self.resolve(named)
            await self._client.want_images(wire.ImagesRequest(images=(image,)))
        except AgentEnvError as error:
            logger.debug("%s is not prefetched: %s", reference, error)

    async def _resolve(self, reference: str) -> None:
        request = wire.ImagesRequest(references=(reference,), wait_s=_WAIT_S)

        async def ask() -> wire.ImageState:
            (state,) = (await self._client.want_images(request)).images
            return state

        self._resolved[reference] = await self._followed(ask)

    async def _followed(self, ask: Callable[[], Awaitable[wire.ImageState]]) -> wire.ImageRef:
        """Ask until it is decided, also while the farm is away. Raises what it failed with."""
        backoff = retries()
        while True:
            try:
                state = await ask()
            except (FarmUnreachableError, TooManyRequestsError):
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            if state.error is not None:
                raise from_wire(state.error.error, state.error.message, state.error.next_step)
            if state.image is not None:
                return state.image

    def _over(self, reference: str, task: asyncio.Task[None]) -> None:
        del self._resolving[reference]
        if not task.cancelled():
            task.exception()  # whoever waits is told; nobody may be left

    async def aclose(self) -> None:
        """End what goes on."""
        for task in list(self._resolving.values()):
            task.cancel()
        await asyncio.gather(*self._resolving.values(), return_exceptions=True)


def for_nodes(reference: str) -> str:
    """A reference as the nodes of a farm understand it: a path is absolute, and means the same on every node. Raises
    ConfigError for what only this machine could have."""
    wanted = located(parse(reference))
    if wanted.kind in ("dockerfile", "docker-daemon"):
        raise ConfigError(
            "image",
            f"{wanted} is of this machine only, and the nodes of this farm fetch their images",
            next_step="push the built image to a registry and name that; or copy it as oci:DIR to a disk that every "
            "node reads (agentenv images serve --allow-path)",
        )
    return str(wanted)
