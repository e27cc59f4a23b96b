"""Leasing slots: ledger and scaling decide, the pool performs, backends run containers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from agentenv.exports import exported

if TYPE_CHECKING:
    from agentenv.slots.backends.base import ContainerBackend
    from agentenv.slots.backends.fake import FakeBackend
    from agentenv.slots.backends.local import LocalBackend
    from agentenv.slots.backends.nomad.backend import NomadBackend
    from agentenv.slots.lease import SlotLease
    from agentenv.slots.pool import SlotPool
    from agentenv.slots.statistics import PoolStatistics

_HOMES: Final = {
    "ContainerBackend": "agentenv.slots.backends.base",
    "FakeBackend": "agentenv.slots.backends.fake",
    "LocalBackend": "agentenv.slots.backends.local",
    "NomadBackend": "agentenv.slots.backends.nomad.backend",
    "PoolStatistics": "agentenv.slots.statistics",
    "SlotLease": "agentenv.slots.lease",
    "SlotPool": "agentenv.slots.pool",
}

__all__ = [
    "ContainerBackend",
    "FakeBackend",
    "LocalBackend",
    "NomadBackend",
    "PoolStatistics",
    "SlotLease",
    "SlotPool",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of the package's
    __getattr__, __dir__ = exported(__name__, _HOMES)
