"""A plain slot: its workspace is a tmpfs of its own, its root the container's template, under bubblewrap.

After a checkpoint, and when it begins with one, its workspace is an overlay above frozen ones, or a copy of one.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
from functools import partial
from pathlib import Path

from agentenv.errors import CheckpointError, ConfigError
from agentenv.sandbox.supervisor import attest, child, mounts, slot_process, syscalls
from agentenv.sandbox.supervisor.checkpoints import MAX_LAYERS, Checkpoint, Checkpoints, Packed
from agentenv.sandbox.supervisor.isolation import AGENT_FD, MAX_TERMINALS, UNUSED_ID, USER, bwrap_argv
from agentenv.sandbox.supervisor.limits import OWN_PROCESSES, CgroupPlan
from agentenv.sandbox.supervisor.reaper import Reaper
from agentenv.sandbox.supervisor.slot_process import INFO_FD, SlotProcess, SlotSetup
from agentenv.sandbox.supervisor.slottar import run_slottar
from agentenv.sandbox.supervisor.user_namespace import OneId
from agentenv.sandbox.supervisor.workspace_layers import UPPER, LayeredWorkspace

_STDIN, _STDOUT = 0, 1


class PlainSlot:
    """Implements :class:`agentenv.sandbox.supervisor.slot_process.SlotKind`."""

    views = ()

    def __init__(
        self,
        setup: SlotSetup,
        slot: int,
        reaper: Reaper,
        origin: Checkpoint | Packed | None = None,
        workdir: str = "",
    ) -> None:
        """``origin``: the workspace that it begins with; None: an empty one. ``workdir``: see RootSpec."""
        self._setup = setup
        self._slot = slot
        self._reaper = reaper
        self.workdir = workdir
        self._packed = origin if isinstance(origin, Packed) else None
        self._begins_above = self._layers = origin.layers if isinstance(origin, Checkpoint) else ()
        self._holding = False
        """Whether the layers are held for it."""

    @property
    def plan(self) -> CgroupPlan | None:
        """See SlotKind."""
        return self._setup.plan(self._slot)

    @property
    def _uid(self) -> int:
        return self._setup.identity.slot_uid(self._slot)

    @property
    def _place(self) -> Path:
        return self._setup.tree.workspace(self._slot)

    @property
    def _layered(self) -> LayeredWorkspace:
        parts = self._setup.tree.workspace_parts(self._slot)
        return LayeredWorkspace(self._place, parts, self._setup.root_launcher, self._reaper)

    async def prepare(self) -> None:
        """Mount a new workspace: an empty one, or that of its origin."""
        if self._layers:
            assert self._setup.checkpoints is not None
            self._setup.checkpoints.hold(self._layers)
            self._holding = True
            await self._lay()
            return
        limits, place = self._setup.spec.limits, self._place
        under = place.stat().st_dev
        mounts.mount_tmpfs(
            place, size_bytes=limits.workspace_bytes, mode=0o700, uid=self._uid, inodes=limits.workspace_inodes
        )
        fresh = os.statvfs(place)
        if place.stat().st_dev == under or fresh.f_bfree != fresh.f_blocks:
            raise OSError(f"the workspace of slot {self._slot} is not a fresh, empty mount")
        if self._packed is not None:
            with self._packed.tar.open("rb") as tar:
                await _unpack(self._setup, self._slot, self.plan, self._reaper, tar.fileno())
            self.reopen()

    async def _lay(self) -> None:
        limits = self._setup.spec.limits
        await self._layered.mount(
            self._layers, self._uid, size_bytes=limits.workspace_bytes, inodes=limits.workspace_inodes
        )
        self.reopen()

    def reopen(self) -> None:
        """See that its owner may enter a kept workspace: after a ``chmod 000 .`` by the slot's own commands bwrap could
        not, which would look like an infrastructure failure."""
        place = self._setup.tree.workspace(self._slot)
        with syscalls.file_access_as(self._uid):  # as its owner: CAP_FOWNER may be missing
            mode = stat.S_IMODE(place.stat().st_mode)
            if mode & stat.S_IRWXU != stat.S_IRWXU:
                place.chmod(mode | stat.S_IRWXU)

    def checkpoint_refusal(self, checkpoints: Checkpoints) -> ConfigError | None:
        """See SlotKind."""
        return checkpoints.refusal(self._setup.tree.workspace(self._slot))

    async def freeze(self, checkpoints: Checkpoints, name: str) -> None:
        """Freeze the workspace as a layer and continue above it; where that would not be exact, copy it."""
        exact = len(self._layers) < MAX_LAYERS and not (self._layers and self._layered.has_changed_links)
        if not checkpoints.layered or not exact:
            await self._copy(checkpoints, name)
            return
        written, files = self._place, "."
        if self._layers:
            self._layered.unmount(written=False)
            written, files = self._layered.written, UPPER
        made = checkpoints.freeze(name, "", self._layers, written, OneId(self._uid), files)
        checkpoints.hold(made.layers[:1])
        self._layers, self._holding = made.layers, True
        await self._lay()

    async def _copy(self, checkpoints: Checkpoints, name: str) -> None:
        try:
            async with checkpoints.one_at_a_time:
                with checkpoints.packing(name) as file:
                    await pack_workspace(self._setup, self._slot, self._reaper, file)
        except OSError as error:  # TimeoutError is one
            reason = error.strerror or repr(error)
            if os.strerror(errno.ENOSPC) in reason:
                reason = checkpoints.no_room_for("its workspace").message
            raise CheckpointError(f"the workspace could not be copied: {reason}") from error

    def discard(self) -> None:
        """Discard the workspace."""
        if not self._layers:
            syscalls.umount(str(self._place))
            return
        self._layered.unmount()

    def give_back(self) -> list[Path]:
        """See SlotKind."""
        unneeded = []
        if self._holding and self._setup.checkpoints is not None:
            self._holding = False
            unneeded = self._setup.checkpoints.give_back(self._layers)
        self._layers = self._begins_above
        return unneeded

    async def start(self) -> SlotProcess:
        """Start bwrap. The slot's ``/dev/pts`` is mounted outside until bwrap has bound it into the slot, where it
        then exists as long as the slot."""
        place = self._setup.tree.slot_terminals(self._slot)
        mounts.mount_terminals(place, MAX_TERMINALS)
        try:
            running = await slot_process.start(
                partial(_spawn, self._setup, self._slot, self.workdir), self._slot, self.plan, self._reaper
            )
        finally:
            syscalls.umount(str(place), syscalls.MNT_DETACH)
        if self._setup.identity.mode == USER:
            # Only now, inside the slot's own user namespace, does it count only the slot's processes.
            processes = self._setup.spec.limits.processes + OWN_PROCESSES
            resource.prlimit(running.agent_pid, resource.RLIMIT_NPROC, (processes, processes))
        return running


def _spawn(setup: SlotSetup, slot: int, workdir: str, agent_fd: int, info_fd: int, error_fd: int) -> int:
    """Start slotlaunch, which applies the slot's limits and identity and becomes bwrap; returns its pid."""
    identity, limits = setup.identity, setup.spec.limits
    rlimits = slot_process.rlimits(setup, limits.processes, limits.memory_bytes)
    steps = slot_process.first_steps(setup.launcher, setup.plan(slot), rlimits)
    privileged = identity.mode != USER
    if privileged:
        steps += ["-n", str(identity.slot_uid(slot)), str(identity.slot_gid(slot)), str(UNUSED_ID)]
    command = bwrap_argv(
        setup.bwrap,
        setup.tree.root,
        setup.tree.workspace(slot),
        setup.tree.slot_terminals(slot),
        limits,
        INFO_FD,
        [file for file in attest.COVERED_FILES if file.startswith("/proc/") and Path(file).exists()],
        namespace_given=privileged,
        workdir=workdir,
    )
    return child.spawn([*steps, "--", *command], {AGENT_FD: agent_fd, INFO_FD: info_fd}, error_fd)


async def pack_workspace(setup: SlotSetup, slot: int, reaper: Reaper, target: int) -> None:
    """Write the slot's workspace, whole, as a tar to a file. Its memory counts as the container's. Raises
    CopyError, OSError, TimeoutError."""
    await _slottar(setup, slot, None, reaper, "pack-whole", {_STDOUT: target})


async def _unpack(setup: SlotSetup, slot: int, plan: CgroupPlan | None, reaper: Reaper, source: int) -> None:
    """Put what :func:`pack_workspace` wrote into the slot's workspace, which is empty. Its memory counts as the slot's.
    Raises as that."""
    await _slottar(setup, slot, plan, reaper, "unpack-whole", {_STDIN: source})


async def _slottar(
    setup: SlotSetup, slot: int, plan: CgroupPlan | None, reaper: Reaper, what: str, descriptors: dict[int, int]
) -> None:
    """Run slottar as the slot's user, outside of the slot: no process of it may be running."""
    steps = slot_process.first_steps(setup.launcher, plan, {})
    if setup.identity.mode != USER:
        steps += ["-u", str(setup.identity.slot_uid(slot)), str(setup.identity.slot_gid(slot))]
    program = setup.tree.root / "run/agentenv/slottar"
    await run_slottar([*steps, "--", str(program), what, str(setup.tree.workspace(slot))], descriptors, reaper)
