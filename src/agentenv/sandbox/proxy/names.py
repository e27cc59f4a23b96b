"""Addresses of host names, looked up in threads. Each slot has its own bounds, so none waits for another's names."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

from agentenv.wire.addresses import Address

Lookup = Callable[[str], list[str]]
"""The addresses of a host name, as text. Blocks; raises OSError."""

LOOKUPS_AT_ONCE: Final = 4
"""Of one slot."""
_CACHED_S: Final = 10.0
_MAX_CACHED: Final = 256
_MOST_ADDRESSES: Final = 8


def system_lookup(name: str) -> list[str]:
    """As this machine resolves names: ``/etc/hosts``, then DNS. Raises OSError."""
    addresses = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return list(dict.fromkeys(str(entry[4][0]) for entry in addresses))


class Names:
    """The names of one slot: one lookup at a time of each, kept for 10 s."""

    def __init__(self, lookup: Lookup, threads: Executor) -> None:
        self._lookup = lookup
        self._threads = threads
        self._places = asyncio.Semaphore(LOOKUPS_AT_ONCE)
        self._asking: dict[str, asyncio.Task[list[Address]]] = {}
        self._cache: dict[str, tuple[float, list[Address]]] = {}

    async def addresses(self, name: str) -> list[Address]:
        """At most 8 addresses in the resolver's order. Raises OSError when there are none."""
        loop = asyncio.get_running_loop()
        until_s, addresses = self._cache.get(name, (0.0, []))
        if loop.time() < until_s:
            return addresses
        task = self._asking.get(name)
        if task is None:
            task = self._asking[name] = loop.create_task(self._ask(name))
            task.add_done_callback(lambda ended: self._answered(name, ended))
        return await asyncio.shield(task)

    def close(self) -> None:
        """Abandon running lookups; threads that wait for an answer end by themselves."""
        for task in self._asking.values():
            task.cancel()

    async def _ask(self, name: str) -> list[Address]:
        async with self._places:
            texts = await asyncio.get_running_loop().run_in_executor(self._threads, self._lookup, name)
        if not texts:
            raise OSError("it has no address")
        return [ipaddress.ip_address(text.partition("%")[0]) for text in texts[:_MOST_ADDRESSES]]

    def _answered(self, name: str, ended: asyncio.Task[list[Address]]) -> None:
        del self._asking[name]
        if ended.cancelled() or ended.exception() is not None:
            return
        if len(self._cache) >= _MAX_CACHED:
            del self._cache[next(iter(self._cache))]
        self._cache.pop(name, None)
        self._cache[name] = (asyncio.get_running_loop().time() + _CACHED_S, ended.result())
