"""Images of an environment's items: the roots of their slots, and fetching those of the next items ahead of need."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from agentenv.agent.hooks import call_hook
from agentenv.errors import AgentEnvError, TaskError
from agentenv.sdk.images import StoredImages
from agentenv.sdk.roots import ImageRoot
from agentenv.wire.roots import RootSpec

AHEAD: Final = 16
"""Items that are drawn before they are needed, where their images are fetched by a farm."""


@dataclass(frozen=True)
class RootsOf:
    """Makes what ``task_image`` returned the root of a slot. Raises TaskError; else as ``StoredImages.root``."""

    images: StoredImages

    async def __call__(self, image: object) -> RootSpec:
        """See the class."""
        if not isinstance(image, (str, ImageRoot)):
            raise TaskError(f"task_image returned {image!r}", next_step="allowed: a reference, an ImageRoot, None")
        return await self.images.root(ImageRoot(image) if isinstance(image, str) else image)


class ItemsAhead:
    """The items that ``draw`` gives, in its order, drawn up to ``ahead`` of them early so that their images are fetched
    while the present ones run. ``draw`` gives None when there are no more."""

    def __init__(
        self,
        draw: Callable[[], Awaitable[Any]],
        image_of: Callable[[Any], Any],
        prefetch: Callable[[Iterable[str]], None],
        *,
        ahead: int = AHEAD,
    ) -> None:
        """``image_of``: the hook ``task_image``. ``prefetch`` returns at once."""
        self._draw = draw
        self._image_of = image_of
        self._prefetch = prefetch
        self._ahead = ahead
        self._drawn: deque[Any] = deque()
        self._turn = asyncio.Lock()

    async def next(self) -> Any:
        """The next item; None if there are no more. Each call draws one more than it returns until ``ahead`` are
        there, so that not even the first one waits for many."""
        async with self._turn:
            for _ in range(2):
                if len(self._drawn) <= self._ahead and (item := await self._draw()) is not None:
                    self._drawn.append(item)
                    await self._announce(item)
            return self._drawn.popleft() if self._drawn else None

    async def _announce(self, item: Any) -> None:
        try:
            image = await call_hook("task_image", self._image_of, item)
        except AgentEnvError:  # its rollouts meet it again, and report it
            return
        if isinstance(image, (str, ImageRoot)):
            self._prefetch([image if isinstance(image, str) else image.image])
