"""Produces a given number of groups, several at a time; used by atropos' ``process`` command."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Protocol

from agentenv.agent.group import PLACE, Place, end_all
from agentenv.agent.results import faults_text
from agentenv.errors import AgentEnvError, InfraError, TaskError


class GroupSource(Protocol):
    """Produces groups: an AgentEnv."""

    curr_step: int
    counts: Counter[str]
    """Among others ``fault_task``, ``fault_infra``, ...: rollouts so far that were ended by it."""

    async def get_next_item(self) -> Any:
        """The next item, or None."""

    def to_play(self, position: int, item: Any) -> bool:
        """Whether the item at this position is to be rolled out; not if an earlier process has done so."""

    async def collect_trajectories(self, item: Any) -> tuple[dict[str, Any] | None, list[Any]]:
        """A group, or None and the items to retry."""

    async def keep_group(self, group: dict[str, Any], item: Any) -> None:
        """Write a finished group to its file."""


class ProcessRun:
    """Keeps a number of groups running until enough have been written."""

    def __init__(self, env: GroupSource, wanted: int, at_once: int, give_up_after: int, log: str = "") -> None:
        self._env = env
        self._wanted = wanted
        self._at_once = max(1, at_once)
        self._give_up_after = give_up_after
        self._log = log
        self._returned: list[tuple[int, Any]] = []
        self._drawn = 0
        self._exhausted = False
        self._failed_in_a_row = 0
        self._faults_before: Counter[str] = Counter()
        """Faults up to the newest group with a score."""

    async def run(self) -> None:
        """Run until enough groups are written, or there are no more items.

        Raises: InfraError (TaskError when all the faults are the task's) when too many groups failed in a row, or
        when no group at all has a score. TaskError when there was no item.
        """
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                while len(running) < min(self._at_once, self._wanted - self._env.curr_step):
                    drawn = await self._next()
                    if drawn is None:
                        break
                    running.add(asyncio.create_task(self._group(*drawn)))
                if not running:
                    if self._failed_in_a_row and not self._env.curr_step:
                        raise self._given_up()
                    if self._exhausted and not self._env.curr_step:
                        raise no_items()
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            await end_all(running)

    async def _next(self) -> tuple[int, Any] | None:
        """The next item with its position; None if there are no more."""
        if self._returned:
            return self._returned.pop(0)
        while not self._exhausted:
            item, position = await self._env.get_next_item(), self._drawn
            self._exhausted = item is None
            self._drawn += 1
            if self._env.to_play(position, item):
                return position, item
        return None

    async def _group(self, position: int, item: Any) -> None:
        env = self._env
        PLACE.set(Place(position))  # of this task
        group, again = await env.collect_trajectories(item)
        self._returned.extend((position, each) for each in again)
        if group is None:
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= self._give_up_after:
                raise self._given_up()
            return
        self._failed_in_a_row = 0
        self._faults_before = faults_of(env.counts)
        await env.keep_group(group, item)
        env.curr_step += 1

    def _given_up(self) -> AgentEnvError:
        return nothing_scored(
            f"{self._failed_in_a_row} groups in a row had no scored member",
            faults_of(self._env.counts) - self._faults_before,
            self._log,
        )


def faults_of(counts: Counter[str]) -> Counter[str]:
    """The counts named ``fault_...``, by fault."""
    return Counter({name.removeprefix("fault_"): n for name, n in counts.items() if name.startswith("fault_")})


def no_items() -> TaskError:
    """The error that ends a command for lack of items."""
    return TaskError("get_next_item returned None at once: no items to process")


def nothing_scored(what: str, faults: Counter[str], log: str = "") -> AgentEnvError:
    """The error that ends a command for lack of scores. It is the task's only if every fault was. ``log``: the file
    with what failed, if there is one."""
    kind = TaskError if set(faults) == {"task"} else InfraError
    return kind(f"{what} (faults: {faults_text(faults)}); see {log or 'the log'}")
