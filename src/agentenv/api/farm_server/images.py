"""The images of a farm: what references mean, fetches ahead of need, and which images are where."""

from __future__ import annotations

import asyncio

from agentenv.errors import AgentEnvError, CheckpointError, ConfigError
from agentenv.image_placement.keepers import Keepers
from agentenv.slots.container_manager import ContainerManager
from agentenv.slots.pool_errors import unavailable_error
from agentenv.wire import images as wire
from agentenv.wire.passes import make_pass
from agentenv.wire.server import ErrorReply


class ImageService:
    """See the module. ``keepers`` is None in a farm whose clients see to images themselves."""

    def __init__(self, manager: ContainerManager, keepers: Keepers | None) -> None:
        self._manager = manager
        self._keepers = keepers

    async def want_images(self, request: wire.ImagesRequest) -> wire.ImagesReply:
        """References are resolved, by having one node fetch what they mean; images that were resolved are fetched to
        as many nodes as the farm keeps copies. Raises ConfigError without keepers."""
        if not request.references and not request.images:
            return wire.ImagesReply(images=())
        keepers = self._required()
        states = await asyncio.gather(
            *(self._resolved(keepers, reference, request.wait_s) for reference in request.references)
        )
        for image in request.images:
            keepers.remember(image.digest, image.reference)
        self._manager.prefetch(image.digest for image in request.images)
        return wire.ImagesReply(images=(*states, *map(self._ahead, request.images)))

    async def commit_image(self, request: wire.CommitRequest) -> wire.ImageState:
        """An image of a checkpoint of its run, made by the keeper of its container's node. Raises ConfigError without
        keepers."""
        keepers = self._required()
        link = self._manager.links.get(request.container)
        try:
            if link is None:
                raise CheckpointError(f"the checkpoint is in container {request.container}, which has ended")
            state = await keepers.commit(link.handle, request, make_pass(link.handle.token, request.run))
        except AgentEnvError as error:
            return wire.ImageState(wanted=request.checkpoint, state="failed", error=ErrorReply.of(error))
        if state.image is not None:
            self._manager.stored(link.handle.node, state.image.digest)
        return state

    def _required(self) -> Keepers:
        if self._keepers is None:
            raise ConfigError(
                "images",
                "are not fetched by this farm",
                next_step="set images.keeper_token_file to the token file of its keepers",
            )
        return self._keepers

    async def _resolved(self, keepers: Keepers, reference: str, wait_s: float) -> wire.ImageState:
        try:
            if not await self._has_node(keepers, wait_s):
                return wire.ImageState(wanted=reference, state="fetching", step="wait for a node")
            return await keepers.resolve(reference, wait_s, self._manager.stored)
        except AgentEnvError as error:
            return wire.ImageState(wanted=reference, state="failed", error=ErrorReply.of(error))

    async def _has_node(self, keepers: Keepers, wait_s: float) -> bool:
        """Whether a node is there to be asked; the farm starts a container to have one, even if it has scaled to none.
        Raises SandboxUnavailableError when it can have none."""
        if await keepers.known(0):
            return True
        self._manager.want_node()
        if await keepers.known(wait_s):
            return True
        if (failed := self._manager.hopeless()) is not None:
            raise unavailable_error(failed)
        return False

    def _ahead(self, image: wire.ImageRef) -> wire.ImageState:
        there = any(image.digest in stored for _, stored, _ in self._manager.ledger.placement.nodes())
        return wire.ImageState(
            wanted=image.digest, state="ready" if there else "fetching", image=image if there else None
        )

    def map(self) -> wire.ImageMap:
        """Which images are where."""
        nodes = self._manager.ledger.placement.nodes()
        return wire.ImageMap(
            nodes=tuple(
                wire.NodeImages(node=node, stored=tuple(sorted(stored)), fetching=tuple(sorted(fetching)))
                for node, stored, fetching in nodes
            )
        )
