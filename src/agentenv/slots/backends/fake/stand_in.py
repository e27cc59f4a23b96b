"""A supervisor that isolates nothing: real slot agents, as ordinary child processes, for a real sandbox server.

It implements the control protocol (:mod:`agentenv.sandbox.control_protocol`), without the namespaces, limits, uids and
self-tests of the real one (:mod:`agentenv.sandbox.supervisor`). It needs no privileges, and only the compiled programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from agentenv.background import TaskSet
from agentenv.deadlines import scaled
from agentenv.errors import CheckpointError, ProtocolError, SandboxUnavailableError
from agentenv.sandbox.control_protocol import (
    Drop,
    Export,
    Exported,
    Fence,
    Freeze,
    Hello,
    NotFrozen,
    Ping,
    Pong,
    Remember,
    Request,
    Reroot,
    Reset,
    Seal,
    Serving,
    SlotFailed,
    SlotLost,
    SlotReady,
    SlotRefused,
    SlotView,
    SupervisorPacket,
    Unattended,
)
from agentenv.sandbox.limit_watch import LimitFiles
from agentenv.sandbox.loop_watch import Stalls
from agentenv.sandbox.slot_env import GITCONFIG, PATH
from agentenv.sandbox.slot_loss import LossReason
from agentenv.sandbox.slot_paths import WORKSPACE, SlotPaths
from agentenv.sandbox.slotagent import protocol
from agentenv.sandbox.slotagent.build import Binaries
from agentenv.sandbox.supervisor.rootfs import link_programs
from agentenv.sandbox.supervisor.server_link import ServerLink
from agentenv.wire.roots import RootSpec
from agentenv.wire.spec import SandboxSpec

log = logging.getLogger(__name__)

WEAKER = ("the fake backend isolates nothing: commands run as the caller, in a temporary directory",)
MARK = "AGENTENV_FAKE_SLOT"
"""Environment variable of all processes in a slot, by which they are found: the path of its workspace."""
_HELLO_S = scaled(10.0)
_PASSES, _PASS_S = 200, 0.01
_END_S = scaled(10.0)
"""Time for an agent to kill all processes of its slot, before it is killed itself."""
_REMOVE = 'read -r _; for _ in 1 2 3 4 5 6 7 8 9; do rm -rf -- "$1" 2>/dev/null && exit; sleep 0.2; done'


class Scratch:
    """A temporary directory, created by :meth:`make`. A child process removes it at :meth:`remove`, or when this
    process ends for whatever reason."""

    def __init__(self) -> None:
        self.path = Path(tempfile.gettempdir()) / f"agentenv-fake-{secrets.token_hex(6)}"
        self._remover: subprocess.Popen[bytes] | None = None

    def make(self) -> None:
        """Create the directory. Idempotent. Raises OSError."""
        if self._remover is None:
            self._remover = subprocess.Popen(
                ["/bin/sh", "-c", _REMOVE, "sh", str(self.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C does not end it
            )
            self.path.mkdir(mode=0o700)

    async def remove(self) -> None:
        """Remove the directory. Idempotent."""
        remover, self._remover = self._remover, None
        if remover is not None:
            assert remover.stdin is not None
            remover.stdin.close()
            await asyncio.to_thread(remover.wait)


def environment(directory: Path) -> dict[str, str]:
    """Variables that stand for a slot's own ``/run/agentenv/bin`` and ``/etc/gitconfig``, made in ``directory``."""
    link_programs(directory / "bin")
    (directory / "gitconfig").write_text(GITCONFIG)
    return {"PATH": f"{PATH}:{directory / 'bin'}", "GIT_CONFIG_SYSTEM": str(directory / "gitconfig")}


@dataclasses.dataclass(frozen=True)
class EpochFiles:
    """Files of one epoch of a slot."""

    directory: Path
    binaries: Binaries

    @property
    def workspace(self) -> Path:
        """The workspace's path on this machine."""
        return self.directory / "workspace"


class Bare:
    """Starts agents as ordinary child processes, which see the whole machine."""

    env: Mapping[str, str] = MappingProxyType({MARK: WORKSPACE})
    """Added to the environment of all processes in a slot."""

    def paths(self, files: EpochFiles) -> SlotPaths:
        """Paths as seen by the slot's processes."""
        workspace, tmux = str(files.workspace), str(files.directory / "tmux")
        return SlotPaths(
            workspace,
            str(files.binaries.files),
            tmux,
            workspace,
            beneath_workspace=True,
            dial=str(files.binaries.dial),
            listen=str(files.binaries.listen),
            ripgrep=str(files.binaries.ripgrep),
        )

    def argv(self, files: EpochFiles, peer: int) -> list[str]:
        """The agent's command; its socket is the descriptor ``peer``."""
        return [str(files.binaries.agent), str(peer)]


BARE: Final = Bare()


class Agent:
    """A slot's agent, from its start to its end. ``on_end`` is called if it ends unexpectedly."""

    def __init__(self, argv: Sequence[str], peer: int, on_end: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._process = subprocess.Popen(
            argv, pass_fds=[peer], cwd="/", env={}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        self._pidfd = os.pidfd_open(self._process.pid)
        self._expected = False
        self.killed = False
        """It was killed by a signal, and so has not killed the slot's processes."""
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        """Pid of its process."""
        return self._process.pid

    async def end(self) -> None:
        """After its socket was closed: wait until it has killed the slot's processes and ended."""
        self._expected = True
        try:
            async with asyncio.timeout(_END_S):
                await asyncio.shield(self.ended)
        except TimeoutError:
            self._process.kill()
            await self.ended

    def _reap(self) -> None:
        self.killed = self._process.wait() < 0
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.ended.set_result(None)
        if not self._expected:
            self._on_end()


class StandInSlot:
    """One slot. It is only a pair of sockets until a server sends something, which starts its agent."""

    def __init__(
        self, number: int, directory: Path, binaries: Binaries, wrap: Bare, on_lost: Callable[[StandInSlot, str], None]
    ) -> None:
        self.number = number
        self.epoch = 0
        self.lease: dict[str, Any] | None = None
        self.workdir = ""
        """Of its root, as in :class:`RootSpec`."""
        self.failed = ""
        """Reason why its last reset failed; empty if it did not."""
        self.change = asyncio.Lock()
        """Held while it is sealed or reset."""
        self.agent: Agent | None = None
        self._directory = directory
        self._binaries = binaries
        self._wrap = wrap
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._ours: socket.socket | None = None
        """The server's end, kept because the agent outlives a server."""
        self._peer: socket.socket | None = None
        """The agent's end, until the agent is started."""

    @property
    def files(self) -> EpochFiles:
        """A new directory in each epoch, so that no epoch sees files of an earlier one."""
        return EpochFiles(self._directory / f"{self.number}.{self.epoch}", self._binaries)

    @property
    def paths(self) -> SlotPaths:
        """See :meth:`Bare.paths`."""
        return dataclasses.replace(self._wrap.paths(self.files), workdir=self.workdir)

    def socket(self) -> socket.socket:
        """The socket to pass to a server. The agent is at its other end, or is started by the first message."""
        if self._ours is None or self.agent is None:
            self._close()  # unread messages of an earlier server are dropped
            self._ours, self._peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._loop.add_reader(self._peer, self._on_message)
        return self._ours

    def start(self) -> None:
        """Start the agent. Raises OSError, ProtocolError."""
        assert self._ours is not None
        assert self._peer is not None
        self._loop.remove_reader(self._peer)
        peer, self._peer = self._peer, None
        with peer:
            self.files.workspace.mkdir(parents=True, exist_ok=True)
            argv = self._wrap.argv(self.files, peer.fileno())
            if f"{self.workdir}/".startswith(f"{WORKSPACE}/"):  # elsewhere it would be this machine's
                argv.append(self.paths.start)
            self.agent = Agent(argv, peer.fileno(), lambda: self._on_lost(self, "the slot's agent ended"))
        # HELLO is for the starter of the agent; it must not reach the server, which reads the same end.
        self._ours.settimeout(_HELLO_S)
        hello = protocol.receive(self._ours)
        if hello is None or hello.kind is not protocol.Kind.HELLO:
            raise ProtocolError("the slot's agent did not say hello")

    def hang_up(self) -> None:
        """Close the agent's connection, upon which it kills all processes of the slot and ends. Idempotent."""
        if self.agent is None:
            self._close()
        elif self._ours is not None:
            with contextlib.suppress(OSError):
                self._ours.shutdown(socket.SHUT_RDWR)

    async def end(self) -> None:
        """Hang up and wait until no process of the slot runs. Idempotent."""
        self.hang_up()
        agent, self.agent = self.agent, None
        self._close()
        if agent is not None:
            await agent.end()
            if agent.killed:
                await kill_marked(self.files.workspace)

    async def discard(self) -> None:
        """Remove the slot's files."""
        if self.files.directory.exists():
            await asyncio.to_thread(shutil.rmtree, self.files.directory, ignore_errors=True)

    def _on_message(self) -> None:
        try:
            self.start()
        except (OSError, ProtocolError) as error:
            self._on_lost(self, f"its agent cannot be started: {error}")

    def _close(self) -> None:
        if self._peer is not None:
            self._loop.remove_reader(self._peer)
            self._peer.close()
        if self._ours is not None:
            self._ours.close()
        self._ours = self._peer = None


async def copy_tree(source: Path, target: Path) -> str:
    """Copy a directory to a new one, as exactly as this user can; returns what went wrong. What was copied then is
    removed."""
    await asyncio.to_thread(source.mkdir, parents=True, exist_ok=True)
    await asyncio.to_thread(target.mkdir, parents=True)
    copying = await asyncio.create_subprocess_exec(
        *("cp", "--archive", "--", f"{source}/.", str(target)), stderr=subprocess.PIPE
    )
    _, said = await copying.communicate()
    if copying.returncode:
        await asyncio.to_thread(shutil.rmtree, target, ignore_errors=True)
    return said.decode(errors="replace").strip() if copying.returncode else ""


async def kill_marked(workspace: Path) -> None:
    """Kill the processes of a slot whose agent was killed."""
    for _ in range(_PASSES):  # they may fork in the meantime, and dying takes a moment
        left = marked(f"{MARK}={workspace}")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        await asyncio.sleep(_PASS_S)


def marked(variable: str) -> list[int]:
    """Pids of all processes with this entry in their initial environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


class StandIn:
    """Keeps the slots of one container, for one server after another. ``directory`` holds the slots' files.

    ``eager``: start agents at once, not at the first message; for a server in another process, which would receive
    their HELLO.
    """

    def __init__(
        self,
        spec: SandboxSpec,
        token: str,
        directory: Path,
        binaries: Binaries,
        *,
        wrap: Bare = BARE,
        eager: bool = False,
        shell: str = "",
    ) -> None:
        env = {**spec.env, **wrap.env}
        self._hello = Hello({**dataclasses.asdict(spec), "env": env}, token, "none", list(WEAKER), [], shell)
        self._eager = eager
        self.slots = [StandInSlot(number, directory, binaries, wrap, self._lost) for number in range(spec.slots)]
        self.serving = asyncio.Event()
        self.fail_next_reset = False
        self.takes_roots = False
        """Whether it says that slots have the root that is asked for; they never do."""
        self._checkpoints = directory / "checkpoints"
        self._link: ServerLink | None = None
        self._tasks = TaskSet()

    def greet(self) -> socket.socket:
        """Create the control socket of a new server, which the caller owns; an earlier server is disconnected."""
        if self._link is not None:
            self._link.drain()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.serving.clear()
        self._link = ServerLink(ours, len(self.slots), self.take, self._broken)
        self._link.send(self._hello)
        for slot in self.slots:
            if slot.failed:
                self._notify_failed(slot)
            elif not slot.change.locked():
                self._notify_ready(slot, kept=True)
        return theirs

    def hang_up(self) -> None:
        """Close the connections to the server and all agents, as if the container had been killed. Idempotent."""
        link, self._link = self._link, None  # a reset that ends later makes no socket for a server that is gone
        if link is not None:
            link.close()
        for slot in self.slots:
            slot.hang_up()

    async def aclose(self) -> None:
        """Hang up, then wait until all processes and files are removed. Idempotent."""
        self.hang_up()
        await self._tasks.wait()
        await asyncio.gather(*(slot.end() for slot in self.slots))
        await asyncio.gather(*(slot.discard() for slot in self.slots))

    async def lose(self, number: int, loss: LossReason, reason: str) -> None:
        """Report the slot as lost, and reset it."""
        slot = self.slots[number]
        self._notify(SlotLost(number, loss, reason))
        await self.reset(slot, slot.epoch)

    # -- requests of the server --------------------------------------------------------------------

    def take(self, request: Request) -> None:
        """Handle one request."""
        match request:
            case Serving():
                self.serving.set()
            case Ping():
                self._notify(Pong(Stalls()))
            case Fence(generation):
                self._hello = dataclasses.replace(self._hello, generation=max(generation, self._hello.generation))
            case Unattended():
                pass  # it lives as long as the backend it is part of
            case Drop():
                shutil.rmtree(self._checkpoints / request.checkpoint, ignore_errors=True)
            case Export(checkpoint=name, layer=layer):
                self._notify(Exported(name, layer, 0, "checkpoint: this container has plain slots only"))
            case Remember() | Reset() | Seal() | Reroot() | Freeze() if request.epoch != self.slots[request.slot].epoch:
                pass
            case Remember():
                self.slots[request.slot].lease = request.lease
            case Reset():
                self._tasks.start(f"slot {request.slot}", self.reset(self.slots[request.slot], request.epoch), "reset")
            case Reroot():
                root = RootSpec.parse(request.root)
                self._tasks.start(f"slot {request.slot}", self.reroot(self.slots[request.slot], root), "reroot")
            case Freeze():
                checkpoint = self._checkpoints / request.checkpoint
                self._tasks.start(
                    f"slot {request.slot}", self.freeze(self.slots[request.slot], request.epoch, checkpoint), "freeze"
                )
            case Seal():
                self._tasks.start(f"slot {request.slot}", self.seal(self.slots[request.slot], request.epoch), "seal")

    async def reset(self, slot: StandInSlot, epoch: int) -> None:
        """End the slot's processes, remove its files, begin a new epoch; does nothing if ``epoch`` has ended."""
        async with slot.change:
            if slot.epoch != epoch:
                return
            slot.lease = None
            slot.workdir = ""
            await slot.end()
            await slot.discard()
            slot.epoch += 1
            if self.fail_next_reset:
                self.fail_next_reset = False
                slot.failed = "this reset was configured to fail"
                self._notify_failed(slot)
            else:
                self._notify_ready(slot, kept=False)

    async def freeze(self, slot: StandInSlot, epoch: int, checkpoint: Path) -> None:
        """End the slot's processes, keep its files and a copy of them; does nothing if ``epoch`` has ended."""
        async with slot.change:
            if slot.epoch != epoch:
                return
            await slot.end()
            failed = await copy_tree(slot.files.workspace, checkpoint)
            if failed:
                self._notify(NotFrozen(slot.number, slot.epoch, failed, ended=True))
            self._notify_ready(slot, kept=True)

    async def reroot(self, slot: StandInSlot, root: RootSpec) -> None:
        """Give the slot its workdir, and the files of a checkpoint. Of an image: say that it has it, or that it cannot
        have one."""
        if not root.image:
            await self._restore(slot, root)
            return
        if self.takes_roots:
            self._notify_ready(slot, kept=False, view=SlotView({}, "", "", "", stands_in=False, tmux=""))
            return
        none = SandboxUnavailableError("the fake backend has no images", next_step="use another backend")
        self._notify(SlotRefused(slot.number, slot.epoch, none.code, str(none)))
        await self.reset(slot, slot.epoch)

    async def _restore(self, slot: StandInSlot, root: RootSpec) -> None:
        checkpoint = self._checkpoints / root.checkpoint
        async with slot.change:
            there = not root.checkpoint or await asyncio.to_thread(checkpoint.is_dir)
            failed = "" if there else "there is no such checkpoint in this container (any more)"
            if not failed:
                await slot.end()
                await slot.discard()
                slot.workdir = root.workdir
            if root.checkpoint and not failed:
                failed = await copy_tree(checkpoint, slot.files.workspace)
            if not failed:
                self._notify_ready(slot, kept=False)
                return
            self._notify(SlotRefused(slot.number, slot.epoch, CheckpointError.code, failed))
        await self.reset(slot, slot.epoch)

    async def seal(self, slot: StandInSlot, epoch: int) -> None:
        """End the slot's processes, keep its files; does nothing if ``epoch`` has ended."""
        async with slot.change:
            if slot.epoch == epoch:
                await slot.end()
                self._notify_ready(slot, kept=True)

    # ----------------------------------------------------------------------------------------------

    def _lost(self, slot: StandInSlot, reason: str) -> None:
        self._tasks.start(f"slot {slot.number}", self.lose(slot.number, LossReason.ended, reason), "loss")

    def _broken(self, reason: str) -> None:
        log.info("the server: %s", reason)

    def _notify_ready(self, slot: StandInSlot, *, kept: bool, view: SlotView | None = None) -> None:
        if self._link is not None and not slot.failed:
            agent = slot.socket()
            if self._eager and slot.agent is None:
                slot.start()
            packet = SlotReady(slot.number, slot.epoch, slot.lease, kept, LimitFiles(), slot.paths, view)
            self._link.send(packet, agent.fileno())

    def _notify_failed(self, slot: StandInSlot) -> None:
        self._notify(SlotFailed(slot.number, slot.epoch, slot.failed))

    def _notify(self, packet: SupervisorPacket) -> None:
        if self._link is not None:
            self._link.send(packet)
