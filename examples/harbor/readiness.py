"""Waits for a task's healthcheck, as Harbor and Docker do, before the agent begins."""

from __future__ import annotations

import asyncio
import time

from agentenv import ToolContext
from agentenv.errors import TaskError
from examples.harbor.task import Healthcheck


async def until_healthy(exec_tool: ToolContext, check: Healthcheck, *, user: str | None) -> None:
    """Run the check until it succeeds. Failures count after the start period, and ``retries`` of them in a row are too
    many. Raises TaskError then; InfraError."""
    counted_from_s = time.monotonic() + check.start_period_s
    failures = 0
    while True:
        counts = time.monotonic() >= counted_from_s
        done = await exec_tool.terminal(check.command, check.timeout_s, user=user)
        if done.exit_code == 0 and not done.timed_out:
            return
        failures += counts
        if failures >= check.retries and counts:
            said = (done.stderr or done.stdout).strip()[-300:]
            raise TaskError(f"environment.healthcheck failed {failures} times: {check.command}: {said}")
        await asyncio.sleep(check.interval_s if counts else check.start_interval_s)
