"""Paths as seen by programs in a slot. Pure, standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

WORKSPACE: Final = "/workspace"
"""Name of a slot's workspace in all interfaces, wherever it is."""


@dataclass(frozen=True)
class SlotPaths:
    """Paths as the slot's own processes see them. The defaults are those of a slot with its own mounts."""

    workspace: str = WORKSPACE
    files: str = "/run/agentenv/slotfiles"
    tmux_socket: str = "/tmp/tmux.agentenv"  # noqa: S108 (the slot's own /tmp)

    def in_slot(self, path: str) -> str:
        """``path`` as a process of the slot must name it: paths below ``/workspace`` become paths below the
        workspace."""
        below = path == WORKSPACE or path.startswith(WORKSPACE + "/")
        return self.workspace + path.removeprefix(WORKSPACE) if below else path

    def slotfiles(self, operation: str, path: str, *rest: str) -> list[str]:
        """The command of one file operation."""
        return [self.files, self.workspace, operation, self.in_slot(path), *rest]


USUAL_PATHS: Final = SlotPaths()
