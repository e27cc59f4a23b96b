"""Builds the image of a Dockerfile on image slots of this machine."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.config import ContainerSettings
from agentenv.sdk.async_sandbox import AsyncFarm
from agentenv.sdk.build_machines import SlotMachines
from agentenv.store.dockerfile.build import Built, Listeners, build, load
from agentenv.store.dockerfile.cache import LayerCache
from agentenv.store.dockerfile.context import BuildContext
from agentenv.store.dockerfile.plan import Options
from agentenv.store.store import Store
from agentenv.wire.network import NetworkPolicy
from agentenv.wire.roots import RootSpec
from agentenv.wire.spec import MIB, SlotLimits

_STAGES_AT_ONCE: Final = 4
_NO_IMAGE: Final = "sha256:" + 64 * "0"
_TMP_BYTES: Final = 64 * MIB
_PUBLIC: Final = NetworkPolicy("public")


@dataclass(frozen=True)
class BuildLimits:
    """What a build may use: ``memory_mib`` includes what its steps write, which is at most ``storage_mib``."""

    memory_mib: int = 8192
    storage_mib: int = 6144
    timeout_s: float = 3600.0
    """Of each RUN."""
    network: NetworkPolicy = _PUBLIC
    """Of the commands; as with Docker, the whole of it."""


async def build_image(
    directory: Path,
    store: Store,
    *,
    file: Path | None = None,
    options: Options | None = None,
    limits: BuildLimits = BuildLimits(),
    listeners: Listeners | None = None,
) -> Built:
    """Build ``directory``'s Dockerfile (or ``file``) into the store, which has to be the one of this machine. A step
    that was built before, from the same files, is not run again.

    Raises DockerfileError (with file and line), BuildStepError when a command fails; SandboxUnavailableError when this
    machine cannot have image slots.
    """
    dockerfile = await asyncio.to_thread(load, directory, file)
    memory_bytes = limits.memory_mib * MIB
    slots = SlotLimits(memory_bytes=memory_bytes, workspace_bytes=_TMP_BYTES, tmp_bytes=_TMP_BYTES, processes=4000)
    settings = ContainerSettings(
        slots_per_container=_STAGES_AT_ONCE, limits=slots, allow_network=limits.network.kind != "none"
    )
    root = RootSpec(_NO_IMAGE, writable_bytes=limits.storage_mib * MIB, network=limits.network)
    cache = LayerCache(store.layout.directory / "builds")
    farm = AsyncFarm("local", slots=_STAGES_AT_ONCE, settings=settings, timeout_s=limits.timeout_s)
    machines = SlotMachines(farm, store, root)
    try:
        with ExitStack() as stack:
            context = await asyncio.to_thread(stack.enter_context, BuildContext(directory))
            return await build(
                dockerfile, context, machines, cache, options, listeners=listeners, timeout_s=limits.timeout_s
            )
    finally:
        await farm.close()
