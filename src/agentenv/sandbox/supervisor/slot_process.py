"""The parts of a slot, and one run of it: its first process, the agent's HELLO, and the kill that ends all of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from agentenv.deadlines import KILL_DEADLINE_S, scaled
from agentenv.errors import CheckpointError, ConfigError, ProtocolError, SandboxUnavailableError
from agentenv.sandbox.control_protocol import SlotView
from agentenv.sandbox.slotagent import protocol
from agentenv.sandbox.supervisor import cgroups
from agentenv.sandbox.supervisor.checkpoints import Beside, Checkpoint, Checkpoints, FrozenLayer, Packed
from agentenv.sandbox.supervisor.disk_layers import DiskLayers, file_bytes
from agentenv.sandbox.supervisor.image_mounts import Images
from agentenv.sandbox.supervisor.isolation import USER, Identity
from agentenv.sandbox.supervisor.limits import OWN_PROCESSES, CgroupLayout, CgroupPlan, slot_plan
from agentenv.sandbox.supervisor.ready_namespaces import ReadyNamespaces
from agentenv.sandbox.supervisor.reaper import Reaper, end_of, readable
from agentenv.sandbox.supervisor.rootfs import Tree
from agentenv.wire.roots import RootSpec
from agentenv.wire.spec import SandboxSpec, SlotLimits

HELLO_DEADLINE_S = scaled(10.0)
_KILL_AGAIN_S = 0.05
"""A process created while the others were being listed is killed in the next round."""
INFO_FD = 4
FAILED = 127
"""Exit code of our own programs when the reason is on standard error."""
_NETWORK_PROCESSES = 8  # slirp4netns, which has the slot's uid and counts for RLIMIT_NPROC
_PENDING_SIGNALS = 8192
"""Queued signals, and timers, of a slot. The kernel's default grows with the machine (96,365 with 24 GB)."""
_OOM_SCORE_ADJ, _MAX_OOM_SCORE_ADJ = 500, 1000


@dataclass(frozen=True)
class SlotSetup:
    """Setup shared by all slots of a container."""

    spec: SandboxSpec
    identity: Identity
    tree: Tree
    layout: CgroupLayout | None
    bwrap: str
    launcher: Path
    root_launcher: Path
    images: Images | None = None
    """None: this container has plain slots only."""
    namespaces: ReadyNamespaces | None = None
    disk: DiskLayers | None = None
    checkpoints: Checkpoints | None = None
    bash_build: str = ""
    """Of the bash that is linked statically (:func:`agentenv.sandbox.supervisor.static_bash.build_of`)."""

    def plan(self, slot: int) -> CgroupPlan | None:
        """The cgroup of a plain slot; None where cgroups are not available."""
        if self.layout is None:
            return None
        return slot_plan(self.layout, self.spec.container, f"slot-{slot}", self.spec.limits)

    def image_plan(self, slot: int, limits: SlotLimits, cpu_millis: int) -> CgroupPlan | None:
        """The cgroup of the slot while it has an image; None where cgroups are not available."""
        if self.layout is None:
            return None
        return slot_plan(self.layout, self.spec.container, f"image-{slot}", limits, cpu_millis)

    def origin_of(self, root: RootSpec) -> Checkpoint | Packed:
        """What a plain slot with this root begins with. Raises CheckpointError."""
        if self.checkpoints is None:
            raise CheckpointError("this container has no checkpoints")
        return self.checkpoints.find_plain(root.checkpoint)

    def require_fit(self, root: RootSpec) -> None:
        """Raises ConfigError when no slot here can ever have this root."""
        if (why := cgroups.this_machine().refusal(root)) is not None:
            raise why
        if root.image and root.writable == "disk" and self.disk is not None:
            wanted_bytes, most_bytes = file_bytes(root.writable_bytes, root.writable_inodes), self.disk.most_bytes
            if wanted_bytes > most_bytes:
                raise ConfigError(
                    "root.writable_bytes", f"{wanted_bytes} bytes are more than the disk has: {most_bytes}"
                )

    def layers_of(self, root: RootSpec) -> tuple[FrozenLayer, ...]:
        """The frozen layers that an image slot with this root begins with, whose image is there. Raises
        CheckpointError when it names a checkpoint that is not here, or is of another image, or of a slot with other
        services and volumes; ImageUnavailableError, OSError."""
        if self.checkpoints is None or self.images is None:
            raise SandboxUnavailableError("this container has no image store: it has plain slots only")
        self.images.require(root.image)
        if not root.checkpoint:
            return ()
        found = self.checkpoints.find(root.checkpoint)
        if found.image != root.image:
            raise CheckpointError(f"checkpoint {root.checkpoint} was made in a slot of image {found.image}")
        if found.beside != Beside.of(root):
            raise CheckpointError(f"checkpoint {root.checkpoint} was made in a slot with {found.beside}")
        return found.layers

    def has(self, controller: str) -> bool:
        """Whether this cgroup controller is available for the slots."""
        return self.layout is not None and controller in self.layout.controllers


class SlotStartError(SandboxUnavailableError):
    """A slot did not start; everything started has been killed."""


@dataclass
class SlotProcess:
    """A running slot. ``agent`` is the supervisor's copy of the agent's socket."""

    slot: int
    bwrap_pid: int
    exited: asyncio.Future[int]
    agent: socket.socket
    plan: CgroupPlan | None
    agent_pid: int = 0
    agent_pidfd: int = -1
    network_fd: int = -1
    """A descriptor of the slot's network namespace; -1 where it is opened by the agent's pid."""
    services: dict[str, SlotProcess] = field(default_factory=dict)
    """Those of the slot's services, which end with it."""

    async def kill(self) -> None:
        """Kill every process of the slot and wait until the kernel has reaped them all.

        The agent is PID 1 of the slot's pid namespace: when it has ended, so has everything in it, as the kernel
        guarantees; bwrap ends after it. Raises TimeoutError when that takes too long.
        """
        try:
            for service in self.services.values():
                await service.kill()
        finally:
            await self._kill()

    async def _kill(self) -> None:
        try:
            async with asyncio.timeout(KILL_DEADLINE_S):
                while not await self._killed(_KILL_AGAIN_S):
                    pass
        except TimeoutError:
            self.agent.detach()  # left open: see below
            raise
        finally:
            # Only after all are dead: unread data may hold the last reference to a pipe that a
            # living process keeps locked, and then this process would wait for it.
            self.close()

    async def _killed(self, within_s: float) -> bool:
        """Send SIGKILL to everything in the slot, and return whether it ended in time. Processes are killed one
        by one where the kernel does not do that: the agent cannot die while it waits for a lock held by another."""
        if self.plan is not None:
            cgroups.kill(self.plan)
        elif self.agent_pidfd >= 0:
            _kill_below(self.agent_pid)
        if self.agent_pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.agent_pidfd, signal.SIGKILL)
        elif not self.exited.done():
            kill_family(self.bwrap_pid)
        await asyncio.wait((self.exited,), timeout=within_s)
        if not self.exited.done():
            return False
        if self.agent_pidfd >= 0:
            try:
                await readable(self.agent_pidfd, within_s)
            except TimeoutError:
                return False
        return True

    @property
    def untouched(self) -> bool:
        """Whether nothing has ever run in it but its agent, by what the kernel reports: no process is there, and none
        was that the agent, to whom all fall, has waited for (``cminflt`` of proc_pid_stat(5): the faults of those).
        False where that cannot be known."""
        if self.plan is None or self.exited.done():
            return False
        try:
            after_name = Path(f"/proc/{self.agent_pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False
        return after_name[8] == "0" and cgroups.members(self.plan) == {self.bwrap_pid, self.agent_pid}

    def close(self) -> None:
        """Close the descriptors; kills nothing."""
        self.agent.close()
        for fd in (self.agent_pidfd, self.network_fd):
            if fd >= 0:
                os.close(fd)
        self.agent_pidfd = self.network_fd = -1


class SlotKind(Protocol):
    """What a slot is made of, by kind: a plain slot under bubblewrap, or an image slot with a root of its own. Its
    files, namespaces and first process. Each method raises OSError or SandboxUnavailableError."""

    @property
    def plan(self) -> CgroupPlan | None:
        """Its cgroup; None where there are none."""

    @property
    def views(self) -> tuple[SlotView, ...]:
        """What the server has to know about its main root, and about its services'; none for a plain slot."""

    @property
    def workdir(self) -> str:
        """The directory where commands start, which its agent makes if it is missing; empty: the workspace."""

    async def prepare(self) -> None:
        """Make its files, new and empty."""

    def reopen(self) -> None:
        """Its files are kept: what its own programs did to them must not keep a new start out."""

    def checkpoint_refusal(self, checkpoints: Checkpoints) -> ConfigError | None:
        """Why its files cannot be kept as a checkpoint; None if, as far as is known now, they can."""

    async def freeze(self, checkpoints: Checkpoints, name: str) -> None:
        """Keep its files as a checkpoint, and continue with the same. No process may be left. Raises CheckpointError
        when it continues without one."""

    async def start(self) -> SlotProcess:
        """Start its agent over the prepared files; returns after the agent's HELLO. What was started for a failed
        start is killed."""

    def discard(self) -> None:
        """Remove its files. May take long: call it in a thread. EINVAL: there are none. EBUSY: something uses them."""

    def give_back(self) -> list[Path]:
        """Its files are removed: free what else it had for other slots. Returns layers of checkpoints not needed now,
        to be unmounted."""


def _kill_below(pid: int) -> None:
    """Kill all descendants of ``pid``; for an agent that is its whole slot, because orphans become the agent's
    children."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                _kill_below(int(child))
                os.kill(int(child), signal.SIGKILL)


def kill_family(pid: int) -> None:
    """Kill a process and its children, such as a bwrap that has not reported its child's pid yet: children first,
    otherwise they would be orphaned."""
    _kill_below(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Spawn(Protocol):
    """Starts a slot's first process, which has the agent's socket, writes its agent's pid to ``info_fd``, a socket
    ({"child-pid": 12}, perhaps with a descriptor of the network namespace), before it lets that run, and its errors to
    ``error_fd``; returns its pid."""

    def __call__(self, agent_fd: int, info_fd: int, error_fd: int) -> int:
        """See the class."""


async def start(spawn: Spawn, slot: int, plan: CgroupPlan | None, reaper: Reaper) -> SlotProcess:
    """Start a slot; returns after the agent's HELLO.

    Raises SlotStartError, with the first process's message, after killing what had been started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    info_read, info_write = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    error_read, error_write = os.pipe()
    try:
        try:
            pid = spawn(theirs.fileno(), info_write.fileno(), error_write)
        except BaseException:
            ours.close()
            raise
        running = SlotProcess(slot, pid, reaper.watch(pid), ours, plan)
        theirs.close()
        info_write.close()
        os.close(error_write)
        error_write = -1
        ours.setblocking(False)
        try:
            await _hello(running, info_read)
        except BaseException as error:
            await running.kill()
            if not isinstance(error, (OSError, TimeoutError, ProtocolError, ValueError)):
                raise
            raise SlotStartError(_why(error, running, error_read)) from error
        return running
    finally:
        for end in (theirs, info_read, info_write):
            end.close()
        os.close(error_read)
        if error_write >= 0:
            os.close(error_write)


async def _hello(running: SlotProcess, info_read: socket.socket) -> None:
    await readable(running.agent.fileno(), HELLO_DEADLINE_S)
    message = protocol.receive(running.agent)
    if message is None:
        raise ProtocolError("the slot ended before its agent sent HELLO")
    if message.kind is not protocol.Kind.HELLO or message.arg != protocol.VERSION:
        raise ProtocolError(f"the agent's first message was {message.kind.name} {message.arg}")
    # Written before the agent was let run, so it is complete.
    report, descriptors, _, _ = socket.recv_fds(info_read, 4096, 1, socket.MSG_CMSG_CLOEXEC)
    running.network_fd = descriptors[0] if descriptors else -1
    running.agent_pid = int(json.loads(report)["child-pid"])
    running.agent_pidfd = os.pidfd_open(running.agent_pid)


def victim_score() -> int:
    """The ``oom_score_adj`` of all processes in a slot, including its agent. If all slots together exhaust the
    container's memory (a hard limit of Docker or Nomad), the kernel kills a slot's process, not the server that
    holds every slot's calls. No process in a slot can lower it: its ``/proc`` is read-only. Among equals the largest is
    killed first, and the agent is the smallest."""
    own = int(Path("/proc/self/oom_score_adj").read_text())
    return min(own + _OOM_SCORE_ADJ, _MAX_OOM_SCORE_ADJ)


def _why(error: BaseException, running: SlotProcess, error_read: int) -> str:
    os.set_blocking(error_read, False)
    with contextlib.suppress(BlockingIOError):
        if text := os.read(error_read, 4096).decode(errors="replace").strip():
            return text
    if isinstance(error, TimeoutError):
        return f"the agent sent nothing for {HELLO_DEADLINE_S:.0f} s"
    return f"{error}" + (f" ({end_of(running.exited.result())})" if running.exited.done() else "")


def first_steps(program: Path, plan: CgroupPlan | None, rlimits: Mapping[int, int]) -> list[str]:
    """The program that starts a slot, with the options common to all (``slotagent/launch/main.c``)."""
    steps = [str(program)]
    for file in plan.join_files if plan is not None else ():
        steps += ["-j", str(file)]
    for limit, value in rlimits.items():
        steps += ["-l", str(limit), str(value)]
    return [*steps, "-o", str(victim_score())]


def rlimits(setup: SlotSetup, processes: int, memory_bytes: int) -> dict[int, int]:
    """What limits each process of a slot: a second limit, or the only one where there are no cgroups."""
    wanted = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: setup.spec.limits.open_files}
    most = resource.getrlimit(resource.RLIMIT_SIGPENDING)[1]  # raising it takes CAP_SYS_RESOURCE
    wanted[resource.RLIMIT_SIGPENDING] = (
        _PENDING_SIGNALS if most == resource.RLIM_INFINITY else min(most, _PENDING_SIGNALS)
    )
    if setup.identity.mode != USER:
        # Where pids.max counts exactly, this is a second limit: it also counts the slot's
        # network stack, which runs under the slot's uid outside of it.
        slack = _NETWORK_PROCESSES if setup.has("pids") else 0
        wanted[resource.RLIMIT_NPROC] = processes + OWN_PROCESSES + slack
    if not setup.has("memory"):
        wanted[resource.RLIMIT_DATA] = memory_bytes
    return wanted
