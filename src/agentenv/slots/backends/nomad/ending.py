"""Ending a job: stop it, wait for its containers, and only then purge it."""

from __future__ import annotations

import asyncio

from agentenv.deadlines import scaled
from agentenv.errors import SandboxUnavailableError
from agentenv.slots.backends.nomad.api import NomadApi

_END_TIMEOUT_S = scaled(90.0)
_LOOK_S = 0.1


async def end_job(api: NomadApi, *, within_s: float = _END_TIMEOUT_S) -> None:
    """Stop the job of ``api``, wait for its containers to end, then purge it. Its token stays.

    Raises SandboxUnavailableError when they have not ended in time (the job is then stopped, but still registered);
    NomadError.
    """
    await api.deregister(purge=False)
    left = 0
    try:
        async with asyncio.timeout(within_s):
            while left := await api.left_over():  # noqa: ASYNC110 - Nomad is asked
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise SandboxUnavailableError(
            f"{left} allocations of {api.settings.job_id} are still running after {within_s:g} s",
            next_step="see `nomad node status`: a client that is down reports nothing; then `agentenv gc`",
        ) from None
    await api.deregister(purge=True)
