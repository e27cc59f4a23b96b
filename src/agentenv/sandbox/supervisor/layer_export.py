"""The layers of a checkpoint as tars, each written by a process that sees its files as the slot did."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import CheckpointError, ConfigError
from agentenv.sandbox.supervisor import child
from agentenv.sandbox.supervisor.checkpoints import NOTHING_BESIDE, Checkpoints, FrozenLayer
from agentenv.sandbox.supervisor.reaper import Reaper
from agentenv.sandbox.supervisor.user_namespace import make_user_namespace

_STDOUT, _STDERR, _USER_NAMESPACE_FD = 1, 2, 5  # 5: slotroot's -u (slotagent/root/main.c)


@dataclass(frozen=True)
class LayerExport:
    """``root_program`` is slotroot, ``tar_program`` slottar (``slotagent/tar``)."""

    checkpoints: Checkpoints
    root_program: Path
    tar_program: Path
    reaper: Reaper

    async def open(self, checkpoint: str, number: int) -> tuple[int, int]:
        """A descriptor from which the tar of a checkpoint's layer is read, the lowest being 0, and how many it has. The
        tar is cut short when it cannot be written whole. Raises CheckpointError: it has a file that no layer of an
        image can have, or names that are too long; ConfigError: there is none, or the slot had services or
        volumes; OSError, SandboxUnavailableError."""
        found = self.checkpoints.find(checkpoint)
        if found.beside != NOTHING_BESIDE:
            raise ConfigError(
                "checkpoint", f"a slot with {found.beside} is no image", next_step="lease one without them"
            )
        layers = found.layers[::-1]
        if not 0 <= number < len(layers):
            raise ConfigError("layer", f"{number} of {len(layers)}")
        await self._check_names(layers[number], layers[number + 1 :])
        return await self._written(layers[number]), len(layers)

    async def _check_names(self, layer: FrozenLayer, above: Sequence[FrozenLayer]) -> None:
        directories = [str(one.files) for one in (layer, *above)]
        printed = asyncio.StreamReader()
        read, write = os.pipe()
        with os.fdopen(read, "rb", buffering=0) as file:
            try:
                pid = child.spawn([str(self.tar_program), "reserved", *directories], {_STDOUT: write}, error_fd=write)
                ended = self.reaper.watch(pid)
            finally:
                os.close(write)
            loop = asyncio.get_running_loop()
            transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(printed), file)
            with contextlib.closing(transport):
                words = (await printed.read()).decode(errors="backslashreplace")
        if await ended:
            raise CheckpointError(f"its files cannot be read: {words.strip()}")
        if words:
            raise CheckpointError(
                f"/{words} cannot be in an image: its layers delete files by names that begin with .wh.",
                next_step="remove or rename it, then try again",
            )

    async def _written(self, layer: FrozenLayer) -> int:
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
