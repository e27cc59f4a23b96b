"""What the slots of a task are made from: the hook ``task_image``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from agentenv.agent.hooks import call_hook
from agentenv.errors import TaskError
from agentenv.sdk.roots import ImageRoot, stored
from agentenv.wire.roots import RootSpec

TaskImage = Callable[[Any], ImageRoot | str | Awaitable[ImageRoot | str | None] | None]


async def root_of_task(task_image: TaskImage, item: Any) -> RootSpec | None:
    """The root that the hook names for this item, its image fetched into this machine's store; None: plain slots.

    Raises: TaskError when the hook failed or returned something else; ConfigError, BadImageError for what is no image;
    InfraError when it cannot be fetched.
    """
    named: object = await call_hook("task_image", task_image, item)
    if named is None:
        return None
    if not isinstance(named, (ImageRoot, str)):
        raise TaskError(f"task_image returned {type(named).__name__}", next_step="return a name, an ImageRoot or None")
    return await stored(ImageRoot(named) if isinstance(named, str) else named)
