"""How the image of a leased slot configures its programs, asked of the slot's container."""

from __future__ import annotations

from agentenv import errors
from agentenv.containers.connection import ContainerConnection
from agentenv.containers.transfer import TransferLease
from agentenv.wire.image_config import ImageConfig


async def image_config(lease: TransferLease) -> ImageConfig:
    """Raises ConfigError when the slot has no image, InfraError."""
    refusals = (errors.InfraError, errors.ConfigError)
    async with ContainerConnection(lease.container) as connection:
        path = f"/v1/slots/{lease.key.slot}/image"
        raw = await connection.request("GET", path, *refusals, lease=lease.key.model_dump_json())
        return connection.parsed(ImageConfig, raw)
