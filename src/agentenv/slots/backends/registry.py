"""Creates the backend for a name."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from agentenv.deadlines import START_TIMEOUT_S
from agentenv.errors import ConfigError, missing_extra

if TYPE_CHECKING:  # the command line lists the backends before it needs one
    from agentenv.config import ContainerSettings, NomadSettings
    from agentenv.slots.backends.base import ContainerBackend

BackendName = Literal["local", "nomad", "fake"]


class Backend(StrEnum):
    """Names of backends."""

    local = "local"
    nomad = "nomad"
    fake = "fake"


def make_backend(
    name: str,
    containers: ContainerSettings | None = None,
    *,
    nomad: NomadSettings | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
    reshape: bool = False,
    field: str = "tool_pool_mode",
) -> ContainerBackend:
    """Create the backend of that name, not opened yet. ``nomad`` (from the environment by default) and ``reshape``
    (running containers with another number of slots may be replaced) apply to the Nomad backend only.

    Raises ConfigError, which names ``field``: there is no such backend, or its settings are wrong.
    """
    # Imported when requested: each needs packages that users of the others may not have.
    match name:
        case "local":
            from agentenv.slots.backends.local import LocalBackend

            return LocalBackend(containers, start_timeout_s=start_timeout_s)
        case "nomad":
            try:
                from agentenv.image import ensure_image
                from agentenv.slots.backends.nomad.backend import NomadBackend
            except ModuleNotFoundError as error:
                raise missing_extra(f"{field}: nomad", error) or error from None

            return NomadBackend(
                containers, nomad, start_timeout_s=start_timeout_s, reshape=reshape, ensure_image=ensure_image
            )
        case "fake":
            from agentenv.slots.backends.fake import FakeBackend

            return FakeBackend(containers)
    raise ConfigError(field, f"got {name!r}", next_step=f"allowed: {', '.join(Backend)}")
