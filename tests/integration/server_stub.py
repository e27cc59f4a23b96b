"""A supervisor for tests of the server alone: real slot agents under a plain bubblewrap, the real control
protocol, no cgroups, no uids of their own. What it does not do (limits, proofs) the real one is tested for."""

from __future__ import annotations

import array
import asyncio
import contextlib
import dataclasses
import json
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentenv.sandbox.culprits import Loss
from agentenv.sandbox.loop_watch import Stalls
from agentenv.sandbox.slotagent import protocol
from agentenv.sandbox.slotagent.build import ensure_built
from agentenv.sandbox.supervisor import static_bash
from agentenv.wire.spec import SandboxSpec

TOKEN = "t" * 32
_STEADY = 25


class StubSupervisor:
    """Serves ``slots`` slots. ``crash()`` kills the server and starts another over the same slots."""

    def __init__(self, slots: int = 2, **spec: Any) -> None:
        self.spec = SandboxSpec(
            container="stub", token_file="/nonexistent", data_dir="/nonexistent", slots=slots, **spec
        )
        self.epochs = [0] * slots
        self.leases: list[dict[str, Any] | None] = [None] * slots
        self.agents: list[subprocess.Popen[bytes]] = []
        self.sockets: list[socket.socket] = []
        self.requests: list[dict[str, Any]] = []
        self.serving = asyncio.Event()
        self.broken: set[int] = set()
        """Slots whose next reset fails."""
        self.sealing = True
        """False: seals wait for :meth:`finish_seal` or :meth:`fail`."""
        self.server: subprocess.Popen[bytes] | None = None
        self._binaries = ensure_built()
        self._temporary = tempfile.TemporaryDirectory(prefix="agentenv-stub-")
        self._listen = socket.create_server(("127.0.0.1", 0))
        self._control: socket.socket | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listen.getsockname()[1]}"

    def workspace(self, slot: int) -> Path:
        return Path(self._temporary.name) / f"slot-{slot}-{self.epochs[slot]}"

    async def __aenter__(self) -> Self:
        for slot in range(self.spec.slots):
            process, agent = self._start_agent(slot)
            self.agents.append(process)
            self.sockets.append(agent)
        await self.start_server()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.server is not None:
            self.server.terminate()
            self.server.wait(10)
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
        for process, agent in zip(self.agents, self.sockets, strict=True):
            agent.close()
            process.kill()
            process.wait()
        self._listen.close()
        self._temporary.cleanup()

    async def start_server(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "agentenv.sandbox.serve"]
        command += ["--control-fd", str(theirs.fileno()), "--listen-fd", str(self._listen.fileno())]
        self.server = subprocess.Popen(command, pass_fds=[theirs.fileno(), self._listen.fileno()])
        theirs.close()
        self._control = ours
        self.serving.clear()
        self._send(
            {
                "op": "hello",
                "spec": dataclasses.asdict(self.spec),
                "token": TOKEN,
                "isolation": "user",
                "weaker": [],
                "proofs": [],
                "shell": str(static_bash.find() or ""),
            }
        )
        for slot in range(self.spec.slots):
            self._ready(slot, kept=True)
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours, self._readable)
        async with asyncio.timeout(20):
            await self.serving.wait()

    async def crash(self) -> None:
        """SIGKILL the server; a new one takes over."""
        assert self.server is not None
        assert self._control is not None
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        self.server.send_signal(signal.SIGKILL)
        self.server.wait()
        await self.start_server()

    def kill_agent(self, slot: int, loss: Loss = Loss.ended) -> None:
        """As if PID 1 of the slot had died; the supervisor says how it was lost, and resets the slot by itself."""
        self.agents[slot].kill()
        self.agents[slot].wait()
        self._send({"op": "slot_lost", "slot": slot, "loss": loss, "reason": "the agent was killed"})
        self._reset(slot)

    def finish_seal(self, slot: int) -> None:
        """New namespaces over the same workspace."""
        self._replace_agent(slot)
        self._ready(slot, kept=True)

    def fail(self, slot: int, reason: str) -> None:
        """The slot is of no use any more."""
        self._send({"op": "slot_failed", "slot": slot, "epoch": self.epochs[slot], "reason": reason})

    def hang_up(self) -> None:
        """As if the supervisor had died."""
        assert self._control is not None
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        self._control = None

    # -- inside

    def _start_agent(self, slot: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
        workspace = self.workspace(slot)
        workspace.mkdir(exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [
            "bwrap",
            "--unshare-all",
            "--as-pid-1",
            "--die-with-parent",
            "--ro-bind",
            "/usr",
            "/usr",
            "--symlink",
            "usr/bin",
            "/bin",
        ]
        argv += [
            "--symlink",
            "usr/lib",
            "/lib",
            "--symlink",
            "usr/lib64",
            "/lib64",
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--tmpfs",
            "/tmp",
        ]
        argv += ["--ro-bind", str(self._binaries.agent), "/run/agentenv/slotagent"]
        argv += ["--ro-bind", str(self._binaries.files), "/run/agentenv/slotfiles"]
        argv += ["--bind", str(workspace), "/workspace", "/run/agentenv/slotagent", str(theirs.fileno())]
        process = subprocess.Popen(argv, pass_fds=[theirs.fileno()])
        theirs.close()
        ours.settimeout(10)
        hello = protocol.receive(ours)
        assert hello is not None
        assert hello.kind is protocol.Kind.HELLO
        return process, ours

    def _replace_agent(self, slot: int) -> None:
        self.sockets[slot].close()
        self.agents[slot].kill()
        self.agents[slot].wait()
        self.agents[slot], self.sockets[slot] = self._start_agent(slot)

    def _reset(self, slot: int) -> None:
        self.epochs[slot] += 1
        self.leases[slot] = None
        if slot in self.broken:
            self._send({"op": "slot_failed", "slot": slot, "epoch": self.epochs[slot], "reason": "not clean"})
            return
        self._replace_agent(slot)
        self._ready(slot, kept=False)

    def _ready(self, slot: int, *, kept: bool) -> None:
        packet = {
            "op": "slot_ready",
            "slot": slot,
            "epoch": self.epochs[slot],
            "lease": self.leases[slot],
            "kept": kept,
            "limits": {"version": 1, "memory": None, "pids": None},
        }
        self._send(packet, self.sockets[slot].fileno())

    def _send(self, packet: dict[str, Any], *fds: int) -> None:
        assert self._control is not None
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._control.sendmsg([json.dumps(packet).encode()], rights)

    def _readable(self) -> None:
        assert self._control is not None
        with contextlib.suppress(BlockingIOError):
            packet = self._control.recv(65536)
            if not packet:
                asyncio.get_running_loop().remove_reader(self._control)
                return
            self._take(json.loads(packet))

    def _take(self, request: dict[str, Any]) -> None:
        self.requests.append(request)
        if request["op"] == "serving":
            self.serving.set()
            return
        if request["op"] == "ping":
            self._send({"op": "pong", "stalls": dataclasses.asdict(Stalls())})
            return
        slot = request["slot"]
        if request["epoch"] != self.epochs[slot]:
            return
        if request["op"] == "remember":
            self.leases[slot] = request["lease"]
        elif request["op"] == "reset":
            self._reset(slot)
        elif request["op"] == "seal" and self.sealing:
            self.finish_seal(slot)


async def descriptors(pid: int) -> int:
    """How many descriptors a process has open, once that has not changed for a while."""
    seen: list[int] = []
    async with asyncio.timeout(30):
        while len(seen) < _STEADY or len(set(seen[-_STEADY:])) > 1:
            seen.append(len(list(Path(f"/proc/{pid}/fd").iterdir())))
            await asyncio.sleep(0.02)
    return seen[-1]
