"""The packets of ``docs/slot-agent.md``: a pure codec, and one function each to send and receive.

Everything received is untrusted: shapes, sizes and descriptor counts are checked, and any violation of the contract
is a ProtocolError (the slot is then lost).
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from agentenv.errors import ProtocolError

VERSION = 2
"""``arg`` of HELLO."""
MAX_PACKET_BYTES = 64 * 1024
MAX_PACKET_FDS = 4

_HEADER = struct.Struct("<IIiI")
_COUNTS = struct.Struct("<II")
_USAGE = struct.Struct("<QQQ")
_STEP = struct.Struct("<I")
_TICK = struct.Struct("<Q")
_INODE = struct.Struct("<Q")
_TICKS_PER_S = 100
"""Of start times in /proc: the same on every machine type."""
_MAX_STATUS = 0xFFFF
_FD_BYTES = array.array("i").itemsize
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_PACKET_FDS * _FD_BYTES)

_MAX_ANSWER_BYTES = 1024
"""No agent sends more in one packet; a buffer of 64 KiB for each would cost as much as the recvmsg."""
_TRUNCATED = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)  # enum arithmetic costs more than the recvmsg

MAX_PAYLOAD_BYTES = MAX_PACKET_BYTES - _HEADER.size


class Kind(IntEnum):
    """Kind of a packet; below 100 server to agent, from 100 agent to server."""

    SPAWN = 1
    KILL = 2
    KILL_ALL = 3
    PING = 4
    SIGNAL = 5
    KILL_BEFORE = 6
    HELLO = 100
    SPAWNED = 101
    SPAWN_FAILED = 102
    EXIT = 103
    KILLED = 104
    PONG = 105


class SpawnFlag(IntFlag):
    """``arg`` of SPAWN. SCRIPT_PIPE, SCRIPT_FD and ANSWERS are the child's descriptor 9."""

    STDIN = 1
    SCRIPT_PIPE = 2
    SCRIPT_FD = 4
    PROGRAM = 8
    TERMINAL = 16
    ANSWERS = 32
    TEXT_FD = 64


class SpawnStep(IntEnum):
    """Payload of SPAWN_FAILED: the step that failed with the errno."""

    RESOURCES = 1
    """Creating pipes or the process (or the run id is taken, or there are too many runs)."""
    CWD = 2
    EXEC = 3


STDIN = SpawnFlag.STDIN
SCRIPT_PIPE = SpawnFlag.SCRIPT_PIPE
SCRIPT_FD = SpawnFlag.SCRIPT_FD
PROGRAM = SpawnFlag.PROGRAM
TERMINAL = SpawnFlag.TERMINAL
ANSWERS = SpawnFlag.ANSWERS
TEXT_FD = SpawnFlag.TEXT_FD

_KINDS = {int(kind): kind for kind in Kind}


@dataclass(frozen=True)
class Message:
    """One packet. The receiver owns ``fds`` and closes them."""

    kind: Kind
    run: int = 0
    arg: int = 0
    payload: bytes = b""
    fds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Resources used by a run's first process (and the children it waited for)."""

    user_s: float
    system_s: float
    max_rss_bytes: int


def encode(kind: Kind, run: int = 0, arg: int = 0, payload: bytes = b"") -> bytes:
    """One packet. Raises ValueError when a number does not fit or the packet exceeds the limit."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"payload of {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES} fit in a packet")
    try:
        return _HEADER.pack(kind, run, arg, len(payload)) + payload
    except struct.error as error:
        raise ValueError(f"run {run} or arg {arg} does not fit the header: {error}") from error


def decode(packet: bytes, fds: tuple[int, ...] = ()) -> Message:
    """The packet's message, with the descriptors that came with it. Raises ProtocolError for anything malformed."""
    if not _HEADER.size <= len(packet) <= MAX_PACKET_BYTES:
        raise ProtocolError(f"slot agent packet of {len(packet)} bytes")
    number, run, arg, payload_bytes = _HEADER.unpack_from(packet)
    kind = _KINDS.get(number)
    if kind is None:
        raise ProtocolError(f"slot agent packet of unknown kind {number}")
    if payload_bytes != len(packet) - _HEADER.size:
        raise ProtocolError(f"slot agent packet for {payload_bytes} payload bytes has {len(packet) - _HEADER.size}")
    return Message(kind, run, arg, packet[_HEADER.size :], fds)


def spawn_text(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> bytes:
    """What SPAWN starts, as its payload or as a file (with PROGRAM, ``argv`` begins with the program, followed by the
    argv it sees). Raises ValueError when argv is empty, a string has a NUL, or an env name is empty or has ``=``."""
    if not argv or not argv[0]:
        raise ValueError("argv must name a program")
    for name in env:
        if not name or "=" in name:
            raise ValueError(f"{name!r} is not a valid environment variable name")
    strings = (cwd, *argv, *(f"{name}={value}" for name, value in env.items()))
    text = "\0".join(strings)  # at once: each for itself takes the event loop five times as long
    if text.count("\0") >= len(strings):
        raise ValueError("argv, env and cwd must not contain NUL bytes")
    return _COUNTS.pack(len(argv), len(env)) + os.fsencode(text) + b"\0"


def exit_usage(payload: bytes) -> Usage:
    """Parse the payload of EXIT. Raises ProtocolError when it is malformed."""
    if len(payload) != _USAGE.size:
        raise ProtocolError(f"EXIT payload of {len(payload)} bytes")
    user_us, system_us, max_rss_kib = _USAGE.unpack(payload)
    return Usage(user_us / 1e6, system_us / 1e6, max_rss_kib * 1024)


def exit_status(arg: int) -> int:
    """Parse ``arg`` of EXIT, a wait status. Raises ProtocolError when it is not the status of a process that ended."""
    if not 0 <= arg <= _MAX_STATUS or not (os.WIFEXITED(arg) or os.WIFSIGNALED(arg)):
        raise ProtocolError(f"EXIT with wait status {arg:#x}, which is not an end")
    return arg


def input_inode(payload: bytes) -> int:
    """Parse the payload of SPAWNED: the inode of the pipe that is the child's standard input, 0 if that is not a
    pipe. Raises ProtocolError when it is malformed."""
    if len(payload) != _INODE.size:
        raise ProtocolError(f"SPAWNED payload of {len(payload)} bytes")
    (inode,) = _INODE.unpack(payload)
    return int(inode)


def foreground_payload(began_s: float) -> bytes:
    """The payload of a SIGNAL for a shell's foreground, whose command began at ``began_s`` of CLOCK_BOOTTIME."""
    return _TICK.pack(max(0, int(began_s * _TICKS_PER_S)))


def failed_step(payload: bytes) -> SpawnStep:
    """Parse the payload of SPAWN_FAILED. Raises ProtocolError when it is malformed."""
    try:
        (number,) = _STEP.unpack(payload)
        return SpawnStep(number)
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"SPAWN_FAILED payload {payload[:16]!r}") from error


def send(sock: socket.socket, packet: bytes, fds: Sequence[int] = ()) -> None:
    """Send one packet; ``fds`` stay the caller's. Raises what ``sendmsg`` raises (BlockingIOError
    when the socket is non-blocking and full: nothing was sent)."""
    if fds:
        sock.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
    else:
        sock.send(packet)


def receive(sock: socket.socket) -> Message | None:
    """The next message, its descriptors close-on-exec and the caller's to close; None at EOF.

    Raises ProtocolError for a malformed packet (its descriptors are closed), and what ``recvmsg``
    raises (BlockingIOError when the socket is non-blocking and empty).
    """
    packet, ancillary, flags, _ = sock.recvmsg(_MAX_ANSWER_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    fds = _descriptors(ancillary) if ancillary else ()
    if not packet and not fds:
        return None
    try:
        if flags & _TRUNCATED:
            raise ProtocolError("slot agent packet too large, or with too many descriptors")
        return decode(packet, fds)
    except ProtocolError:
        for fd in fds:
            os.close(fd)
        raise


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, ...]:
    found: list[int] = []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            usable = len(content) - len(content) % _FD_BYTES
            found.extend(array.array("i", content[:usable]))
    return tuple(found)
