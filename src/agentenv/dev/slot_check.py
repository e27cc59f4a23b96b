"""Checks that slots work on a cluster: starts a farm of one slot, runs one command in it, removes the farm."""

from __future__ import annotations

import asyncio
import secrets

from agentenv.config import ContainerSettings, NomadSettings, PoolSettings
from agentenv.containers.control import ContainerControl
from agentenv.deadlines import scaled
from agentenv.errors import AgentEnvError, SandboxUnavailableError
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.image import IMAGE
from agentenv.slots.backends.nomad.backend import NomadBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.server import ServerInfo

_WITHIN_S = scaled(90.0)
_NAME = "agentenv-check"


def check(address: str) -> ServerInfo:
    """Run a command in a slot of a new container, and return what the container reports (``isolation``, ``proofs``, …).

    Raises SandboxUnavailableError with the reason given by Nomad or the container.
    """
    try:
        return asyncio.run(_answer(address))
    except AgentEnvError as error:
        raise SandboxUnavailableError(
            f"no slot answered: {error.message}",
            next_step=error.next_step or "see docs/nomad.md, 'When it does not start'",
        ) from error


async def _answer(address: str) -> ServerInfo:
    nomad = NomadSettings(address=address, job_id=f"{_NAME}-{secrets.token_hex(4)}", image=IMAGE, run_name=_NAME)
    container = ContainerSettings(slots_per_container=1, isolation="full")
    one = PoolSettings(max_containers=1, acquire_timeout_s=_WITHIN_S, start_timeout_s=_WITHIN_S)
    async with (
        SlotPool(NomadBackend(container, nomad, start_timeout_s=_WITHIN_S), one) as pool,
        ToolExecutor(pool, ToolCatalog.builtin()) as executor,
        executor.open(_NAME) as session,
    ):
        result = await session.call("bash", {"command": "echo $((6 * 7))"})
        if result.stdout != "42\n":
            raise SandboxUnavailableError(
                f"`echo` gave {result!r}", next_step="`agentenv doctor` says what this machine lacks"
            )
        async with ContainerControl(session.lease.container) as control:
            return await control.info()
