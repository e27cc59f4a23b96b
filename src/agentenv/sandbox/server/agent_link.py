"""The server's connection to one slot agent: start runs, kill them, receive their results.

The agent's messages are untrusted input: they are bounded, every descriptor is checked to be a socket (or a
terminal), and a message about an unknown run means that the slot is lost. The server never has a pipe of a slot:
any process of the slot could block it for ever (``slotagent/agent/relay.c``).
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from agentenv.errors import ProtocolError
from agentenv.sandbox.descriptors import MOST_PER_SLOT
from agentenv.sandbox.server.poller import Lane
from agentenv.sandbox.slot_loss import LossReason
from agentenv.sandbox.slotagent.protocol import (
    MAX_PAYLOAD_BYTES,
    SCRIPT_PIPE,
    TERMINAL,
    TEXT_FD,
    Kind,
    Message,
    SpawnStep,
    Usage,
    encode,
    exit_status,
    exit_usage,
    failed_step,
    foreground_payload,
    input_inode,
    receive,
    send,
)

RUN_IDS = 512
"""Run ids are reused cyclically. Each server generation (``era``) has its own, so that a restarted server can kill
the runs of its predecessors: their numbers are lower."""
MAX_ERA = 2**22
MAX_UNSENT_BYTES = 4 * 1024 * 1024
"""Data that may wait for the agent to read: it is busy for milliseconds when many sessions start at once."""
MAX_EXEC_BYTES = 6 * 1024 * 1024
"""More than any kernel gives the arguments and environment of a program: three quarters of ``_STK_LIM``, 8 MiB, in
``bprm_stack_limits`` of Linux's fs/exec.c, whatever the limit of the stack."""
_READ_BY_ALL = 0o444
_ALL_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
# Plain numbers: enum arithmetic costs more than the surrounding system calls.
_SCRIPT_PIPE, _TERMINAL, _TEXT_FD = int(SCRIPT_PIPE), int(TERMINAL), int(TEXT_FD)

_PTMX = os.makedev(5, 2)


class RunEvents(Protocol):
    """Events of one run. ``on_spawn_failed``, ``on_exit`` or ``on_lost`` comes last."""

    def on_spawned(self, fds: tuple[int, ...], input_inode: int, pid: int) -> None:
        """The run has begun. ``fds`` (stdout, stderr and, with SCRIPT_PIPE, the script) are sockets, or with
        TERMINAL our side of its terminal; the receiver closes them. ``input_inode``: the pipe that is its standard
        input (0: none). ``pid``: its first process, as the slot sees it."""

    def on_spawn_failed(self, error: int, step: SpawnStep) -> None:
        """The run could not be started; ``error`` is an errno, ``step`` the step that failed."""

    def on_exit(self, status: int, usage: Usage) -> None:
        """The run's first process ended with this wait status. All output up to then is in the sockets."""

    def on_lost(self) -> None:
        """The agent is gone; this is the last event of the run."""


class TooManyRunsError(ValueError):
    """The slot has reached its limit of the server's descriptors (or of runs): nothing was started."""

    def __init__(self) -> None:
        super().__init__("the slot's limit of running programs is reached: end some of them")


class _Run:
    __slots__ = ("descriptors", "events", "sockets", "spawned", "terminal")

    def __init__(self, events: RunEvents, sockets: int, descriptors: int, *, terminal: bool) -> None:
        self.events = events
        self.sockets = sockets
        self.descriptors = descriptors
        self.terminal = terminal
        self.spawned = False


class AgentLink:
    """One agent's socket, from the supervisor's hand-over to :meth:`close`. Owns the socket.

    ``on_lost(loss, reason)`` is called once when the agent becomes unusable: with ``LossReason.ended`` when its end is
    closed, with another loss when it may still be alive.
    """

    def __init__(
        self,
        sock: socket.socket,
        lane: Lane,
        era: int,
        on_lost: Callable[[LossReason, str], None],
        *,
        max_descriptors: int = MOST_PER_SLOT,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._lane = lane
        self._first_run = era % MAX_ERA * RUN_IDS
        self._last_run = 0
        self._adopted = era > 0
        self._runs: dict[int, _Run] = {}
        self._unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._unsent_bytes = 0
        self._on_lost = on_lost
        self._max_descriptors = max_descriptors
        self._held_by_runs = 0
        self.closed = False
        lane.add(sock.fileno(), self._readable)

    def kill_former_runs(self) -> None:
        """Kill the runs of previous servers (earlier eras): their results cannot be delivered."""
        self._send(encode(Kind.KILL_BEFORE, self._first_run))

    def spawn(self, text: bytes, flags: int, fds: Sequence[int], events: RunEvents, *, keep_free: int = 0) -> int:
        """Start a run and return its id (0: it fails, as ``events.on_spawn_failed`` reports). ``text`` is
        :func:`spawn_text`'s; ``fds`` stay the caller's. Raises TooManyRunsError when the slot would hold more than its
        share of descriptors less ``keep_free``; a lost agent is reported through ``events.on_lost``."""
        if len(text) <= MAX_PAYLOAD_BYTES:
            return self._spawn(text, flags, fds, events, keep_free)
        if len(text) > MAX_EXEC_BYTES:
            self._lane.defer(lambda: events.on_spawn_failed(errno.E2BIG, SpawnStep.EXEC))
            return 0
        file = memory_file("spawn", text)
        try:
            return self._spawn(b"", flags | _TEXT_FD, (file, *fds), events, keep_free)
        finally:
            os.close(file)

    def _spawn(self, payload: bytes, flags: int, fds: Sequence[int], events: RunEvents, keep_free: int) -> int:
        sockets = 3 if flags & _SCRIPT_PIPE else 2
        started = _Run(events, sockets, sockets + len(fds), terminal=bool(flags & _TERMINAL))
        if self._held_by_runs + started.descriptors > self._max_descriptors - keep_free:
            raise TooManyRunsError
        run = self._free_run()
        packet = encode(Kind.SPAWN, run, flags, payload)
        self._runs[run] = started
        self._held_by_runs += started.descriptors
        try:
            self._send(packet, fds)
        except BaseException:
            self._forget(run)
            raise
        return run

    def kill(self, run: int) -> None:
        """Kill the whole tree of a run. Its ``on_exit`` follows. No effect when it has ended."""
        if run in self._runs:
            self._send(encode(Kind.KILL, run))

    def signal(self, run: int, number: int, began_s: float | None = None) -> None:
        """Send a signal to the process group of a run's leader; with ``began_s`` (of CLOCK_BOOTTIME), to foreground
        processes started in it since then. No effect when it has ended."""
        if run in self._runs:
            payload = b"" if began_s is None else foreground_payload(began_s)
            self._send(encode(Kind.SIGNAL, run, number, payload))

    def close(self) -> None:
        """Close the socket; the slot ends when nobody has one open. Runs get ``on_lost``. Repeatable."""
        if self.closed:
            return
        self.closed = True
        self._lane.remove(self._sock.fileno())
        self._drop_unsent()
        self._sock.close()
        self._lose_runs()

    def _free_run(self) -> int:
        for _ in range(RUN_IDS):
            self._last_run = self._last_run % (RUN_IDS - 1) + 1
            run = self._first_run + self._last_run
            if run not in self._runs:
                return run
        raise TooManyRunsError

    def _forget(self, run: int) -> None:
        self._held_by_runs -= self._runs.pop(run).descriptors

    def _send(self, packet: bytes, fds: Sequence[int] = ()) -> None:
        if self.closed:
            # Deferred like a message of the agent: the caller is still setting up the run.
            self._lane.defer(self._lose_runs)
            return
        if self._unsent or not self._sent(packet, fds):
            if self._unsent_bytes + len(packet) > MAX_UNSENT_BYTES:
                self._defer_loss(LossReason.deaf, "the slot agent does not read")
                return
            if not self._unsent:
                self._lane.loop.add_writer(self._sock.fileno(), self._writable)
            self._unsent.append((packet, tuple(os.dup(fd) for fd in fds)))
            self._unsent_bytes += len(packet)

    def _sent(self, packet: bytes, fds: Sequence[int]) -> bool:
        """Whether the packet was sent (or the agent is gone, which is reported later) instead of waiting for room."""
        try:
            send(self._sock, packet, fds)
        except BlockingIOError:
            return False
        except OSError as error:
            self._defer_loss(LossReason.ended, f"the slot agent is gone ({error})")
        return True

    def _writable(self) -> None:
        while self._unsent:
            packet, fds = self._unsent[0]
            if not self._sent(packet, fds):
                return
            self._unsent.popleft()
            self._unsent_bytes -= len(packet)
            _close_all(fds)
        self._drop_unsent()

    def _drop_unsent(self) -> None:
        self._lane.loop.remove_writer(self._sock.fileno())
        while self._unsent:
            _close_all(self._unsent.popleft()[1])

    def _lose_runs(self) -> None:
        runs, self._runs, self._held_by_runs = self._runs, {}, 0
        for run in runs.values():
            run.events.on_lost()

    def _defer_loss(self, loss: LossReason, reason: str) -> None:
        self._lane.defer(lambda: self._lose(loss, reason))

    def _lose(self, loss: LossReason, reason: str) -> None:
        if not self.closed:
            self.close()
            self._on_lost(loss, reason)

    def _readable(self) -> None:
        try:
            message = receive(self._sock)
        except BlockingIOError:
            return
        except ProtocolError as error:
            # The kernel drops descriptors that we have no room for: then it is not the agent's fault.
            self._lose(LossReason.broken if _room_for_descriptors() else LossReason.no_descriptors, str(error))
            return
        except OSError as error:
            self._lose(LossReason.ended, f"the slot agent is gone ({error})")
            return
        if message is None:
            self._lose(LossReason.ended, "the slot agent ended")
            return
        try:
            self._take(message)
        except ProtocolError as error:
            self._lose(LossReason.broken if _room_for_descriptors() else LossReason.no_descriptors, str(error))

    def _take(self, message: Message) -> None:
        kind = message.kind
        if kind is Kind.SPAWNED:
            self._take_spawned(message)
            return
        if message.fds:
            _close_all(message.fds)
            raise ProtocolError(f"the slot agent sent descriptors with {kind.name}")
        if kind is Kind.EXIT:
            usage, status = exit_usage(message.payload), exit_status(message.arg)
            run = self._known(message, spawned=True)
            if run is not None:
                self._forget(message.run)
                run.events.on_exit(status, usage)
        elif kind is Kind.SPAWN_FAILED:
            step = failed_step(message.payload)
            run = self._known(message, spawned=False)
            if run is not None:
                self._forget(message.run)
                run.events.on_spawn_failed(message.arg, step)
        elif kind not in (Kind.KILLED, Kind.PONG):
            raise ProtocolError(f"the slot agent sent an unexpected {kind.name}")

    def _take_spawned(self, message: Message) -> None:
        try:
            run = self._known(message, spawned=False)
            inode = input_inode(message.payload)
            if run is not None:
                _check_terminal(message.fds) if run.terminal else _check_sockets(message.fds, run.sockets)
        except ProtocolError:
            _close_all(message.fds)
            raise
        if run is None:
            _close_all(message.fds)
            return
        run.spawned = True
        run.events.on_spawned(message.fds, inode, message.arg)

    def _known(self, message: Message, *, spawned: bool) -> _Run | None:
        """The run a message is about; None for a former server's (ignored)."""
        run = self._runs.get(message.run)
        if run is not None and run.spawned is spawned:
            return run
        if self._adopted and not 0 < message.run - self._first_run < RUN_IDS:
            return None
        raise ProtocolError(f"the slot agent sent {message.kind.name} for run {message.run}, which is unexpected")


def _check_sockets(fds: tuple[int, ...], expected: int) -> None:
    if len(fds) != expected:
        raise ProtocolError(f"the slot agent sent {len(fds)} descriptors with SPAWNED, not {expected}")
    for fd in fds:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise ProtocolError("the slot agent sent a descriptor that is not a socket")


def _check_terminal(fds: tuple[int, ...]) -> None:
    stats = [os.fstat(fd) for fd in fds]
    if len(stats) != 1 or not stat.S_ISCHR(stats[0].st_mode) or stats[0].st_rdev != _PTMX:
        raise ProtocolError("the slot agent sent something other than a terminal with SPAWNED")


def _room_for_descriptors() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def memory_file(name: str, content: bytes) -> int:
    """A file in memory with ``content``, positioned at its start, that nobody can change.

    Only the agent gets it, and gives its run a copy in the slot's own memory: a file shared by a slot's processes
    and the server could be locked by one while the other waits. In case the agent does not copy it, this file is
    sealed, its descriptor is read-only, and later it is only closed.
    """
    writable = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(writable, rest) :]
        os.fchmod(writable, _READ_BY_ALL)  # a slot's uid may open its /dev/stdin
        fcntl.fcntl(writable, fcntl.F_ADD_SEALS, _ALL_SEALS)
        return os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(writable)
