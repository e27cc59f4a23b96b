"""A client and a lease of a module's ``stub``, the sandbox server without its supervisor."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from agentenv.wire.leases import LeaseKey
from tests.integration.server_client import Client
from tests.integration.server_stub import TOKEN, StubSupervisor


@pytest_asyncio.fixture(loop_scope="module")
async def client(stub: StubSupervisor) -> AsyncIterator[Client]:
    async with Client(stub.url, TOKEN) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def key(client: Client) -> AsyncIterator[LeaseKey]:
    async with client.leased() as made:
        yield made
