"""Images of one run on a farm: every reference is resolved once, and from then on means the same."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from agentenv.background import TaskSet
from agentenv.errors import (
    AgentEnvError,
    ConfigError,
    FarmUnreachableError,
    ImageUnavailableError,
    TooManyRequestsError,
    from_wire,
)
from agentenv.farm_client.asks import retries
from agentenv.store.reference import located, parse
from agentenv.wire import images as wire

logger = logging.getLogger(__name__)

_WAIT_S: Final = 5.0
_LOOK_S: Final = 0.5


@dataclass(frozen=True)
class _Problem:
    """What fails in a fetch, and when it last went on; empty: it does."""

    words: str
    since_s: float


class ImageSource(Protocol):
    """What a farm offers about images: its client, or the service itself."""

    async def want_images(self, request: wire.ImagesRequest) -> wire.ImagesReply:
        """See the request."""

    async def commit_image(self, request: wire.CommitRequest) -> wire.ImageState:
        """See the request."""


class FarmImages:
    """See the module. ``tasks`` keeps what goes on in the background."""

    def __init__(self, client: ImageSource, tasks: TaskSet) -> None:
        self._client = client
        self._tasks = tasks
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._resolved: dict[str, wire.ImageRef] = {}
        self._references: dict[str, str] = {}
        """By digest: where the image comes from."""
        self._problems: dict[str, _Problem] = {}
        """By reference: what fails while it is being resolved."""

    async def resolve(self, reference: str, patience_s: float | None = None) -> wire.ImageRef:
        """The image that a reference means in this run; the first time, a node of the farm fetches it.

        It takes as long as the fetch; a farm that is away is waited for. A registry that fails is logged, and asked
        again for as long as the node's keeper has patience, or for ``patience_s`` without any progress. Raises what the
        fetch failed with: BadImageError, ImageUnavailableError, ConfigError, also for an image that only this machine
        could have.
        """
        began_s = time.monotonic()
        reference = for_nodes(reference)
        while (known := self._resolved.get(reference)) is None:
            task = self._resolving.get(reference)
            if task is None:
                task = asyncio.create_task(self._resolve(reference), name=f"resolve {reference}")
                self._resolving[reference] = task
                task.add_done_callback(functools.partial(self._over, reference))
            await asyncio.wait((task,), timeout=_LOOK_S)
            if task.done():
                task.result()
            elif patience_s is not None and (problem := self._problems.get(reference)) is not None and problem.words:
                waited_s = time.monotonic() - max(began_s, problem.since_s)
                if waited_s >= patience_s:
                    raise ImageUnavailableError(
                        f"{reference} was not fetched within {waited_s:.0f} s: {problem.words}",
                        next_step="see that the registry can be reached from the nodes, or wait longer "
                        "(start_timeout_s)",
                    )
        return known

    def reference(self, digest: str) -> str:
        """Where an image comes from that was resolved here; empty: that is not known."""
        return self._references.get(digest, "")

    def problem(self, reference: str) -> str:
        """Why a reference that is being resolved is not there yet; empty: nothing has failed."""
        known = self._problems.get(for_nodes(reference))
        return "" if known is None else known.words

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
        self._learn(made.reference, made)
        return made

    def _learn(self, reference: str, image: wire.ImageRef) -> None:
        self._resolved[reference] = image
        self._references[image.digest] = image.reference

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

        self._learn(reference, await self._followed(ask, lambda state: self._note(reference, state)))

    def _note(self, reference: str, state: wire.ImageState) -> None:
        """How far the fetch of a reference has come."""
        if not state.problem:
            self._problems[reference] = _Problem("", time.monotonic())
            return
        before = self._problems.get(reference, _Problem("", 0.0))
        if state.problem != before.words:
            logger.warning("%s is waited for: %s", reference, state.problem)
            self._problems[reference] = _Problem(state.problem, before.since_s)

    async def _followed(
        self, ask: Callable[[], Awaitable[wire.ImageState]], note: Callable[[wire.ImageState], None] = lambda _: None
    ) -> wire.ImageRef:
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
            note(state)

    def _over(self, reference: str, task: asyncio.Task[None]) -> None:
        del self._resolving[reference]
        self._problems.pop(reference, None)
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
