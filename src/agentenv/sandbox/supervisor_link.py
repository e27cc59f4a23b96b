"""The server's side of the control socket: what the supervisor tells, what it is asked. Strict both ways."""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentenv.errors import ProtocolError
from agentenv.sandbox.culprits import Loss
from agentenv.sandbox.limit_watch import LimitFiles
from agentenv.sandbox.loop_watch import Stalls

MAX_PACKET_BYTES = 64 * 1024
_FD_BYTES = array.array("i").itemsize


@dataclass(frozen=True)
class Hello:
    """The first packet: what this container is. ``spec`` is a SandboxSpec's dict."""

    spec: dict[str, Any]
    token: str
    isolation: str
    weaker: tuple[str, ...]
    proofs: tuple[dict[str, Any], ...]
    shell: str = ""
    """Path in every slot of a faster build of its bash; empty when there is none."""


@dataclass(frozen=True)
class SlotReady:
    """A slot can be used; ``agent`` is the socket to its agent and the receiver's to close."""

    slot: int
    epoch: int
    lease: dict[str, Any] | None
    kept: bool
    limits: LimitFiles
    agent: socket.socket


@dataclass(frozen=True)
class SlotFailed:
    """A reset could not be proved: the slot is quarantined."""

    slot: int
    epoch: int
    reason: str


@dataclass(frozen=True)
class SlotLost:
    """The slot ended by itself; a SlotReady of the next epoch will follow."""

    slot: int
    loss: Loss
    reason: str


@dataclass(frozen=True)
class Pong:
    """The supervisor is there; ``stalls`` are those of its event loop."""

    stalls: Stalls


Packet = Pong | Hello | SlotReady | SlotFailed | SlotLost


def decode(packet: bytes, fds: tuple[int, ...]) -> Packet:
    """The supervisor's packet. Raises ProtocolError for anything malformed, ``fds`` then being the caller's."""
    try:
        raw = json.loads(packet)
        if not isinstance(raw, dict):
            raise ProtocolError("the supervisor sent a packet that is no object")
        operation = raw.pop("op", None)
        decoder = _DECODERS.get(str(operation))
        if decoder is None:
            raise ProtocolError(f"the supervisor sent an unknown operation {operation!r}")
        return decoder(raw, fds)
    except ValueError as error:
        raise ProtocolError(f"the supervisor sent what is not JSON: {error}") from error


def _field(raw: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    value = raw.get(name)
    if isinstance(value, bool) and kind is int:
        raise ProtocolError(f"the supervisor's field {name!r} is a bool")
    if not isinstance(value, kind):
        raise ProtocolError(f"the supervisor's field {name!r} is {value!r}")
    return value


def _no_fds(fds: tuple[int, ...]) -> None:
    if fds:
        raise ProtocolError("the supervisor sent descriptors where none belong")


def _hello(raw: dict[str, Any], fds: tuple[int, ...]) -> Hello:
    _no_fds(fds)
    spec, token, isolation = _field(raw, "spec", dict), _field(raw, "token", str), _field(raw, "isolation", str)
    if not token:
        raise ProtocolError("the supervisor sent an empty token")
    weaker, proofs = tuple(_field(raw, "weaker", list)), tuple(_field(raw, "proofs", list))
    return Hello(spec, token, isolation, weaker, proofs, _field(raw, "shell", str))


def _slot_ready(raw: dict[str, Any], fds: tuple[int, ...]) -> SlotReady:
    if len(fds) != 1:
        raise ProtocolError(f"the supervisor sent {len(fds)} descriptors with slot_ready, not 1")
    limits = _field(raw, "limits", dict)
    memory, pids = _field(limits, "memory", (str, type(None))), _field(limits, "pids", (str, type(None)))
    files = LimitFiles(_field(limits, "version", int), memory, pids)
    slot, epoch = _field(raw, "slot", int), _field(raw, "epoch", int)
    lease, kept = _field(raw, "lease", (dict, type(None))), _field(raw, "kept", bool)
    return SlotReady(slot, epoch, lease, kept, files, socket.socket(fileno=fds[0]))


def _slot_failed(raw: dict[str, Any], fds: tuple[int, ...]) -> SlotFailed:
    _no_fds(fds)
    return SlotFailed(_field(raw, "slot", int), _field(raw, "epoch", int), _field(raw, "reason", str))


def _slot_lost(raw: dict[str, Any], fds: tuple[int, ...]) -> SlotLost:
    _no_fds(fds)
    loss = _field(raw, "loss", str)
    if loss not in tuple(Loss):
        raise ProtocolError(f"the supervisor named an unknown loss {loss!r}")
    return SlotLost(_field(raw, "slot", int), Loss(loss), _field(raw, "reason", str))


def _pong(raw: dict[str, Any], fds: tuple[int, ...]) -> Pong:
    _no_fds(fds)
    stalls = _field(raw, "stalls", dict)
    longest_s, recent_s = (float(_field(stalls, name, (int, float))) for name in ("longest_s", "recent_s"))
    return Pong(Stalls(_field(stalls, "count", int), longest_s, recent_s, _field(stalls, "stack", str)))


_DECODERS: dict[Any, Callable[[dict[str, Any], tuple[int, ...]], Packet]] = {
    "pong": _pong,
    "hello": _hello,
    "slot_ready": _slot_ready,
    "slot_failed": _slot_failed,
    "slot_lost": _slot_lost,
}


class SupervisorLink:
    """The control socket. Owns it. What is asked here is answered by packets, in the supervisor's time."""

    def __init__(self, sock: socket.socket, on_full: Callable[[], None] = lambda: None) -> None:
        """``on_full`` is called when packets wait for room; :meth:`flush` when there may be some."""
        sock.setblocking(False)
        self._sock = sock
        self._on_full = on_full
        self._unsent: list[bytes] = []
        self._asked_at_s: float | None = None

    def fileno(self) -> int:
        """For watching it."""
        return self._sock.fileno()

    def receive(self) -> Packet | None:
        """The next packet; None when the supervisor is gone. Raises BlockingIOError when there is none
        yet, ProtocolError for anything malformed (no descriptor leaks)."""
        packet, ancillary, flags, _ = self._sock.recvmsg(
            MAX_PACKET_BYTES, socket.CMSG_SPACE(4 * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
        )
        fds = tuple(_descriptors(ancillary))
        if not packet:
            return None
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ProtocolError("the supervisor sent a packet that is too large")
            return decode(packet, fds)
        except ProtocolError:
            for fd in fds:
                os.close(fd)
            raise

    def ping(self, now_s: float) -> None:
        """Ask whether the supervisor is there, unless it still owes the last answer."""
        if self._asked_at_s is None:
            self._asked_at_s = now_s
            self._send({"op": "ping"})

    def answered(self) -> None:
        """It is."""
        self._asked_at_s = None

    def silent_s(self, now_s: float) -> float:
        """For how long it has owed an answer to :meth:`ping`."""
        return 0.0 if self._asked_at_s is None else now_s - self._asked_at_s

    def serving(self) -> None:
        """Say that the server listens."""
        self._send({"op": "serving"})

    def reset(self, slot: int, epoch: int) -> None:
        """Ask for a new, empty slot: SlotReady of the next epoch, or SlotFailed, answers. A request about
        an epoch that has ended is dropped, here and below."""
        self._send({"op": "reset", "slot": slot, "epoch": epoch})

    def seal(self, slot: int, epoch: int) -> None:
        """Ask for new namespaces over the same workspace: SlotReady of the same epoch, or SlotFailed, answers."""
        self._send({"op": "seal", "slot": slot, "epoch": epoch})

    def remember(self, slot: int, epoch: int, lease: dict[str, Any] | None) -> None:
        """Have this handed back with the slot to a server that comes after this one."""
        self._send({"op": "remember", "slot": slot, "epoch": epoch, "lease": lease})

    def close(self) -> None:
        """Repeatable."""
        self._sock.close()

    def flush(self) -> bool:
        """Send what waits, as far as there is room; whether nothing waits any more."""
        try:
            while self._unsent:
                self._sock.send(self._unsent[0])
                del self._unsent[0]
        except BlockingIOError:
            return False
        except OSError:
            self._unsent.clear()  # the supervisor is gone: the end of its packets says so, and the server ends
        return True

    def _send(self, packet: dict[str, Any]) -> None:
        self._unsent.append(json.dumps(packet).encode())
        if not self.flush():
            self._on_full()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.extend(array.array("i", content[: len(content) - len(content) % _FD_BYTES]))
    return found
