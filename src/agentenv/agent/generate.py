"""Produces a given number of groups, several at a time; used by atropos' ``process`` command."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from agentenv.agent.group import end_all
from agentenv.errors import InfraError


class GroupSource(Protocol):
    """Produces groups: an AgentEnv."""

    curr_step: int

    async def get_next_item(self) -> Any:
        """The next item, or None."""

    async def collect_trajectories(self, item: Any) -> tuple[dict[str, Any] | None, list[Any]]:
        """A group, or None and the items to retry."""

    async def keep_group(self, group: dict[str, Any], item: Any) -> None:
        """Write a finished group to its file."""


class ProcessRun:
    """Keeps a number of groups running until enough have been written."""

    def __init__(self, env: GroupSource, wanted: int, at_once: int, give_up_after: int) -> None:
        self._env = env
        self._wanted = wanted
        self._at_once = max(1, at_once)
        self._give_up_after = give_up_after
        self._returned: list[Any] = []
        self._exhausted = False
        self._failed_in_a_row = 0

    async def run(self) -> None:
        """Run until enough groups are written. Raises: InfraError when too many groups failed in a row."""
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                while len(running) < min(self._at_once, self._wanted - self._env.curr_step):
                    item = await self._next()
                    if item is None:
                        break
                    running.add(asyncio.create_task(self._group(item)))
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            await end_all(running)

    async def _next(self) -> Any:
        if self._returned:
            return self._returned.pop(0)
        item = None if self._exhausted else await self._env.get_next_item()
        self._exhausted = self._exhausted or item is None
        return item

    async def _group(self, item: Any) -> None:
        env = self._env
        group, again = await env.collect_trajectories(item)
        self._returned.extend(again)
        if group is None:
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= self._give_up_after:
                raise InfraError(f"{self._failed_in_a_row} groups in a row had no scored member; the log says why")
            return
        self._failed_in_a_row = 0
        await env.keep_group(group, item)
        env.curr_step += 1
