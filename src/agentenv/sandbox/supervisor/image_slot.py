"""An image slot: the root of an image, root inside in ids of its own, without bubblewrap.

What it writes lies in a layer of its own above the image, which is read-only and shared. The layers are put together
by the slot's own root (``slotagent/root``), with no more rights than that has.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import posixpath
from pathlib import Path
from typing import Final

from agentenv.errors import ConfigError, SandboxUnavailableError
from agentenv.sandbox.control_protocol import SlotView
from agentenv.sandbox.slot_paths import TMUX_BUNDLE
from agentenv.sandbox.supervisor import attest, child, disk_layers, mounts, slot_process, static_bash, syscalls
from agentenv.sandbox.supervisor.checkpoints import MAX_LAYERS, Checkpoints, FrozenLayer
from agentenv.sandbox.supervisor.image_mounts import ImageConfig, ImageLayer
from agentenv.sandbox.supervisor.isolation import AGENT_FD, MAX_TERMINALS, SHELL_PATH
from agentenv.sandbox.supervisor.limits import CgroupPlan
from agentenv.sandbox.supervisor.ready_namespaces import Namespace
from agentenv.sandbox.supervisor.reaper import Reaper
from agentenv.sandbox.supervisor.slot_process import INFO_FD, SlotProcess, SlotSetup
from agentenv.sandbox.supervisor.user_namespace import Ids, ImageIds, make_user_namespace
from agentenv.wire.roots import RootSpec, shm_bytes
from agentenv.wire.spec import SlotLimits

CAPABILITIES: Final = {
    "chown": 0, "dac_override": 1, "fowner": 3, "fsetid": 4, "kill": 5, "setgid": 6, "setuid": 7, "setpcap": 8,
    "net_bind_service": 10, "net_raw": 13, "sys_chroot": 18, "setfcap": 31,
}  # fmt: skip
"""Capabilities of the root of every image slot, over its own namespaces: Docker's defaults, without those that are
void in a user namespace (mknod, audit_write). ``net_raw`` is among them because Debian's ping has it as a file
capability, and the kernel does not execute ping without it. AF_PACKET, which has been a way into kernels, is refused by
the filter of system calls unless a lease requests ``net_raw``."""
EXTRA_CAPABILITIES: Final = {
    "net_admin": 12, "net_raw": 13, "sys_ptrace": 19, "sys_nice": 23, "sys_resource": 24, "mknod": 27,
    "audit_write": 29,
}  # fmt: skip
"""What a lease may request as well."""
HOSTNAME: Final = "slot"
_USER_NAMESPACE_FD: Final = 5  # slotroot's -u (slotagent/root/main.c)
_PARTS: Final = ("upper", "work", "root")


def capability_mask(extra: tuple[str, ...]) -> int:
    """The bits of the capabilities of a slot that requests these as well (linux/capability.h)."""
    return sum(1 << bit for bit in {*CAPABILITIES.values(), *(EXTRA_CAPABILITIES[name] for name in extra)})


class ImageSlot:
    """Implements :class:`agentenv.sandbox.supervisor.slot_process.SlotKind`. ``place`` is an empty directory of this
    slot's."""

    def __init__(
        self,
        setup: SlotSetup,
        slot: int,
        reaper: Reaper,
        root: RootSpec,
        place: Path,
        layers: tuple[FrozenLayer, ...] = (),
    ) -> None:
        self._setup = setup
        self._slot = slot
        self._reaper = reaper
        self._root = root
        self._place = place
        self._layers = layers
        self.policy = root.network
        """The network of its lease at present."""
        self._namespace: Namespace | None = None
        self._image: tuple[ImageLayer, ...] = ()
        self._config: ImageConfig | None = None
        self._mounted: list[Path] = []
        self._holding = False
        """Whether the layers are held for it."""
        self._bashes: dict[Path, bool] = {}
        """Which of the layers have a bash, or hide one."""

    @property
    def namespace_fd(self) -> int:
        """Its user namespace."""
        return self._own.fd

    @property
    def _own(self) -> Namespace:
        assert self._namespace is not None, "it is prepared"
        return self._namespace

    @property
    def _ids(self) -> ImageIds:
        return self._own.range.ids

    @property
    def limits(self) -> SlotLimits:
        """The container's, unless the root requests lower ones."""
        given = self._setup.spec.limits
        memory_bytes = self._root.memory_bytes or given.memory_bytes
        return dataclasses.replace(
            given,
            memory_bytes=memory_bytes,
            processes=self._root.processes or given.processes,
            workspace_bytes=1,  # not in force here: what is in memory is the writable layer
            tmp_bytes=1,
            shm_bytes=shm_bytes(given.shm_bytes, memory_bytes),
        )

    @property
    def plan(self) -> CgroupPlan | None:
        """See SlotKind."""
        return self._setup.image_plan(self._slot, self.limits, self._root.cpu_millis)

    @property
    def view(self) -> SlotView:
        """See SlotKind."""
        config = self._config or ImageConfig()
        stands_in = self._has_containers_bash(config)
        return SlotView(
            env={**config.env, **self._root.env},
            user=self._root.user or config.user,
            workdir=self.workdir,
            shell=SHELL_PATH if stands_in or not config.has_bash else "",
            stands_in=stands_in,
            tmux=TMUX_BUNDLE if self._setup.tree.has_tmux and not config.has_tmux else "",
        )

    @property
    def workdir(self) -> str:
        """See SlotKind."""
        config = self._config or ImageConfig()
        return posixpath.normpath(self._root.workdir or config.workdir or "/")

    def _has_containers_bash(self, config: ImageConfig) -> bool:
        """Whether the slot's bash is of the same build as the container's static one. One that was put in its place is
        noticed once it lies in a checkpoint; the PATH of a lease may lead to any."""
        if not config.bash_build or config.bash_build != self._setup.bash_build:
            return False
        if "PATH" in {*self._root.env, *self._setup.spec.env}:
            return False
        return not any(self._has_bash(layer, config.path) for layer in self._layers)

    def _has_bash(self, layer: FrozenLayer, path: str) -> bool:
        """Looked up once for each layer: a view is made often. A layer that cannot be read may have one."""
        if layer.files not in self._bashes:
            self._bashes[layer.files] = True
            with contextlib.suppress(OSError):
                self._bashes[layer.files] = bool(static_bash.bashes_in(layer.files, path))
        return self._bashes[layer.files]

    async def gather(self) -> None:
        """Wait until its image is there, however long that takes. Raises ImageUnavailableError,
        SandboxUnavailableError."""
        if self._setup.images is not None:
            await self._setup.images.ready(self._root.image)

    async def prepare(self) -> None:
        """Mount the writable layer and the image, its ids mapped to this slot's."""
        images, namespaces = self._setup.images, self._setup.namespaces
        if images is None or namespaces is None:
            raise SandboxUnavailableError("this container has no image store: it has plain slots only")
        self._namespace = await namespaces.take(nested=self._root.nested_namespaces)
        self._image, self._config = images.take(self._root.image)
        if not self._config.has_bash and not (self._setup.tree.root / SHELL_PATH.lstrip("/")).exists():
            raise SandboxUnavailableError(
                "the image has no bash, and this container has no statically linked one",
                next_step="apt-get install bash-static",
            )
        if self._setup.checkpoints is not None:
            self._setup.checkpoints.hold(self._layers)
            self._holding = True
        await self._lay()

    async def _lay(self) -> None:
        """The writable layer, new and empty, and below it the frozen ones and the image, each shown as the slot's."""
        await self._mount_writable()
        with syscalls.file_access_as(self._ids.first):
            for name in (*_PARTS, *self._lowers):
                (self._place / name).mkdir(mode=0o755)
        await self._show_layers()

    @property
    def _lowers(self) -> list[str]:
        """The directories that the root is made from, the upmost first."""
        image = ["image"] if len(self._image) == 1 else [f"i{number}" for number in range(len(self._image))]
        return [*(f"l{number}" for number in range(len(self._layers))), *image]

    async def _show_layers(self) -> None:
        """The frozen layers and the image; what lies under the same ids is shown by one mapping."""
        program = self._setup.root_launcher
        mappings: dict[Ids, int] = {}
        try:
            below: list[FrozenLayer | ImageLayer] = [*self._layers, *self._image]
            for name, layer in zip(self._lowers, below, strict=True):
                ids = layer.ids
                if ids is not None and ids != self._ids and ids not in mappings:
                    mappings[ids] = await make_user_namespace(program, self._ids, self._reaper, shown=ids)
                self._show(layer.files, self._place / name, self._own.fd if ids is None else mappings.get(ids))
        finally:
            for mapping in mappings.values():
                os.close(mapping)

    def checkpoint_refusal(self, checkpoints: Checkpoints) -> ConfigError | None:
        """Why what has been written cannot be kept as a checkpoint; None if it can."""
        if len(self._layers) >= MAX_LAYERS:
            return ConfigError("checkpoint", f"{MAX_LAYERS} checkpoints are below this slot already")
        if not self._on_disk:
            return checkpoints.refusal(self._place)
        assert self._setup.disk is not None
        # The layer is kept in its file, and the slot continues in another one.
        lacking = self._setup.disk.lacking(self._root.writable_bytes, self._root.writable_inodes)
        return ConfigError("checkpoint", lacking) if lacking else None

    async def freeze(self, checkpoints: Checkpoints, name: str) -> None:
        """Keep what has been written as a checkpoint, and continue above it. No process may be left. Raises
        SandboxUnavailableError when there is no new layer to continue in; OSError."""
        self._unmount_lowers()
        if self._on_disk:
            await asyncio.to_thread(disk_layers.shrink, self._place)
        checkpoint = checkpoints.freeze(
            name, self._root.image, self._layers, self._place, self._ids, "upper", in_memory=not self._on_disk
        )
        self._mounted.clear()
        checkpoints.hold(checkpoint.layers[:1])
        self._layers = checkpoint.layers
        await self._lay()

    @property
    def _on_disk(self) -> bool:
        return self._root.writable == "disk"

    async def _mount_writable(self) -> None:
        place, root = self._place, self._root
        under = place.stat().st_dev
        if not self._on_disk:
            mounts.mount_tmpfs(
                place, size_bytes=root.writable_bytes, mode=0o755, uid=self._ids.first, inodes=root.writable_inodes
            )
            self._mounted.append(place)
            fresh = os.statvfs(place)
            if fresh.f_bfree != fresh.f_blocks:
                raise OSError(f"{place} is not empty")
        else:
            assert self._setup.disk is not None
            await self._setup.disk.mount(
                place,
                size_bytes=root.writable_bytes,
                inodes=root.writable_inodes,
                uid=self._ids.first,
                reaper=self._reaper,
            )
            self._mounted.append(place)
        if place.stat().st_dev == under:
            raise OSError(f"{place} is not a fresh mount")

    def _show(self, source: Path, target: Path, namespace: int | None) -> None:
        """A mount of ``source`` at ``target``, read-only, with its ids mapped as in this user namespace."""
        copied = syscalls.copy_mount(str(source))
        try:
            syscalls.restrict_mount(copied, namespace)
            syscalls.attach_mount(copied, str(target))
        finally:
            os.close(copied)
        self._mounted.append(target)

    def reopen(self) -> None:
        """Nothing to do: the slot's own root enters it, whom no mode keeps out."""

    def discard(self) -> None:
        """Unmount the image, then the writable layer with all that was written."""
        self._unmount_lowers()
        if self._mounted:
            if self._on_disk:
                disk_layers.forget(self._place)
            syscalls.umount(str(self._place))
            self._mounted.clear()

    def give_back(self) -> list[Path]:
        """See SlotKind."""
        self._config = None
        if self._namespace is not None:
            self._namespace.close()
            self._namespace = None
        if self._holding and self._setup.checkpoints is not None:
            self._holding = False
            return self._setup.checkpoints.give_back(self._layers)
        return []

    def _unmount_lowers(self) -> None:
        """Leave the writable layer only."""
        while len(self._mounted) > 1:
            syscalls.umount(str(self._mounted[-1]))
            self._mounted.pop()

    async def start(self) -> SlotProcess:
        """Start slotroot, and see from outside that the slot is what it must be."""
        running = await slot_process.start(self._spawn, self._slot, self.plan, self._reaper)
        try:
            self._attest(running)
        except BaseException:
            await running.kill()
            raise
        if self._setup.namespaces is not None:
            self._setup.namespaces.refill()  # only now: this slot does not wait for it
        return running

    def _attest(self, running: SlotProcess) -> None:
        plan = self.plan
        want = attest.Expected(
            first_id=self._ids.first,
            maps=self._ids.maps,
            capabilities=capability_mask(self._root.capabilities),
            oom_score_adj=slot_process.victim_score(),
            lowers=tuple(self._lowers),
            shm_bytes=self.limits.shm_bytes,
            terminals=MAX_TERMINALS,
            nested=self._root.nested_namespaces,
            cgroup=plan is not None,
            outside=attest.namespaces_of("self"),
            covers=attest.expected_covers(),
        )
        groups = () if plan is None else plan.process_files
        if broken := attest.judge(attest.read(running.agent_pid, groups), want):
            raise SandboxUnavailableError(f"the slot is not what it must be: {'; '.join(broken)}")

    def _spawn(self, agent_fd: int, info_fd: int, error_fd: int) -> int:
        limits = self.limits
        rlimits = slot_process.rlimits(self._setup, limits.processes, limits.memory_bytes)
        return child.spawn(
            [
                *slot_process.first_steps(self._setup.root_launcher, self.plan, rlimits),
                *("-u", str(self._ids.first)),
                *("-k", hex(capability_mask(self._root.capabilities))),
                *("-h", HOSTNAME),
                *("-s", str(limits.shm_bytes)),
                *("-p", str(MAX_TERMINALS)),
                *("-r", str(self._setup.tree.image_programs)),
                *("-e", str(self._setup.tree.image_etc)),
                *(("-n",) if self._root.nested_namespaces else ()),
                *(("-f",) if "net_raw" in self._root.capabilities else ()),
                *("--", str(self._place), ":".join(self._lowers)),
                *("/run/agentenv/slotagent", str(AGENT_FD), "guarded", self.workdir),
            ],
            {AGENT_FD: agent_fd, INFO_FD: info_fd, _USER_NAMESPACE_FD: self._own.fd},
            error_fd,
        )
