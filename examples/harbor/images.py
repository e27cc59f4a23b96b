"""Images of tasks: those of Dockerfiles are built here, each once, with the network that slots may have."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agentenv.errors import TaskError
from agentenv.sdk.image_builds import BuildLimits, build_image
from agentenv.sdk.roots import store_directory
from agentenv.store import Store
from agentenv.store.reference import parse
from agentenv.wire.network import NO_NETWORK, NetworkPolicy


class TaskImages:
    """What references of tasks stand for, however many rollouts ask at once. A failed build is tried again by the next
    who asks; the steps before the one that failed are kept."""

    def __init__(self, *, network: bool) -> None:
        """``network``: whether commands of Dockerfiles have one."""
        self._limits = BuildLimits(network=NetworkPolicy("public") if network else NO_NETWORK)
        self._digests: dict[str, str] = {}
        self._asked: dict[str, asyncio.Lock] = {}

    async def of(self, reference: str, timeout_s: float) -> str:
        """The digest of a Dockerfile's image; any other reference as it is.

        Raises: TaskError when the build takes longer than ``timeout_s``, and what ``build_image`` raises.
        """
        named = parse(reference)
        if named.kind != "dockerfile":
            return reference
        async with self._asked.setdefault(reference, asyncio.Lock()):
            if reference not in self._digests:
                self._digests[reference] = await self._built(Path(named.name), timeout_s)
        return self._digests[reference]

    async def _built(self, directory: Path, timeout_s: float) -> str:
        store = await asyncio.to_thread(Store.open, store_directory())
        try:
            async with asyncio.timeout(timeout_s):
                return (await build_image(directory, store, limits=self._limits)).image
        except TimeoutError:
            raise TaskError(
                f"building {directory} takes more than {timeout_s:g} s",
                next_step="raise environment.build_timeout_sec: the steps that were finished are kept",
            ) from None
