"""A slot's agent as an ordinary child, and sessions over it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from agentenv.sandbox.server.agent_link import AgentLink
from agentenv.sandbox.server.poller import Lane, Poller
from agentenv.sandbox.server.process import SlotIo
from agentenv.sandbox.server.slot_sessions import SlotHost, SlotSessions
from agentenv.sandbox.slot_paths import SlotPaths
from agentenv.sandbox.slotagent import protocol
from agentenv.sandbox.slotagent.build import ensure_built
from tests.waiting import START_S

WAIT_S = START_S


class BoxHost(SlotHost):
    """What sessions need of a slot."""

    def __init__(self, workspace: Path, env: Mapping[str, str]) -> None:
        programs = ensure_built()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._agent = subprocess.Popen([programs.agent, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        ours.settimeout(WAIT_S)
        assert protocol.receive(ours) == protocol.Message(protocol.Kind.HELLO, arg=protocol.VERSION)
        self._poller = Poller(asyncio.get_running_loop())
        lane = Lane(self._poller)
        self._link = AgentLink(ours, lane, 0, lambda loss, reason: None)
        paths = SlotPaths(str(workspace), str(programs.files), f"{workspace}.tmux")
        super().__init__(SlotIo(self._link, lane, paths=paths), env)

    @property
    def busy(self) -> bool:
        """Whether any program runs."""
        return bool(self._link._runs)

    def close(self) -> None:
        """Kill everything. Repeatable."""
        self._link.close()
        self._poller.close()
        self._agent.wait(WAIT_S)


class BoxSessions(SlotSessions):
    """The sessions of one slot, and what runs in them."""

    def __init__(self, workspace: Path, env: Mapping[str, str], cap_bytes: int) -> None:
        self._box = BoxHost(workspace, env)
        super().__init__(self._box, cap_bytes)

    def close(self) -> None:
        """Kill everything, and let go of it. Repeatable."""
        super().close()
        self._box.close()
