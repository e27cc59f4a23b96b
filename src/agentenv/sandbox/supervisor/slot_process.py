"""One run of one slot: fork, bwrap, the agent's HELLO; and the kill that ends everything in it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import ProtocolError, SandboxUnavailableError
from agentenv.sandbox.slotagent import protocol
from agentenv.sandbox.supervisor import cgroups, child, mounts, syscalls
from agentenv.sandbox.supervisor.isolation import AGENT_FD, KEYS_LIST, MAX_TERMINALS, USER, Identity, bwrap_argv
from agentenv.sandbox.supervisor.limits import OWN_PROCESSES, CgroupLayout, CgroupPlan, slot_plan
from agentenv.sandbox.supervisor.reaper import Reaper, end_of, readable
from agentenv.sandbox.supervisor.rootfs import Tree
from agentenv.wire.spec import SandboxSpec, SlotLimits

HELLO_DEADLINE_S = 10.0
KILL_DEADLINE_S = 10.0
_KILL_AGAIN_S = 0.05
"""A process created while the others were being listed is killed in the next round."""
_INFO_FD = 4
_NETWORK_PROCESSES = 8
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

    def plan(self, slot: int) -> CgroupPlan | None:
        """The slot's cgroup; None where cgroups are not available."""
        return slot_plan(self.layout, self.spec.container, slot, self.spec.limits) if self.layout else None

    def has(self, controller: str) -> bool:
        """Whether this cgroup controller is available for the slots."""
        return self.layout is not None and controller in self.layout.controllers


class SlotStartError(SandboxUnavailableError):
    """A slot did not start; everything started has been killed."""


def mount_workspace(setup: SlotSetup, slot: int) -> None:
    """Mount a new workspace. Raises OSError when it cannot be mounted or is not empty."""
    limits, place = setup.spec.limits, setup.tree.workspace(slot)
    under = place.stat().st_dev
    mounts.mount_tmpfs(
        place,
        size_bytes=limits.workspace_bytes,
        mode=0o700,
        uid=setup.identity.slot_uid(slot),
        inodes=limits.workspace_inodes,
    )
    fresh = os.statvfs(place)
    if place.stat().st_dev == under or fresh.f_bfree != fresh.f_blocks:
        raise OSError(f"the workspace of slot {slot} is not a fresh, empty mount")


def reopen_workspace(setup: SlotSetup, slot: int) -> None:
    """Restore the original mode of a kept workspace: after a ``chmod 000 .`` by the slot's own commands bwrap could
    not enter it, which would look like an infrastructure failure. Raises OSError."""
    with syscalls.file_access_as(setup.identity.slot_uid(slot)):  # as its owner: CAP_FOWNER may be missing
        setup.tree.workspace(slot).chmod(0o700)


def unmount_workspace(setup: SlotSetup, slot: int) -> None:
    """Discard the workspace. Raises OSError (EBUSY) while anything in our namespace uses it."""
    syscalls.umount(str(setup.tree.workspace(slot)))


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

    async def kill(self) -> None:
        """Kill every process of the slot and wait until the kernel has reaped them all.

        The agent is PID 1 of the slot's pid namespace: when it is gone, so is everything in it, as the kernel
        guarantees; bwrap ends after it. Raises TimeoutError when that takes too long.
        """
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
        """Send SIGKILL to everything in the slot, and return whether it was gone in time. Processes are killed one
        by one where the kernel does not do that: the agent cannot die while it waits for a lock held by another."""
        if self.plan is not None:
            cgroups.kill(self.plan)
        elif self.agent_pidfd >= 0:
            _kill_below(self.agent_pid)
        if self.agent_pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.agent_pidfd, signal.SIGKILL)
        elif not self.exited.done():
            _kill_family(self.bwrap_pid)
        await asyncio.wait((self.exited,), timeout=within_s)
        if not self.exited.done():
            return False
        if self.agent_pidfd >= 0:
            try:
                await readable(self.agent_pidfd, within_s)
            except TimeoutError:
                return False
        return True

    def close(self) -> None:
        """Close the descriptors; kills nothing."""
        self.agent.close()
        if self.agent_pidfd >= 0:
            os.close(self.agent_pidfd)
            self.agent_pidfd = -1


def _kill_below(pid: int) -> None:
    """Kill all descendants of ``pid``; for an agent that is its whole slot, because orphans become the agent's
    children."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                _kill_below(int(child))
                os.kill(int(child), signal.SIGKILL)


def _kill_family(pid: int) -> None:
    """Kill a bwrap that has not reported its child's pid yet: children first, otherwise they would be orphaned."""
    _kill_below(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


async def start(setup: SlotSetup, slot: int, reaper: Reaper) -> SlotProcess:
    """Start the slot with its mounted workspace and its cgroup; returns after the agent's HELLO.

    Raises SlotStartError, with bwrap's message, after killing what had been started.
    """
    with _terminals(setup, slot):
        return await _start(setup, slot, reaper)


@contextlib.contextmanager
def _terminals(setup: SlotSetup, slot: int) -> Iterator[None]:
    """The slot's ``/dev/pts`` until bwrap has bound it into the slot, where it then exists as long as the slot."""
    place = setup.tree.slot_terminals(slot)
    mounts.mount_terminals(place, MAX_TERMINALS)
    try:
        yield
    finally:
        syscalls.umount(str(place), syscalls.MNT_DETACH)


async def _start(setup: SlotSetup, slot: int, reaper: Reaper) -> SlotProcess:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    info_read, info_write = os.pipe()
    error_read, error_write = os.pipe()
    plan = setup.plan(slot)
    try:
        pid = _spawn(setup, slot, plan, theirs.fileno(), info_write, error_write)
        running = SlotProcess(slot, pid, reaper.watch(pid), ours, plan)
        theirs.close()
        os.close(info_write)
        os.close(error_write)
        info_write = error_write = -1
        ours.setblocking(False)
        try:
            await _hello(running, info_read, setup)
        except BaseException as error:
            await running.kill()
            if not isinstance(error, (OSError, TimeoutError, ProtocolError, ValueError)):
                raise
            raise SlotStartError(_why(error, running, error_read)) from error
        return running
    finally:
        theirs.close()
        for fd in (info_read, info_write, error_read, error_write):
            if fd >= 0:
                os.close(fd)


async def _hello(running: SlotProcess, info_read: int, setup: SlotSetup) -> None:
    await readable(running.agent.fileno(), HELLO_DEADLINE_S)
    message = protocol.receive(running.agent)
    if message is None:
        raise ProtocolError("the slot ended before its agent said HELLO")
    if message.kind is not protocol.Kind.HELLO or message.arg != protocol.VERSION:
        raise ProtocolError(f"the agent's first word was {message.kind.name} {message.arg}")
    # Written by bwrap before it let the agent run, so it is complete.
    running.agent_pid = int(json.loads(os.read(info_read, 4096))["child-pid"])
    running.agent_pidfd = os.pidfd_open(running.agent_pid)
    if setup.identity.mode == USER:
        # Only now, inside the slot's own user namespace, does it count only the slot's processes.
        processes = setup.spec.limits.processes + OWN_PROCESSES
        resource.prlimit(running.agent_pid, resource.RLIMIT_NPROC, (processes, processes))


def _victim_score() -> int:
    """The ``oom_score_adj`` of all processes in a slot, including its agent. If all slots together exhaust the
    container's memory (a hard limit of Docker or Nomad), the kernel kills a slot's process, not the server that
    holds every slot's calls. Nobody in a slot can lower it: its ``/proc`` is read-only. Among equals the largest is
    killed first, and the agent is the smallest."""
    own = int(Path("/proc/self/oom_score_adj").read_text())
    return min(own + _OOM_SCORE_ADJ, _MAX_OOM_SCORE_ADJ)


def _why(error: BaseException, running: SlotProcess, error_read: int) -> str:
    os.set_blocking(error_read, False)
    with contextlib.suppress(BlockingIOError):
        if said := os.read(error_read, 4096).decode(errors="replace").strip():
            return said
    if isinstance(error, TimeoutError):
        return f"the agent sent nothing for {HELLO_DEADLINE_S:.0f} s"
    return f"{error}" + (f" ({end_of(running.exited.result())})" if running.exited.done() else "")


def _spawn(setup: SlotSetup, slot: int, plan: CgroupPlan | None, agent_fd: int, info_fd: int, error_fd: int) -> int:
    """Start slotlaunch, which applies the slot's limits and identity and becomes bwrap; returns its pid."""
    identity, workspace = setup.identity, setup.tree.workspace(slot)
    launch = [str(setup.launcher)]
    for file in plan.join_files if plan is not None else ():
        launch += ["-j", str(file)]
    for limit, value in _rlimits(setup.spec.limits, setup).items():
        launch += ["-l", str(limit), str(value)]
    launch += ["-o", str(_victim_score())]
    if identity.mode != USER:
        launch += ["-u", str(identity.slot_uid(slot)), str(identity.slot_gid(slot))]
    keys_listed = Path(KEYS_LIST).exists()
    command = bwrap_argv(
        setup.bwrap,
        setup.tree.root,
        workspace,
        setup.tree.slot_terminals(slot),
        setup.spec.limits,
        _INFO_FD,
        keys_listed=keys_listed,
    )
    return os.posix_spawn(
        setup.launcher,
        [*launch, "--", *command],
        {},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, error_fd, 1),
            (os.POSIX_SPAWN_DUP2, error_fd, 2),
            (os.POSIX_SPAWN_DUP2, agent_fd, AGENT_FD),
            (os.POSIX_SPAWN_DUP2, info_fd, _INFO_FD),
        ],
        setsigmask=(),
        setsigdef=child.IGNORED_BY_PYTHON,
    )


def _rlimits(limits: SlotLimits, setup: SlotSetup) -> dict[int, int]:
    wanted = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: limits.open_files}
    if setup.identity.mode != USER:
        # Where pids.max counts exactly, this is a second limit: it also counts the slot's
        # network stack, which runs under the slot's uid outside of it.
        slack = _NETWORK_PROCESSES if setup.has("pids") else 0
        wanted[resource.RLIMIT_NPROC] = limits.processes + OWN_PROCESSES + slack
    if not setup.has("memory"):
        wanted[resource.RLIMIT_DATA] = limits.memory_bytes
    return wanted
