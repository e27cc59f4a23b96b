"""An image slot: the root of an image, root inside in ids of its own, without bubblewrap.

What it writes lies in a layer of its own above the image, which is read-only and shared. The layers are put together
by the slot's own root (``slotagent/root``), with no more rights than that has.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import Final

from agentenv.errors import ConfigError, SandboxUnavailableError
from agentenv.sandbox.control_protocol import SlotView
from agentenv.sandbox.supervisor import disk_layers, mounts, slot_process, syscalls
from agentenv.sandbox.supervisor.checkpoints import MAX_LAYERS, Beside, Checkpoints, FrozenLayer
from agentenv.sandbox.supervisor.limits import OWN_PROCESSES, CgroupPlan
from agentenv.sandbox.supervisor.ready_namespaces import Namespace
from agentenv.sandbox.supervisor.reaper import Reaper
from agentenv.sandbox.supervisor.slot_process import SlotProcess, SlotSetup
from agentenv.sandbox.supervisor.slot_root import USER_NAMESPACE_FD, SlotRoot, Start, show
from agentenv.sandbox.supervisor.slottar import run_slottar
from agentenv.sandbox.supervisor.user_namespace import ImageIds
from agentenv.wire.roots import RootSpec, shm_bytes
from agentenv.wire.spec import SlotLimits

_UPPER: Final = "upper"
"""What a root has written, below its place (slotagent/root/tree.c)."""
_VOLUMES: Final = "volumes"


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
        self.policy = root.network
        """The network of its lease at present."""
        self._namespace: Namespace | None = None
        self._main = SlotRoot(setup, root, root, place, place / _VOLUMES, layers)
        self._services = {
            one.name: SlotRoot(
                setup, root, one, place / _of_service(number), place / _VOLUMES, _of_services(layers, number)
            )
            for number, one in enumerate(root.services)
        }
        """Below the same writable layer, which is then that of all."""
        self._roots = (self._main, *self._services.values())
        self._is_writable = False
        """Whether the writable layer is mounted."""
        self._holding = False
        """Whether the layers are held for it."""

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
        """The container's, where the root requests no others."""
        given = self._setup.spec.limits
        memory_bytes = self._root.memory_bytes or given.memory_bytes
        return dataclasses.replace(
            given,
            memory_bytes=memory_bytes,
            processes=(self._root.processes or given.processes) + OWN_PROCESSES * len(self._services),
            workspace_bytes=1,  # not in force here: what is in memory is the writable layer
            tmp_bytes=1,
            shm_bytes=shm_bytes(given.shm_bytes, memory_bytes),
        )

    @property
    def plan(self) -> CgroupPlan | None:
        """See SlotKind."""
        return self._setup.image_plan(self._slot, self.limits, self._root.cpu_millis)

    @property
    def views(self) -> tuple[SlotView, ...]:
        """See SlotKind."""
        return tuple(root.view for root in self._roots)

    @property
    def workdir(self) -> str:
        """See SlotKind."""
        return self._main.workdir

    async def gather(self) -> None:
        """Wait until its image is there, however long that takes. Raises ImageUnavailableError,
        SandboxUnavailableError."""
        if self._setup.images is not None:
            for root in self._roots:
                await self._setup.images.ready(root.image)

    async def prepare(self) -> None:
        """Mount the writable layer and the images, their ids mapped to this slot's."""
        images, namespaces = self._setup.images, self._setup.namespaces
        if images is None or namespaces is None:
            raise SandboxUnavailableError("this container has no image store: it has plain slots only")
        self._namespace = await namespaces.take(nested=self._root.nested_namespaces)
        for root in self._roots:
            root.take()
        if self._setup.checkpoints is not None:
            self._setup.checkpoints.hold(self._main.layers)
            self._holding = True
        await self._lay()

    async def _lay(self) -> None:
        """The writable layer, new and empty, and in it the roots, the volumes (empty, or as in the upmost frozen layer)
        and the files of /etc."""
        await self._mount_writable()
        volumes = {volume for root in self._roots for volume in root.volumes}
        with syscalls.file_access_as(self._ids.first):
            for volume in volumes:
                volume.mkdir(mode=0o755, parents=True)
            if self._root.hosts:
                self._etc.mkdir()
                for file in self._setup.tree.image_etc.iterdir():
                    (self._etc / file.name).write_text(file.read_text() + self._hosts * (file.name == "hosts"))
        for root in self._roots:
            await root.lay(self._own, self._reaper)
        if self._main.layers and volumes:
            await self._copy_volumes(self._main.layers[0], volumes)

    async def _copy_volumes(self, layer: FrozenLayer, volumes: set[Path]) -> None:
        """Copied, not laid below: several roots have one volume, and each would have an overlay of its own."""
        frozen, shown = self._place / "frozen-volumes", list[Path]()
        with syscalls.file_access_as(self._ids.first):
            frozen.mkdir(mode=0o755)
        program = self._setup.tree.root / "run/agentenv/slottar"
        steps = [*slot_process.first_steps(program, self.plan, {}), "copy", str(self._ids.first)]
        kept = dataclasses.replace(layer, files=layer.mount / _VOLUMES)
        try:
            await show([(kept, frozen)], self._own, self._setup.root_launcher, self._reaper, shown)
            for volume in sorted(volumes):
                command = [*steps, str(frozen / volume.name), str(volume)]
                await run_slottar(command, {USER_NAMESPACE_FD: self._own.fd}, self._reaper)
        finally:
            for place in shown:
                syscalls.umount(str(place))
        with syscalls.file_access_as(self._ids.first):
            frozen.rmdir()

    @property
    def _etc(self) -> Path:
        return self._place / "etc" if self._root.hosts else self._setup.tree.image_etc

    @property
    def _hosts(self) -> str:
        return "".join(f"127.0.0.1 {name}\n" for name in self._root.hosts)

    def checkpoint_refusal(self, checkpoints: Checkpoints) -> ConfigError | None:
        """Why what has been written cannot be kept as a checkpoint; None if it can."""
        if len(self._main.layers) >= MAX_LAYERS:
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
        for root in self._roots:
            root.hide()
        if self._on_disk:
            await asyncio.to_thread(disk_layers.shrink, self._place)
        checkpoint = checkpoints.freeze(
            name,
            self._root.image,
            self._main.layers,
            self._place,
            self._ids,
            _UPPER,
            in_memory=not self._on_disk,
            beside=Beside.of(self._root),
        )
        self._is_writable = False
        checkpoints.hold(checkpoint.layers[:1])
        self._main.layers = checkpoint.layers
        for number, service in enumerate(self._services.values()):
            service.layers = _of_services(checkpoint.layers, number)
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
            self._is_writable = True
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
            self._is_writable = True
        if place.stat().st_dev == under:
            raise OSError(f"{place} is not a fresh mount")

    def reopen(self) -> None:
        """Nothing to do: the slot's own root enters it, whom no mode keeps out."""

    def discard(self) -> None:
        """Unmount the images, then the writable layer with all that was written."""
        for root in self._roots:
            root.hide()
        if self._is_writable:
            if self._on_disk:
                disk_layers.forget(self._place)
            syscalls.umount(str(self._place))
            self._is_writable = False

    def give_back(self) -> list[Path]:
        """See SlotKind."""
        for root in self._roots:
            root.forget()
        if self._namespace is not None:
            self._namespace.close()
            self._namespace = None
        if self._holding and self._setup.checkpoints is not None:
            self._holding = False
            return self._setup.checkpoints.give_back(self._main.layers)
        return []

    async def start(self) -> SlotProcess:
        """Start the roots, each attested (:class:`SlotRoot`): the main one, then the services in its network."""
        start = Start(self._slot, self._own, self.plan, self.limits, self._etc, self._reaper)
        running = await self._main.start(start)
        try:
            for name, service in self._services.items():
                running.services[name] = await service.start(start, running.network_fd)
        except BaseException:
            await running.kill()
            raise
        if self._setup.namespaces is not None:
            self._setup.namespaces.refill()  # only now: this slot does not wait for it
        return running


def _of_service(number: int) -> str:
    """The place of a service's root in the writable layer."""
    return f"service-{number}"


def _of_services(layers: tuple[FrozenLayer, ...], number: int) -> tuple[FrozenLayer, ...]:
    """What a service had written in these layers of its slot."""
    return tuple(dataclasses.replace(one, files=one.mount / _of_service(number) / _UPPER) for one in layers)
