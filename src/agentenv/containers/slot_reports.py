"""What the container of a leased slot says of it: how its image configures its programs, and what it uses."""

from __future__ import annotations

from typing import TypeVar

from agentenv.containers.connection import ContainerConnection
from agentenv.containers.transfer import TransferLease
from agentenv.errors import ConfigError, InfraError
from agentenv.wire.base import WireModel
from agentenv.wire.image_config import ImageConfig
from agentenv.wire.slot_metrics import SlotMetrics

Report = TypeVar("Report", bound=WireModel)


async def image_config(lease: TransferLease) -> ImageConfig:
    """Raises ConfigError when the slot has no image, InfraError."""
    return await _report(lease, "image", ImageConfig)


async def slot_metrics(lease: TransferLease) -> SlotMetrics:
    """Raises InfraError, ConfigError when the key names a service that the slot does not have."""
    return await _report(lease, "metrics", SlotMetrics)


async def _report(lease: TransferLease, name: str, report: type[Report]) -> Report:
    async with ContainerConnection(lease.container) as connection:
        path = f"/v1/slots/{lease.key.slot}/{name}"
        raw = await connection.request("GET", path, InfraError, ConfigError, lease=lease.key.model_dump_json())
        return connection.parsed(report, raw)
