"""A farm for one verb: backend, pool and executor opened together and closed in reverse."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pydantic import ValidationError

from agentenv.config import ContainerSettings, PoolSettings, explain
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.control import ContainerControl
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.calls import CallResult
from agentenv.wire.server import ServerInfo

_UPLOAD_TIMEOUT_S = 120.0


def container_settings(**fields: object) -> ContainerSettings:
    """ContainerSettings from command line options. Raises ConfigError naming the first wrong one."""
    try:
        return ContainerSettings.model_validate(fields)
    except ValidationError as error:
        raise explain(error) from None


@asynccontextmanager
async def open_executor(container: ContainerSettings) -> AsyncIterator[ToolExecutor]:
    """One local container and the way to call tools in it. Leaving stops everything it started.

    Raises SandboxUnavailableError (cause and cure named) when no container can serve here.
    """
    one = PoolSettings(min_containers=1, max_containers=1)
    async with (
        SlotPool(LocalBackend(container), one) as pool,  # it opens and closes its backend
        ToolExecutor(pool, ToolCatalog.builtin()) as executor,
    ):
        yield executor


async def describe(session: ToolSession) -> ServerInfo:
    """What the session's container says of itself: isolation, what is weaker, its proofs."""
    async with ContainerControl(session.lease.container) as control:
        return await control.info()


async def put(session: ToolSession, archive: str) -> CallResult | None:
    """Extract a base64 tar into the workspace; the result only when it did not go well."""
    result = await session.call("artifacts", {"action": "extract", "data": archive}, timeout_s=_UPLOAD_TIMEOUT_S)
    return None if result.fault == "none" and not result.exit_code else result
