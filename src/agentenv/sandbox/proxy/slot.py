"""The connections of one slot: accepted up to a number, closed when its policy no longer allows them."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Final

from agentenv.background import report_failure
from agentenv.errors import ConfigError
from agentenv.sandbox.proxy.connection import Connection, Deadlines, Gate
from agentenv.sandbox.proxy.names import Lookup, Names
from agentenv.sandbox.proxy.packets import Counts
from agentenv.sandbox.proxy.streams import Stream
from agentenv.wire.addresses import Network
from agentenv.wire.network import NetworkPolicy

_MOST_CONNECTIONS: Final = 256
"""Of one slot; further ones wait in its listener's backlog."""
_MOST_IN_ALL: Final = 4096
"""Of a container's slots: about 0.5 GiB if each holds a full chunk in both directions."""
_LEAST_CONNECTIONS: Final = 4
_OWN_DESCRIPTORS: Final = 128
_PAUSE_S: Final = 0.1


def connections_per_slot(slots: int, open_files: int) -> int:
    """How many connections each of ``slots`` slots may have at once: its share, which no other can take. Each takes
    two of its process's descriptors. Raises ConfigError when the limit of open files is too low."""
    share = min(_MOST_CONNECTIONS, max(_LEAST_CONNECTIONS, _MOST_IN_ALL // slots), (open_files - _OWN_DESCRIPTORS) // 2)
    if share < _LEAST_CONNECTIONS:
        needed = _OWN_DESCRIPTORS + 2 * _LEAST_CONNECTIONS
        raise ConfigError("slots", f"a slot's proxy needs {needed} open files, {open_files} are allowed")
    return share


@dataclass(frozen=True)
class Resources:
    """What the connections of a slot share."""

    lookup: Lookup
    threads: Executor
    closed: Callable[[], list[Network]]
    connections: int = _MOST_CONNECTIONS
    deadlines: Deadlines = field(default_factory=Deadlines)


class SlotConnections:
    """Serves one listening socket, which it owns, until :meth:`aclose`."""

    def __init__(self, slot: int, listener: socket.socket, policy: NetworkPolicy, resources: Resources) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._deadlines = resources.deadlines
        names = Names(resources.lookup, resources.threads)
        self._gate = Gate(policy, names, resources.closed, Counts(), resources.deadlines)
        self._places = asyncio.Semaphore(resources.connections)
        self._serving: dict[asyncio.Task[None], Connection] = {}
        self._upkeep = [
            asyncio.create_task(self._accept(), name=f"connections of slot {slot}"),
            asyncio.create_task(self._close_idle(), name=f"idle connections of slot {slot}"),
        ]
        for task in self._upkeep:
            task.add_done_callback(report_failure)

    @property
    def counts(self) -> Counts:
        """A copy of the counts so far."""
        return dataclasses.replace(self._gate.counts, open=len(self._serving))

    async def change(self, policy: NetworkPolicy) -> None:
        """Judge by ``policy`` from now on. Returns when the connections that it does not allow are closed."""
        self._gate.policy = policy
        ending = [task for task, connection in self._serving.items() if not connection.allowed()]
        self._gate.counts.refused += len(ending)
        await _cancelled(ending)

    async def aclose(self) -> None:
        """Close the listener and every connection. Repeatable."""
        await _cancelled([*self._upkeep, *self._serving])
        self._gate.names.close()
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._places.acquire()
            try:
                client, _ = await loop.sock_accept(self._listener)
                self._begin(client)
            except OSError:  # short of descriptors or memory, or the client has closed already
                self._places.release()
                await asyncio.sleep(_PAUSE_S)
            await asyncio.sleep(0)  # a slot that floods us has one turn like everybody else

    def _begin(self, client: socket.socket) -> None:
        try:
            connection = Connection(Stream.accepted(client), self._gate)
        except OSError:
            client.close()
            raise
        self._gate.counts.connections += 1
        task = asyncio.create_task(connection.serve())
        self._serving[task] = connection
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._serving[task]
        self._places.release()
        report_failure(task)

    async def _close_idle(self) -> None:
        idle_s = self._deadlines.idle_s
        while True:
            await asyncio.sleep(idle_s / 4)
            before_s = asyncio.get_running_loop().time() - idle_s
            await _cancelled([task for task, connection in self._serving.items() if connection.moved_s < before_s])


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
