"""The layers of a checkpoint as tars, each written by a process that sees its files as the slot did."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import ConfigError
from agentenv.sandbox.supervisor import child
from agentenv.sandbox.supervisor.checkpoints import Checkpoints, Frozen
from agentenv.sandbox.supervisor.reaper import Reaper
from agentenv.sandbox.supervisor.user_namespace import make_user_namespace

log = logging.getLogger(__name__)

_STDOUT, _STDERR, _USER_NAMESPACE_FD = 1, 2, 5


@dataclass(frozen=True)
class LayerExport:
    """``root_program`` is slotroot, ``tar_program`` slottar (``slotagent/tar``)."""

    checkpoints: Checkpoints
    root_program: Path
    tar_program: Path
    reaper: Reaper

    async def open(self, checkpoint: str, number: int) -> tuple[int, int]:
        """A descriptor from which the tar of a checkpoint's layer is read, the lowest being 0, and how many it has. The
        tar is cut short when it cannot be written whole. Raises ConfigError: there is none; OSError,
        SandboxUnavailableError."""
        layers = self.checkpoints.find(checkpoint).layers
        if not 0 <= number < len(layers):
            raise ConfigError("layer", f"{number} of {len(layers)}")
        return await self._written(layers[-1 - number]), len(layers)

    async def _written(self, layer: Frozen) -> int:
        namespace = await make_user_namespace(self.root_program, layer.ids, self.reaper)
        read, write = os.pipe()
        try:
            pid = child.spawn(
                [str(self.tar_program), "layer", str(layer.ids.first), str(layer.files)],
                {_STDOUT: write, _USER_NAMESPACE_FD: namespace},
                error_fd=_STDERR,
            )
            self.reaper.watch(pid)
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
            os.close(namespace)
        return read
