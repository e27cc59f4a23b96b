"""Was a command killed for its memory? Told by the slot's cgroup, never by what was printed."""

from __future__ import annotations

import os
from dataclasses import dataclass

_READ_BYTES = 4096


@dataclass
class MemoryWatch:
    """The OOM counter and the peak of one slot's cgroup; silent where there is none."""

    oom_fd: int = -1
    peak_path: str | None = None

    @classmethod
    def open(cls, oom_path: str | None, peak_path: str | None) -> MemoryWatch:
        """Watch these files of the slot's cgroup (v1: ``memory.oom_control``, v2: ``memory.events``)."""
        try:
            return cls(-1 if oom_path is None else os.open(oom_path, os.O_RDONLY | os.O_CLOEXEC), peak_path)
        except OSError:
            return cls(-1, peak_path)

    def kills(self) -> int:
        """How many processes the kernel has killed here for memory; 0 where that cannot be known."""
        if self.oom_fd < 0:
            return 0
        try:
            for line in os.pread(self.oom_fd, _READ_BYTES, 0).splitlines():
                if line.startswith(b"oom_kill "):
                    return int(line[9:])
        except (OSError, ValueError):
            return 0
        return 0

    def peak_bytes(self) -> int | None:
        """The most memory the slot has used since it was made; None where that cannot be known."""
        if self.peak_path is None:
            return None
        try:
            with open(self.peak_path, "rb") as file:  # noqa: PTH123 (the hot server imports no pathlib)
                return int(file.read(64))
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """Repeatable."""
        if self.oom_fd >= 0:
            os.close(self.oom_fd)
            self.oom_fd = -1
