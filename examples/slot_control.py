"""What a verifier does to its slot as a whole, beside the tools: by the routes of the slot's container."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentenv import ToolContext
from agentenv.containers.control import ContainerControl
from agentenv.containers.http import open_session
from agentenv.wire.leases import LeaseKey


@asynccontextmanager
async def controlled(exec_tool: ToolContext) -> AsyncIterator[tuple[ContainerControl, LeaseKey]]:
    """The container of the slot, and the key of its lease there."""
    async with exec_tool.lease_for_transfer() as lease, open_session() as http:
        yield ContainerControl(lease.container, http), lease.key
