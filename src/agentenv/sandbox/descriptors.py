"""Limits of the server's file descriptors per slot. Pure, standard library only."""

from __future__ import annotations

SERVER_DESCRIPTORS = 128
"""Descriptors for the server itself: connections, sockets, counters."""
LEAST_PER_SLOT = 32
MOST_PER_SLOT = 1024
KEPT_FOR_CALLS = 24
"""Descriptors of a slot that sessions may not use, so that a call can start however many terminals are open."""


def per_slot(limit: int, slots: int) -> int:
    """Each slot's share of a process limit of ``limit`` descriptors; less than LEAST_PER_SLOT is too few."""
    return min(MOST_PER_SLOT, max(0, limit - SERVER_DESCRIPTORS) // slots)


def needed(slots: int) -> int:
    """The lowest process limit for serving ``slots`` slots."""
    return SERVER_DESCRIPTORS + slots * LEAST_PER_SLOT
