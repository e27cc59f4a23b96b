"""User namespaces for image slots, made before a lease waits for one: each has ids of its own, nothing lives in it.

A slot that takes one has it for itself; no namespace is given twice.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.errors import SandboxUnavailableError
from agentenv.sandbox.supervisor.id_ranges import ClaimedRange, IdRanges
from agentenv.sandbox.supervisor.reaper import Reaper
from agentenv.sandbox.supervisor.user_namespace import make_user_namespace

log = logging.getLogger(__name__)

READY: Final = 2
"""Kept ready: leases come singly, or so many at once that a few ready ones would change little."""


@dataclass(frozen=True)
class Namespace:
    """A range of ids, and a descriptor of the user namespace that they are mapped in."""

    range: ClaimedRange
    fd: int

    def close(self) -> None:
        """Give both back; no process and no file of them may be left."""
        os.close(self.fd)
        self.range.release()


class ReadyNamespaces:
    """See the module. ``program`` is slotroot."""

    def __init__(self, program: Path, ranges: IdRanges, reaper: Reaper) -> None:
        self._program = program
        self._ranges = ranges
        self._reaper = reaper
        self._ready: deque[Namespace] = deque()
        self._making: asyncio.Task[None] | None = None

    async def take(self, *, nested: bool) -> Namespace:
        """One of the caller's own; ``nested``: user namespaces may be made in it. Raises SandboxUnavailableError,
        OSError."""
        if self._ready and not nested:
            return self._ready.popleft()
        return await self._make(nested=nested)

    def refill(self) -> None:
        """Make what is missing, in the background."""
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(self._fill(), name="namespaces")

    async def _fill(self) -> None:
        try:
            while len(self._ready) < READY:
                self._ready.append(await self._make(nested=False))
        except (OSError, SandboxUnavailableError) as error:  # the next start makes its own, and reports the failure
            log.warning("creating a user namespace in advance failed: %s", error)

    async def _make(self, *, nested: bool) -> Namespace:
        claimed = self._ranges.claim()
        try:
            return Namespace(
                claimed, await make_user_namespace(self._program, claimed.ids, self._reaper, nested=nested)
            )
        except BaseException:
            claimed.release()
            raise
