"""Runs single commands through a slot's agent: the part of its protocol that the self-test needs."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentenv.errors import ProtocolError
from agentenv.sandbox.slot_paths import WORKSPACE
from agentenv.sandbox.slotagent import protocol
from agentenv.sandbox.slotagent.protocol import Kind, Message
from agentenv.sandbox.supervisor.reaper import readable

_OUTPUT_BYTES = 64 * 1024


@dataclass(frozen=True)
class Ran:
    """The end of one command. ``errno`` is not 0 when it could not be started."""

    status: int = -1
    stdout: str = ""
    errno: int = 0


class AgentRunner:
    """Client of one agent; ``deadline_s`` bounds every wait. The socket stays the caller's."""

    def __init__(self, agent: socket.socket, deadline_s: float) -> None:
        self._agent = agent
        self._ends = time.monotonic() + deadline_s
        self._run = 0

    async def run(self, argv: Sequence[str], env: Mapping[str, str]) -> Ran:
        """Run a command to the end of its first process. Output beyond the capacity of a pipe would block: keep it
        short.

        Raises TimeoutError past the deadline, ProtocolError when the agent breaks the contract.
        """
        run, first = await self._spawn(argv, env)
        if first.kind is Kind.SPAWN_FAILED:
            return Ran(errno=first.arg)
        try:
            ended = await self._expect(Kind.EXIT, run)
            return Ran(os.waitstatus_to_exitcode(ended.arg), _drain(first.fds[0]))
        finally:
            _close(first.fds)

    async def leave_running(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a command, wait for its first output (or its end), and leave it running."""
        _, first = await self._spawn(argv, env)
        try:
            if first.fds:
                await readable(first.fds[0], max(0.0, self._ends - time.monotonic()))
        finally:
            _close(first.fds)

    async def kill_all(self) -> int:
        """Send KILL_ALL; returns how many processes the agent reports as killed."""
        protocol.send(self._agent, protocol.encode(Kind.KILL_ALL))
        return (await self._expect(Kind.KILLED, 0)).arg

    async def _spawn(self, argv: Sequence[str], env: Mapping[str, str]) -> tuple[int, Message]:
        self._run += 1
        payload = protocol.spawn_payload(argv, env, WORKSPACE)
        protocol.send(self._agent, protocol.encode(Kind.SPAWN, run=self._run, payload=payload))
        while True:
            message = await self._next()
            if message.run == self._run and message.kind in (Kind.SPAWNED, Kind.SPAWN_FAILED):
                return self._run, message
            _close(message.fds)

    async def _expect(self, kind: Kind, run: int) -> Message:
        while True:
            message = await self._next()
            if message.kind is kind and message.run == run:
                return message
            _close(message.fds)

    async def _next(self) -> Message:
        await readable(self._agent.fileno(), max(0.0, self._ends - time.monotonic()))
        message = protocol.receive(self._agent)
        if message is None:
            raise ProtocolError("the slot's agent ended")
        return message


def _drain(fd: int) -> str:
    os.set_blocking(fd, False)
    found = b""
    try:
        while chunk := os.read(fd, _OUTPUT_BYTES):
            found += chunk
    except BlockingIOError:
        pass
    return found.decode(errors="replace")


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
