"""Where things lie for what runs in a slot. Pure, standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

WORKSPACE: Final = "/workspace"
"""How everybody calls a slot's workspace, wherever it lies."""


@dataclass(frozen=True)
class SlotPaths:
    """As the slot's own processes see them. The defaults are those of a slot with mounts of its own."""

    workspace: str = WORKSPACE
    files: str = "/run/agentenv/slotfiles"
    tmux_socket: str = "/tmp/tmux.agentenv"  # noqa: S108 (the slot's own /tmp)

    def in_slot(self, path: str) -> str:
        """``path`` as a process of the slot has to say it: below ``/workspace`` means below the workspace."""
        below = path == WORKSPACE or path.startswith(WORKSPACE + "/")
        return self.workspace + path.removeprefix(WORKSPACE) if below else path


USUAL_PATHS: Final = SlotPaths()
