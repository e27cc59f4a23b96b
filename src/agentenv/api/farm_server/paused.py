"""What was paused in a farm's containers. They keep it; the farm asks them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Final

from agentenv.errors import AgentEnvError
from agentenv.slots.container_link import ContainerLink
from agentenv.wire.farm import PausedView

logger = logging.getLogger(__name__)

_AT_ONCE: Final = 50
"""Containers that are asked at once."""


async def paused_in(links: Mapping[str, ContainerLink]) -> list[PausedView]:
    """Of all containers that answer, in their order."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def ask(name: str, link: ContainerLink) -> list[PausedView]:
        async with room:
            try:
                reply = await link.control.paused()
            except AgentEnvError as error:
                logger.info("%s does not say what is paused there: %s", name, error)
                return []
        return [
            PausedView(
                container=name,
                trajectory=one.trajectory,
                tags=one.tags,
                root=one.root,
                paused_s=one.paused_s,
                resumed=one.resumed,
            )
            for one in reply.paused
        ]

    found = await asyncio.gather(*(ask(*link) for link in list(links.items())))
    return [one for of_container in found for one in of_container]


async def drop_paused(links: Mapping[str, ContainerLink], paused: Iterable[PausedView]) -> None:
    """Drop them. Raises InfraError."""
    for one in paused:
        if (link := links.get(one.container)) is not None:
            await link.control.drop_paused(one.root.checkpoint)
