"""What a slot is made of, by kind: a plain slot under bubblewrap, or an image slot with a root of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from agentenv.errors import ConfigError
from agentenv.sandbox.control_protocol import SlotView
from agentenv.sandbox.supervisor.checkpoints import Checkpoints
from agentenv.sandbox.supervisor.limits import CgroupPlan
from agentenv.sandbox.supervisor.slot_process import SlotProcess


class SlotKind(Protocol):
    """The files, namespaces and first process of one slot. Each method raises OSError or SandboxUnavailableError."""

    @property
    def plan(self) -> CgroupPlan | None:
        """Its cgroup; None where there are none."""

    @property
    def uid(self) -> int:
        """The uid outside of the slot that owns its namespaces."""

    @property
    def view(self) -> SlotView | None:
        """What the server has to know of it; None: it is as every plain slot."""

    async def prepare(self) -> None:
        """Make its files, new and empty."""

    def reopen(self) -> None:
        """Its files are kept: what its own programs did to them must not keep a new start out."""

    def unfit_to_freeze(self, checkpoints: Checkpoints) -> ConfigError | None:
        """Why its files cannot be kept as a checkpoint; None if, as far as can be told now, they can."""

    async def freeze(self, checkpoints: Checkpoints, name: str) -> None:
        """Keep its files as a checkpoint, and go on with the same. No process may be left. Raises CheckpointError when
        it goes on without one."""

    async def start(self) -> SlotProcess:
        """Start its agent over the prepared files; returns after the agent's HELLO. What was started for a failed
        start is killed."""

    def discard(self) -> None:
        """Remove its files. May take long: call it in a thread. EINVAL: there are none. EBUSY: something uses them."""

    def give_back(self) -> list[Path]:
        """Its files are gone: what else it had is others' to use. Returns layers of checkpoints that nobody needs now,
        to be unmounted."""
