"""One root of an image slot: an image below a writable directory, put together by the slot's own root
(``slotagent/root``) with no more rights than that has; and its first process, an agent.

A slot has a main root, and may have one for each of its services. They have the slot's user namespace, network and
cgroup in common, and nothing else: each has mounts, pids, IPC and a host name of its own.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.errors import ConfigError, SandboxUnavailableError
from agentenv.sandbox.control_protocol import SlotView
from agentenv.sandbox.slot_paths import TMUX_BUNDLE
from agentenv.sandbox.supervisor import attest, child, slot_process, static_bash, syscalls
from agentenv.sandbox.supervisor.checkpoints import FrozenLayer
from agentenv.sandbox.supervisor.image_mounts import ImageConfig, ImageLayer
from agentenv.sandbox.supervisor.isolation import AGENT_FD, MAX_TERMINALS, SHELL_PATH
from agentenv.sandbox.supervisor.limits import CgroupPlan
from agentenv.sandbox.supervisor.ready_namespaces import Namespace
from agentenv.sandbox.supervisor.reaper import Reaper
from agentenv.sandbox.supervisor.slot_process import INFO_FD, SlotProcess, SlotSetup, SlotStartError
from agentenv.sandbox.supervisor.user_namespace import Ids, make_user_namespace
from agentenv.wire.roots import RootSpec, ServiceSpec
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
USER_NAMESPACE_FD, _NETWORK_FD = 5, 6  # slotroot's -u and -w (slotagent/root/main.c)
_HAS_FILES: Final = "mount a volume where the image has files"
"""What slotroot prints then (slotagent/root/tree.c)."""
_NO_BIND: Final = "make the place of a bind"
"""The same, where a link or another kind of file of the image is in the way."""
_PARTS: Final = ("upper", "work", "root")


async def show(
    layers: Iterable[tuple[FrozenLayer | ImageLayer, Path]],
    namespace: Namespace,
    program: Path,
    reaper: Reaper,
    shown: list[Path],
) -> None:
    """Mount each of these layers at its place, read-only, as a slot's with this user namespace; what lies under the
    same ids is shown by one mapping. ``program`` is slotroot; ``shown`` gets the places. Raises OSError,
    SandboxUnavailableError."""
    own_ids = namespace.range.ids
    mappings: dict[Ids, int] = {}
    try:
        for layer, place in layers:
            ids = layer.ids
            if ids is not None and ids != own_ids and ids not in mappings:
                mappings[ids] = await make_user_namespace(program, own_ids, reaper, shown=ids)
            copied = syscalls.copy_mount(str(layer.files))
            try:
                syscalls.restrict_mount(copied, namespace.fd if ids is None else mappings.get(ids))
                syscalls.attach_mount(copied, str(place))
            finally:
                os.close(copied)
            shown.append(place)
    finally:
        for mapping in mappings.values():
            os.close(mapping)


def capability_mask(extra: tuple[str, ...]) -> int:
    """The bits of the capabilities of a slot that requests these as well (linux/capability.h)."""
    return sum(1 << bit for bit in {*CAPABILITIES.values(), *(EXTRA_CAPABILITIES[name] for name in extra)})


@dataclass(frozen=True)
class Start:
    """What all roots of a slot are started with."""

    slot: int
    namespace: Namespace
    plan: CgroupPlan | None
    limits: SlotLimits
    etc: Path
    """See slotroot's ``-e``."""
    reaper: Reaper


class SlotRoot:
    """See the module. ``place`` is a directory in the slot's writable layer, ``volumes`` the directory of its volumes;
    ``whole`` what the lease requests, of which ``own`` is this root."""

    def __init__(
        self,
        setup: SlotSetup,
        whole: RootSpec,
        own: RootSpec | ServiceSpec,
        place: Path,
        volumes: Path,
        layers: tuple[FrozenLayer, ...] = (),
    ) -> None:
        self.image = own.image
        self.place = place
        self.layers = layers
        """The frozen ones, the upmost first."""
        self._setup = setup
        self._whole = whole
        self._own = own
        self._volumes = {path: volumes / name.removesuffix(":ro") for path, name in sorted(own.volumes.items())}
        self._read_only = frozenset(path for path, name in own.volumes.items() if name.endswith(":ro"))
        self._image: tuple[ImageLayer, ...] = ()
        self._config: ImageConfig | None = None
        self._shown: list[Path] = []
        self._is_fresh = not layers
        """Whether nothing has run in it yet."""
        self._bashes: dict[Path, bool] = {}
        """Which of the layers have a bash, or hide one."""

    @property
    def view(self) -> SlotView:
        """What the server has to know of it."""
        config = self._config or ImageConfig()
        stands_in = self._has_containers_bash(config)
        return SlotView(
            env={**config.env, **self._own.env},
            user=self._own.user or config.user,
            workdir=self.workdir,
            shell=SHELL_PATH if stands_in or not config.has_bash else "",
            stands_in=stands_in,
            tmux=TMUX_BUNDLE if self._setup.tree.has_tmux and not config.has_tmux else "",
            entrypoint=list(config.entrypoint),
            cmd=list(config.cmd),
        )

    @property
    def workdir(self) -> str:
        """Where commands start; its agent makes the directory if it is missing."""
        config = self._config or ImageConfig()
        return posixpath.normpath(self._own.workdir or config.workdir or "/")

    def _has_containers_bash(self, config: ImageConfig) -> bool:
        """Whether the slot's bash is of the same build as the container's static one. One that was put in its place is
        noticed once it lies in a checkpoint; the PATH of a lease may lead to any."""
        if not config.bash_build or config.bash_build != self._setup.bash_build:
            return False
        if "PATH" in {*self._own.env, *self._setup.spec.env}:
            return False
        return not any(self._has_bash(layer, config.path) for layer in self.layers)

    def _has_bash(self, layer: FrozenLayer, path: str) -> bool:
        """Looked up once for each layer: a view is made often. A layer that cannot be read may have one."""
        if layer.files not in self._bashes:
            self._bashes[layer.files] = True
            with contextlib.suppress(OSError):
                self._bashes[layer.files] = bool(static_bash.bashes_in(layer.files, path))
        return self._bashes[layer.files]

    @property
    def _binds(self) -> tuple[str, ...]:
        """Where it has those of the container, which are in the template of plain slots; the ones below another come
        with that."""
        targets = sorted({posixpath.normpath(bind.target) for bind in self._setup.spec.binds})
        return tuple(one for one in targets if not any(one.startswith(f"{other}/") for other in targets))

    @property
    def volumes(self) -> Iterable[Path]:
        """The directories of those that it has."""
        return self._volumes.values()

    def take(self) -> None:
        """Take its image, which is ready. Raises SandboxUnavailableError, ImageUnavailableError, OSError."""
        assert self._setup.images is not None
        self._image, self._config = self._setup.images.take(self.image)
        if not self._config.has_bash and not (self._setup.tree.root / SHELL_PATH.lstrip("/")).exists():
            raise SandboxUnavailableError(
                "the image has no bash, and this container has no statically linked one",
                next_step="apt-get install bash-static",
            )

    @property
    def _lowers(self) -> list[str]:
        """The directories that the root is made from, the upmost first."""
        image = ["image"] if len(self._image) == 1 else [f"i{number}" for number in range(len(self._image))]
        return [*(f"l{number}" for number in range(len(self.layers))), *image]

    async def lay(self, namespace: Namespace, reaper: Reaper) -> None:
        """Make its parts in the writable layer, and show below it the frozen layers and the image, each as the
        slot's. Raises as :func:`show`."""
        with syscalls.file_access_as(namespace.range.ids.first):
            for name in (*_PARTS, *self._lowers):
                (self.place / name).mkdir(mode=0o755, parents=True)
        below: list[FrozenLayer | ImageLayer] = [*self.layers, *self._image]
        places = [self.place / name for name in self._lowers]
        await show(zip(below, places, strict=True), namespace, self._setup.root_launcher, reaper, self._shown)

    def hide(self) -> None:
        """Unmount what :meth:`lay` has shown. Raises OSError."""
        while self._shown:
            syscalls.umount(str(self._shown[-1]))
            self._shown.pop()

    def forget(self) -> None:
        """It is not the slot's any more."""
        self._config = None

    async def start(self, start: Start, network_fd: int = -1) -> SlotProcess:
        """Start slotroot, and see from outside that the root is what it must be. ``network_fd``: the network namespace
        to be joined; -1: it makes one. Raises ConfigError when the image has files where a volume is to be; as
        :func:`slot_process.start`."""

        def spawn(agent_fd: int, info_fd: int, error_fd: int) -> int:
            fds = {AGENT_FD: agent_fd, INFO_FD: info_fd, USER_NAMESPACE_FD: start.namespace.fd}
            joined = {_NETWORK_FD: network_fd} if network_fd >= 0 else {}
            return child.spawn(self._arguments(start, joins=bool(joined)), {**fds, **joined}, error_fd)

        try:
            running = await slot_process.start(spawn, start.slot, start.plan, start.reaper)
        except SlotStartError as error:  # nothing but slotroot has written it: no program of the image has run
            if _HAS_FILES in error.message:
                raise ConfigError(
                    "root.volumes", error.message, next_step="they are not copied into it: name another place"
                ) from error
            if _NO_BIND in error.message:
                raise ConfigError(
                    "binds", error.message, next_step="name another target: the image has a link or other file there"
                ) from error
            raise
        try:
            self._attest(running, start, network_fd)
        except BaseException:
            await running.kill()
            raise
        self._is_fresh = False
        return running

    def _attest(self, running: SlotProcess, start: Start, network_fd: int) -> None:
        ids = start.namespace.range.ids
        want = attest.Expected(
            first_id=ids.first,
            maps=ids.maps,
            capabilities=capability_mask(self._whole.capabilities),
            oom_score_adj=slot_process.victim_score(),
            lowers=tuple(self._lowers),
            shm_bytes=start.limits.shm_bytes,
            terminals=MAX_TERMINALS,
            nested=self._whole.nested_namespaces,
            cgroup=start.plan is not None,
            outside=attest.namespaces_of("self"),
            network=attest.named_namespace(network_fd) if network_fd >= 0 else "",
            covers=attest.expected_covers(),
            binds=self._binds,
            volumes={path: path in self._read_only for path in self._volumes},
        )
        groups = () if start.plan is None else start.plan.process_files
        if broken := attest.judge(attest.read(running.agent_pid, groups), want):
            raise SandboxUnavailableError(f"the slot is not what it must be: {'; '.join(broken)}")

    def _arguments(self, start: Start, *, joins: bool) -> list[str]:
        limits, whole = start.limits, self._whole
        rlimits = slot_process.rlimits(self._setup, limits.processes, limits.memory_bytes)
        volumes = [(path in self._read_only, str(source), path) for path, source in self._volumes.items()]
        return [
            *slot_process.first_steps(self._setup.root_launcher, start.plan, rlimits),
            *("-u", str(start.namespace.range.ids.first)),
            *(("-w",) if joins else ()),
            *("-k", hex(capability_mask(whole.capabilities))),
            *("-h", HOSTNAME),
            *("-s", str(limits.shm_bytes)),
            *("-p", str(MAX_TERMINALS)),
            *("-r", str(self._setup.tree.image_programs)),
            *("-e", str(start.etc)),
            *(("-a",) if self._is_fresh else ()),
            *(argument for kept, *both in volumes for argument in ("-V" if kept else "-v", *both)),
            *(argument for bind in self._binds for argument in ("-b", f"{self._setup.tree.root}{bind}", bind)),
            *(("-n",) if whole.nested_namespaces else ()),
            *(("-f",) if "net_raw" in whole.capabilities else ()),
            *("--", str(self.place), ":".join(self._lowers)),
            *("/run/agentenv/slotagent", str(AGENT_FD), "guarded", self.workdir),
        ]
