"""Checkouts in use, and the last few others: a group's members share one, and the disk does not fill up."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from examples.swe import repositories
from examples.swe.records import SweRecord
from examples.swe.repositories import Checkout


@dataclass
class _Entry:
    directory: Path
    making: asyncio.Lock = field(default_factory=asyncio.Lock)
    checkout: Checkout | None = None
    users: int = 0


class Checkouts:
    """Makes each checkout once, on request; removes unused ones beyond ``keep``."""

    def __init__(self, repositories_dir: Path, clone_url: str = "", *, keep: int = 8) -> None:
        self._repositories = repositories_dir
        self._clone_url = clone_url
        self._keep = keep
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._cloning: dict[str, asyncio.Lock] = {}
        self._names = itertools.count()
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    async def __aenter__(self) -> Self:
        self._directory = await asyncio.to_thread(tempfile.TemporaryDirectory, prefix="agentenv-swe-")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._directory is not None:
            await asyncio.to_thread(self._directory.cleanup)

    @property
    def made(self) -> tuple[str, ...]:
        """The records with existing checkouts, the least recently used first."""
        return tuple(name for name, entry in self._entries.items() if entry.checkout is not None)

    @asynccontextmanager
    async def of(self, record: SweRecord) -> AsyncIterator[Checkout]:
        """The record's checkout; it stays at least as long as the context.

        Raises: ConfigError when the record does not fit its repository; RepositoryError.
        """
        entry = self._entries.setdefault(record.instance_id, _Entry(self._place()))
        self._entries.move_to_end(record.instance_id)
        entry.users += 1
        try:
            async with entry.making:
                if entry.checkout is None:
                    entry.checkout = await self._make(record, entry.directory)
            yield entry.checkout
        finally:
            entry.users -= 1
            await self._forget_some()

    def _place(self) -> Path:
        assert self._directory is not None, "opened as a context manager"
        return Path(self._directory.name) / f"{next(self._names)}"

    async def _make(self, record: SweRecord, target: Path) -> Checkout:
        async with self._cloning.setdefault(record.repo, asyncio.Lock()):
            repository = await asyncio.to_thread(repositories.ensure, self._repositories, record, self._clone_url)
        try:
            return await asyncio.to_thread(repositories.check_out, repository, record, target)
        except BaseException:
            await asyncio.to_thread(repositories.remove, target)
            raise

    async def _forget_some(self) -> None:
        unused = [name for name, entry in self._entries.items() if not entry.users]
        for name in unused[: max(0, len(self._entries) - self._keep)]:
            await asyncio.to_thread(repositories.remove, self._entries.pop(name).directory)
