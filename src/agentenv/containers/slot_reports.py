"""What the container of a leased slot says of it: how its image configures its programs, and what it uses."""

from __future__ import annotations

from agentenv.containers.connection import ContainerConnection
from agentenv.containers.transfer import TransferLease
from agentenv.errors import ConfigError, InfraError
from agentenv.wire.image_config import ImageConfig
from agentenv.wire.slot_metrics import SlotMetrics


async def image_config(lease: TransferLease) -> ImageConfig:
    """Raises ConfigError when the slot has no image, InfraError."""
    async with ContainerConnection(lease.container) as connection:
        path = f"/v1/slots/{lease.key.slot}/image"
        raw = await connection.request("GET", path, InfraError, ConfigError, lease=lease.key.model_dump_json())
        return connection.parsed(ImageConfig, raw)


async def slot_metrics(lease: TransferLease) -> SlotMetrics:
    """Raises InfraError, ConfigError when the key names a service that the slot does not have."""
    async with ContainerConnection(lease.container) as connection:
        path = f"/v1/slots/{lease.key.slot}/metrics"
        raw = await connection.request("GET", path, InfraError, ConfigError, lease=lease.key.model_dump_json())
        return connection.parsed(SlotMetrics, raw)
