"""What a leased slot uses: the reply of ``GET /v1/slots/{slot}/metrics``."""

from __future__ import annotations

from agentenv.wire.base import WireModel


class SlotMetrics(WireModel):
    """What a slot uses now, and its limits. None: the machine does not say, or sets no such limit.

    - ``memory_bytes`` is what its memory limit counts: its processes, what it has written in memory, and cached pages,
      which the kernel takes back when it needs them. ``memory_peak_bytes``: the most since the slot was made.
    - ``cpu_s``: CPU time since the slot was made.
    - ``processes``: processes and threads, agentenv's own left out.
    - ``storage_bytes``: what it has written where that is bounded: in its workspace, or with an image anywhere.
      None while the slot cannot start a program.
    """

    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    memory_limit_bytes: int | None = None
    cpu_s: float | None = None
    processes: int | None = None
    processes_limit: int | None = None
    storage_bytes: int | None = None
    storage_limit_bytes: int | None = None
