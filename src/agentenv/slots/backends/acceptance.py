"""Whether a started container may be used: the checks of backends with real containers."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import aiohttp

from agentenv.config import ContainerSettings
from agentenv.containers.control import ContainerControl
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import ProtocolError
from agentenv.slots.backends.base import StartFailed
from agentenv.slots.backends.fleet import StartFailedError
from agentenv.wire.server import ServerInfo

ACCEPT_USER = (
    "accept less explicitly: AGENTENV_ISOLATION=user in the environment, isolation='user' in Python, or the option "
    "--isolation user (of an environment: --env.isolation user)"
)


def unacceptable(info: ServerInfo, settings: ContainerSettings) -> StartFailed | None:
    """Why a server must not be used under these settings; None if it may. Pure."""
    if settings.isolation in ("full", "user") and info.isolation != settings.isolation:
        return StartFailed(
            f"isolation {settings.isolation!r} was requested, {info.container} provides {info.isolation!r}",
            next_step=f"run as root for 'full', or {ACCEPT_USER}",
            permanent=True,
        )
    if settings.isolation == "auto" and settings.require_sandbox and info.isolation != "full":
        weaker = f": {info.weaker[0]}" if info.weaker else ""
        return StartFailed(
            f"the sandbox of {info.container} is weaker than promised ({info.isolation!r}){weaker}",
            next_step=f"run as root, or {ACCEPT_USER}",
            permanent=True,
        )
    broken = [proof for proof in info.proofs if proof.required and not proof.holds]
    if broken:
        return StartFailed(
            f"{info.container} cannot prove {broken[0].name}: {broken[0].detail}",
            next_step=broken[0].cure,
            permanent=True,
        )
    if info.slots != settings.slots_per_container:
        return StartFailed(
            f"{info.container} has {info.slots} slots, {settings.slots_per_container} were requested",
            next_step="set slots_per_container to what the farm's containers have, or restart them",
            foreign=True,
        )
    return None


def local_handle(
    ready: Mapping[str, Any], container: str, index: int, token: str, settings: ContainerSettings
) -> ContainerHandle:
    """The address of a container on this machine, from its `ready` event."""
    return ContainerHandle(
        id=container,
        index=index,
        base_url=f"http://127.0.0.1:{ready['port']}",
        token=token,
        slots=settings.slots_per_container,
        node=socket.gethostname(),
    )


async def shake_hands(
    handle: ContainerHandle, session: aiohttp.ClientSession | None, settings: ContainerSettings, timeout_s: float
) -> None:
    """Check a container on this machine that says it is ready. Raises StartFailedError, ConnectionLostError."""
    try:
        server = await ContainerControl(handle, session).info(timeout_s=timeout_s)
    except ProtocolError as error:
        raise StartFailedError(StartFailed(error.message, error.next_step, permanent=True)) from error
    if (refused := unacceptable(server, settings)) is not None:
        raise StartFailedError(refused)
