"""How many of the server's file descriptors one slot may hold. Pure, standard library only."""

from __future__ import annotations

SERVER_DESCRIPTORS = 128
"""The server's own: connections, sockets, counters. Never a slot's."""
LEAST_PER_SLOT = 32
MOST_PER_SLOT = 1024
KEPT_FOR_CALLS = 24
"""Of a slot's, so many are not for its sessions: a call can be begun however many terminals are open."""


def per_slot(limit: int, slots: int) -> int:
    """Each slot's share of a process limit of ``limit`` descriptors; less than LEAST_PER_SLOT is too little."""
    return min(MOST_PER_SLOT, max(0, limit - SERVER_DESCRIPTORS) // slots)


def needed(slots: int) -> int:
    """The lowest process limit with which ``slots`` slots can be served."""
    return SERVER_DESCRIPTORS + slots * LEAST_PER_SLOT
