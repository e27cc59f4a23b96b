"""The stand-in supervisor for tests of the server alone: the server is a process of its own, and its slots have a plain
bubblewrap around them, no cgroups, no uids of their own. What that leaves out, the real supervisor is tested for."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from agentenv.sandbox.control_protocol import Request, Seal
from agentenv.sandbox.slot_loss import LossReason
from agentenv.sandbox.slot_paths import SlotPaths
from agentenv.sandbox.slotagent.build import ensure_built
from agentenv.sandbox.supervisor import static_bash
from agentenv.slots.backends.fake.stand_in import Bare, EpochFiles, Scratch, StandIn, StandInSlot
from agentenv.wire.spec import SandboxSpec
from tests.waiting import START_S

TOKEN = "t" * 32
_STEADY = 100


class Boxed(Bare):
    """An agent that is PID 1, in a slot with mounts of its own."""

    env: Mapping[str, str] = MappingProxyType({})

    def paths(self, files: EpochFiles) -> SlotPaths:
        return SlotPaths()

    def argv(self, files: EpochFiles, peer: int) -> list[str]:
        return [
            *("bwrap", "--unshare-all", "--as-pid-1", "--die-with-parent", "--ro-bind", "/usr", "/usr"),
            *("--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
            *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
            *("--ro-bind", str(files.binaries.agent), "/run/agentenv/slotagent"),
            *("--ro-bind", str(files.binaries.files), "/run/agentenv/slotfiles"),
            *("--bind", str(files.workspace), "/workspace", "/run/agentenv/slotagent", str(peer)),
        ]


class StubSupervisor(StandIn):
    """Serves ``slots`` slots. ``crash()`` kills the server and starts another over the same slots."""

    def __init__(self, slots: int = 2, **spec: Any) -> None:
        self._scratch = Scratch()
        self.requests: list[Request] = []
        self.may_seal = asyncio.Event()
        """Cleared: seals wait."""
        self.may_seal.set()
        self.server: subprocess.Popen[bytes] | None = None
        self._listen = socket.create_server(("127.0.0.1", 0))
        super().__init__(
            SandboxSpec(container="stub", token_file="/nonexistent", data_dir="/nonexistent", slots=slots, **spec),
            TOKEN,
            self._scratch.path,
            ensure_built(),
            wrap=Boxed(),
            eager=True,
            shell=str(static_bash.find() or ""),
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listen.getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._scratch.make()
        await self.start_server()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.server is not None:
            self.server.terminate()
            self.server.wait(START_S)
        await self.aclose()
        self._listen.close()
        await self._scratch.remove()

    async def start_server(self) -> None:
        with self.greet() as control:
            command = [sys.executable, "-m", "agentenv.sandbox.serve"]
            command += ["--control-fd", str(control.fileno()), "--listen-fd", str(self._listen.fileno())]
            self.server = subprocess.Popen(command, pass_fds=[control.fileno(), self._listen.fileno()])
        async with asyncio.timeout(START_S):
            await self.serving.wait()

    async def crash(self) -> None:
        """SIGKILL the server; a new one takes over."""
        assert self.server is not None
        self.server.send_signal(signal.SIGKILL)
        self.server.wait()
        await self.start_server()

    async def kill_agent(self, slot: int, loss: LossReason = LossReason.ended) -> None:
        """As if PID 1 of the slot had died; the supervisor says how it was lost, and resets the slot by itself."""
        await self.lose(slot, loss, "the agent was killed")

    async def until_sealing(self) -> None:
        """Until the server has asked for a seal."""
        async with asyncio.timeout(START_S):
            while not any(isinstance(request, Seal) for request in self.requests):
                await asyncio.sleep(0.005)

    def fail(self, slot: int, reason: str) -> None:
        """The slot is of no use any more."""
        self.slots[slot].failed = reason
        self._notify_failed(self.slots[slot])

    def take(self, request: Request) -> None:
        self.requests.append(request)
        super().take(request)

    async def seal(self, slot: StandInSlot, epoch: int) -> None:
        await self.may_seal.wait()
        await super().seal(slot, epoch)


async def descriptors(pid: int) -> int:
    """How many descriptors a process has open, once that has not changed for a while."""
    seen: list[int] = []
    async with asyncio.timeout(START_S):
        while len(seen) < _STEADY or len(set(seen[-_STEADY:])) > 1:
            seen.append(len(list(Path(f"/proc/{pid}/fd").iterdir())))
            await asyncio.sleep(0.02)
    return seen[-1]
