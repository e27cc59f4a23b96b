"""Whether a started container may be used: the checks of every backend with real containers."""

from __future__ import annotations

from agentenv.config import ContainerSettings
from agentenv.slots.backends.base import StartFailed
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
