"""A supervisor that isolates nothing: real slot agents, as ordinary child processes, for a real sandbox server.

It speaks the control protocol (:mod:`agentenv.sandbox.control_protocol`). What it leaves out, namespaces, limits, uids
and proofs, is the real one's (:mod:`agentenv.sandbox.supervisor`). It needs no privileges, and no program but the
compiled ones.
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

from agentenv.errors import ProtocolError
from agentenv.sandbox.control_protocol import (
    Hello,
    Ping,
    Pong,
    Remember,
    Request,
    Reset,
    Seal,
    Serving,
    SlotFailed,
    SlotLost,
    SlotReady,
    SupervisorPacket,
)
from agentenv.sandbox.culprits import Loss
from agentenv.sandbox.limit_watch import LimitFiles
from agentenv.sandbox.loop_watch import Stalls
from agentenv.sandbox.slot_paths import WORKSPACE, SlotPaths
from agentenv.sandbox.slotagent import protocol
from agentenv.sandbox.slotagent.build import Binaries
from agentenv.sandbox.supervisor.server_link import ServerLink
from agentenv.tasks import TaskSet
from agentenv.wire.spec import SandboxSpec

log = logging.getLogger(__name__)

WEAKER = ("the fake backend isolates nothing: commands run as the caller, in a temporary directory",)
MARK = "AGENTENV_FAKE_SLOT"
"""The variable by which what runs in a slot is found: where its workspace lies."""
_HELLO_S = 10.0
_PASSES, _PASS_S = 200, 0.01
_END_S = 10.0
"""How long an agent may take to kill all that runs in its slot, before it is killed itself."""
_REMOVE = 'read -r _; for _ in 1 2 3 4 5 6 7 8 9; do rm -rf -- "$1" 2>/dev/null && exit; sleep 0.2; done'


class Scratch:
    """A temporary directory, made at its first use. A child process removes it at :meth:`remove`, or when this process
    has ended, however it did."""

    def __init__(self) -> None:
        self.path = Path(tempfile.gettempdir()) / f"agentenv-fake-{secrets.token_hex(6)}"
        self._remover: subprocess.Popen[bytes] | None = None

    def make(self) -> None:
        """Repeatable. Raises OSError."""
        if self._remover is None:
            self._remover = subprocess.Popen(
                ["/bin/sh", "-c", _REMOVE, "sh", str(self.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is not for it
            )
            self.path.mkdir(mode=0o700)

    async def remove(self) -> None:
        """Repeatable."""
        remover, self._remover = self._remover, None
        if remover is not None:
            assert remover.stdin is not None
            remover.stdin.close()
            await asyncio.to_thread(remover.wait)


@dataclasses.dataclass(frozen=True)
class Place:
    """What of one life of a slot lies outside of its processes."""

    directory: Path
    binaries: Binaries

    @property
    def workspace(self) -> Path:
        """What the slot's processes call so, by whatever path."""
        return self.directory / "workspace"


class Bare:
    """An agent as an ordinary child: it and what it runs see the machine as it is."""

    env: Mapping[str, str] = MappingProxyType({MARK: WORKSPACE})
    """In the environment of all that runs in a slot."""

    def paths(self, place: Place) -> SlotPaths:
        """Where things lie for what runs in the slot."""
        return SlotPaths(str(place.workspace), str(place.binaries.files), str(place.directory / "tmux"))

    def argv(self, place: Place, peer: int) -> list[str]:
        """The command that becomes the agent, whose socket is descriptor ``peer``."""
        return [str(place.binaries.agent), str(peer)]


BARE: Final = Bare()


class Agent:
    """A slot's agent, from its start to its end. ``on_end`` is called when it ends before it was told to."""

    def __init__(self, argv: Sequence[str], peer: int, on_end: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._process = subprocess.Popen(
            argv, pass_fds=[peer], cwd="/", env={}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        self._pidfd = os.pidfd_open(self._process.pid)
        self._told = False
        self.killed = False
        """It has not ended by itself, and so has not killed what ran in its slot."""
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    async def end(self) -> None:
        """It has been hung up on: wait until all that runs in its slot is killed, and it has ended."""
        self._told = True
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
        if not self._told:
            self._on_end()


class Slot:
    """One slot. Until a server has something to say to its agent, it is no more than a pair of sockets."""

    def __init__(
        self, number: int, directory: Path, binaries: Binaries, wrap: Bare, on_lost: Callable[[Slot, str], None]
    ) -> None:
        self.number = number
        self.epoch = 0
        self.lease: dict[str, Any] | None = None
        self.failed = ""
        """Why its last reset could not be proved."""
        self.change = asyncio.Lock()
        """Held while it is sealed, or made anew."""
        self.agent: Agent | None = None
        self._directory = directory
        self._binaries = binaries
        self._wrap = wrap
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._ours: socket.socket | None = None
        """A copy of what the server has: the agent outlives a server."""
        self._peer: socket.socket | None = None
        """The end of an agent that is not started yet."""

    @property
    def place(self) -> Place:
        """Another one in each epoch: nothing of an earlier is seen in a later."""
        return Place(self._directory / f"{self.number}.{self.epoch}", self._binaries)

    @property
    def paths(self) -> SlotPaths:
        """See :meth:`Bare.paths`."""
        return self._wrap.paths(self.place)

    def socket(self) -> socket.socket:
        """What a server is handed: at the other end the agent is, or will be when it is spoken to."""
        if self._ours is None or self.agent is None:
            self._close()  # what a former server has said to no agent yet, nobody hears
            self._ours, self._peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._loop.add_reader(self._peer, self._spoken_to)
        return self._ours

    def start(self) -> None:
        """Start the agent. Raises OSError, ProtocolError."""
        assert self._ours is not None
        assert self._peer is not None
        self._loop.remove_reader(self._peer)
        peer, self._peer = self._peer, None
        with peer:
            self.place.workspace.mkdir(parents=True, exist_ok=True)
            argv = self._wrap.argv(self.place, peer.fileno())
            self.agent = Agent(argv, peer.fileno(), lambda: self._on_lost(self, "the slot's agent ended"))
        # It is for whoever starts an agent; the server, which reads the same end, is not told of it.
        self._ours.settimeout(_HELLO_S)
        hello = protocol.receive(self._ours)
        if hello is None or hello.kind is not protocol.Kind.HELLO:
            raise ProtocolError("the slot's agent did not say hello")

    def hang_up(self) -> None:
        """The agent now kills all that runs in the slot, and ends. Repeatable."""
        if self.agent is None:
            self._close()
        elif self._ours is not None:
            with contextlib.suppress(OSError):
                self._ours.shutdown(socket.SHUT_RDWR)

    async def end(self) -> None:
        """Until nothing runs in the slot any more. Repeatable."""
        self.hang_up()
        agent, self.agent = self.agent, None
        self._close()
        if agent is not None:
            await agent.end()
            if agent.killed:
                await kill_marked(self.place.workspace)

    async def discard(self) -> None:
        """Remove what the slot has left of its files."""
        if self.place.directory.exists():
            await asyncio.to_thread(shutil.rmtree, self.place.directory, ignore_errors=True)

    def _spoken_to(self) -> None:
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


async def kill_marked(workspace: Path) -> None:
    """Kill what an agent that was killed has left of its slot."""
    for _ in range(_PASSES):  # they may fork meanwhile, and take a moment to die
        left = marked(f"{MARK}={workspace}")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        await asyncio.sleep(_PASS_S)


def marked(variable: str) -> list[int]:
    """The processes that were started with this in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


class StandIn:
    """Keeps the slots of one container, for one server after the other. The slots' files lie in ``directory``.

    ``eager``: agents are started before they are spoken to; for a server in another process, which would be told of
    their start.
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
        self.slots = [Slot(number, directory, binaries, wrap, self._lost) for number in range(spec.slots)]
        self.serving = asyncio.Event()
        self.fail_next_reset = False
        self._link: ServerLink | None = None
        self._tasks = TaskSet()

    def greet(self) -> socket.socket:
        """The control socket of a new server, the caller's now; one before it is not heard any more."""
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
        """On the server and on every agent, as if the container had been killed. Repeatable."""
        if self._link is not None:
            self._link.close()
        for slot in self.slots:
            slot.hang_up()

    async def aclose(self) -> None:
        """Until nothing is left, of processes and of files. Repeatable."""
        self.hang_up()
        await self._tasks.wait()
        await asyncio.gather(*(slot.end() for slot in self.slots))
        await asyncio.gather(*(slot.discard() for slot in self.slots))

    async def lose(self, number: int, loss: Loss, reason: str) -> None:
        """The slot ends, without having been asked to, and is made anew."""
        slot = self.slots[number]
        self._notify(SlotLost(number, loss, reason))
        await self.reset(slot, slot.epoch)

    # -- what the server asks ----------------------------------------------------------------------

    def take(self, request: Request) -> None:
        """One request."""
        match request:
            case Serving():
                self.serving.set()
            case Ping():
                self._notify(Pong(Stalls()))
            case Remember() | Reset() | Seal() if request.epoch != self.slots[request.slot].epoch:
                pass
            case Remember():
                self.slots[request.slot].lease = request.lease
            case Reset():
                self._tasks.start(f"slot {request.slot}", self.reset(self.slots[request.slot], request.epoch), "reset")
            case Seal():
                self._tasks.start(f"slot {request.slot}", self.seal(self.slots[request.slot], request.epoch), "seal")

    async def reset(self, slot: Slot, epoch: int) -> None:
        """End all that runs in the slot, discard its files, begin a new epoch; unless ``epoch`` has ended meanwhile."""
        async with slot.change:
            if slot.epoch != epoch:
                return
            slot.lease = None
            await slot.end()
            await slot.discard()
            slot.epoch += 1
            if self.fail_next_reset:
                self.fail_next_reset = False
                slot.failed = "a reset was made to fail"
                self._notify_failed(slot)
            else:
                self._notify_ready(slot, kept=False)

    async def seal(self, slot: Slot, epoch: int) -> None:
        """End all that runs in the slot; its files stay. Nothing happens when ``epoch`` has ended meanwhile."""
        async with slot.change:
            if slot.epoch == epoch:
                await slot.end()
                self._notify_ready(slot, kept=True)

    # ----------------------------------------------------------------------------------------------

    def _lost(self, slot: Slot, reason: str) -> None:
        self._tasks.start(f"slot {slot.number}", self.lose(slot.number, Loss.ended, reason), "loss")

    def _broken(self, reason: str) -> None:
        log.info("the server: %s", reason)

    def _notify_ready(self, slot: Slot, *, kept: bool) -> None:
        if self._link is not None and not slot.failed:
            agent = slot.socket()
            if self._eager and slot.agent is None:
                slot.start()
            packet = SlotReady(slot.number, slot.epoch, slot.lease, kept, LimitFiles(), slot.paths)
            self._link.send(packet, agent.fileno())

    def _notify_failed(self, slot: Slot) -> None:
        self._notify(SlotFailed(slot.number, slot.epoch, slot.failed))

    def _notify(self, packet: SupervisorPacket) -> None:
        if self._link is not None:
            self._link.send(packet)
