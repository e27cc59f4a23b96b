"""How much memory a task may have in a farm of this process, which is made before its tasks are known."""

from __future__ import annotations

import os

from agentenv.wire.spec import MIB


def this_machines_mib() -> int:
    """All that this machine has: what a task asks for is its own limit, and what exceeds that is killed in its slot."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MIB


def local_limits(backend: str) -> dict[str, int]:
    """Fields of ``limits`` with which slots with images of a ``local`` backend may have so much. A cluster reserves
    what its slots may have, so it keeps its settings' own."""
    return {"max_memory_bytes": this_machines_mib() * MIB} if backend == "local" else {}
