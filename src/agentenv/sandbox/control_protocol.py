"""The packets between supervisor and server in both directions, with strict parsing.

One JSON object in one packet of a SOCK_SEQPACKET socket, or in as many as it needs (:func:`encode`, :class:`Joined`).
Every value that one is made from has a bound, so that no large one ends the connection of all slots.

The server talks to the network, so it is the less trusted side: anything it sends that is not exactly one of a few
requests is a ProtocolError, and the server is restarted. Pure, standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from enum import Enum
from types import UnionType
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

from agentenv.errors import ConfigError, ProtocolError
from agentenv.sandbox.limit_watch import LimitFiles
from agentenv.sandbox.loop_watch import Stalls
from agentenv.sandbox.slot_loss import LossReason
from agentenv.sandbox.slot_paths import USUAL_PATHS, SlotPaths
from agentenv.wire.network import NetworkPolicy
from agentenv.wire.roots import RootSpec

MAX_PACKET_BYTES: Final = 64 * 1024
MAX_TEXT_BYTES: Final = 16 * 1024 * 1024
"""Of one JSON object. The largest is a SlotReady: the lease's environment twice and the image's, each of at most
MAX_ENVIRONMENT_BYTES, and JSON has six bytes for a control character."""
MAX_LEASE_BYTES: Final = 4 * 1024 * 1024
_MORE: Final = b"+"
_LAST: Final = b"="
"""First byte of a piece that is followed by another, and of the last. A whole object begins with a brace."""
MAX_GENERATION: Final = 2**63 - 1
_MAX_REASON_CHARS: Final = 4096
_MAX_STACK_CHARS: Final = 8 * 1024
_CHECKPOINT: Final = re.compile(r"[0-9a-f]{32}")
_Packet = TypeVar("_Packet")

# ---- from the supervisor ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The first packet to every server: the container's specification. ``spec`` is a SandboxSpec's dict."""

    spec: dict[str, Any]
    token: str
    isolation: str
    weaker: list[str]
    proofs: list[dict[str, Any]]
    shell: str = ""
    """Path in every slot of a faster build of its bash; empty if there is none."""
    generation: int = 0
    """The highest that a former server has told with Fence."""
    refused: dict[str, str] = field(default_factory=dict)
    """The fields of a RootSpec that no slot here can have, or not with a value (``writable=memory``), each with the
    reason."""
    image_format: str = ""
    image_weaker: list[str] = field(default_factory=list)
    workspaces_copied: str = ""
    """See ServerInfo."""


@dataclass(frozen=True)
class SlotView:
    """What the server has to know of an image slot: the environment of its commands, whose they are ("": root) and
    where they start if a call names nothing else."""

    env: dict[str, str]
    user: str
    workdir: str
    shell: str
    """A bash to run scripts with; empty: the image's own."""
    stands_in: bool
    """Whether that is a faster build of the image's own, by whose name it goes; else the image has none."""
    tmux: str
    """Directory of a tmux to use (:attr:`SlotPaths.tmux`); empty: the image's own, if it has one."""
    network_env: dict[str, str] = field(default_factory=dict)
    """Of the environment, what goes with the present network."""
    entrypoint: list[str] = field(default_factory=list)
    cmd: list[str] = field(default_factory=list)
    """Of the image; both together are its command."""


@dataclass(frozen=True)
class SlotReady:
    """A slot is ready. The packet carries the socket to its agent, and those of its services in their order. ``kept``:
    the workspace is unchanged."""

    slot: int
    epoch: int
    lease: dict[str, Any] | None
    kept: bool
    limits: LimitFiles
    paths: SlotPaths = USUAL_PATHS
    view: SlotView | None = None
    """None: a plain slot."""
    services: dict[str, SlotView] = field(default_factory=dict)


@dataclass(frozen=True)
class SlotFailed:
    """A reset could not be verified: the slot is quarantined."""

    slot: int
    epoch: int
    reason: str


@dataclass(frozen=True)
class SlotRefused:
    """The slot cannot have the root that was asked for in this epoch; a SlotReady of the next one will follow.
    ``error`` is the code of the error that says why."""

    slot: int
    epoch: int
    error: str
    reason: str


@dataclass(frozen=True)
class NotFrozen:
    """The checkpoint that was asked for was not made; the slot is as it was. ``ended``: but its processes have ended,
    and a SlotReady of the same epoch with ``kept`` will follow, SlotLost or SlotFailed."""

    slot: int
    epoch: int
    reason: str
    ended: bool


@dataclass(frozen=True)
class Connected:
    """The network of an image slot has changed as asked; with a ``reason`` it could not, and is none. ``env`` is what
    it adds to the environment of commands."""

    slot: int
    epoch: int
    env: dict[str, str]
    reason: str


@dataclass(frozen=True)
class Exported:
    """A layer of a checkpoint that has ``layers``; the packet carries a pipe with its tar. With a ``reason`` there is
    none."""

    checkpoint: str
    layer: int
    layers: int
    reason: str


@dataclass(frozen=True)
class SlotLost:
    """The slot ended by itself; a SlotReady of the next epoch will follow."""

    slot: int
    loss: LossReason
    reason: str


@dataclass(frozen=True)
class Pong:
    """The answer to Ping; ``stalls`` are those of the supervisor's event loop."""

    stalls: Stalls


# ---- from the server ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Serving:
    """The server listens."""


@dataclass(frozen=True)
class Ping:
    """Check that the supervisor answers. The answer is a Pong."""


@dataclass(frozen=True)
class Unattended:
    """Nobody has used the container for as long as its specification allows: end it."""


@dataclass(frozen=True)
class Reset:
    """Request a new, empty slot. The answer is SlotReady of the next epoch, or SlotFailed. This request, Seal and
    Remember are dropped when ``epoch`` has ended."""

    slot: int
    epoch: int


@dataclass(frozen=True)
class Seal:
    """Request new namespaces over the same workspace. The answer is SlotReady of the same epoch, or SlotFailed."""

    slot: int
    epoch: int


@dataclass(frozen=True)
class Reroot:
    """Request a slot with this root (a RootSpec's dict) and nothing of what it is now. The answer is SlotReady of the
    same epoch, SlotRefused or SlotFailed."""

    slot: int
    epoch: int
    root: dict[str, Any]


@dataclass(frozen=True)
class Freeze:
    """Request a checkpoint of this name: the slot's processes end, what they wrote is kept, and the slot goes on with
    it. The answer is SlotReady of the same epoch with ``kept``, NotFrozen, SlotLost or SlotFailed."""

    slot: int
    epoch: int
    checkpoint: str


@dataclass(frozen=True)
class Connect:
    """Request another network (a NetworkPolicy's JSON) for an image slot. The answer is Connected."""

    slot: int
    epoch: int
    network: dict[str, Any]


@dataclass(frozen=True)
class Export:
    """Request a layer of a checkpoint, the lowest being 0. The answer is Exported."""

    checkpoint: str
    layer: int


@dataclass(frozen=True)
class Drop:
    """Forget a checkpoint. No answer."""

    checkpoint: str


@dataclass(frozen=True)
class Remember:
    """Return ``lease`` with the slot to the next server process."""

    slot: int
    epoch: int
    lease: dict[str, Any] | None


@dataclass(frozen=True)
class Fence:
    """Tell ``generation``, the highest of a farm that the server has obeyed, to the next server process."""

    generation: int


SupervisorPacket = Hello | SlotReady | SlotFailed | SlotRefused | NotFrozen | Connected | Exported | SlotLost | Pong
Request = Serving | Ping | Unattended | Reset | Seal | Reroot | Freeze | Connect | Export | Drop | Remember | Fence
_SUPERVISOR_PACKETS: Final[dict[str, type[SupervisorPacket]]] = {
    "hello": Hello,
    "slot_ready": SlotReady,
    "slot_failed": SlotFailed,
    "slot_refused": SlotRefused,
    "not_frozen": NotFrozen,
    "connected": Connected,
    "exported": Exported,
    "slot_lost": SlotLost,
    "pong": Pong,
}
_REQUESTS: Final[dict[str, type[Request]]] = {
    "serving": Serving,
    "ping": Ping,
    "unattended": Unattended,
    "reset": Reset,
    "seal": Seal,
    "reroot": Reroot,
    "freeze": Freeze,
    "connect": Connect,
    "export": Export,
    "drop": Drop,
    "remember": Remember,
    "fence": Fence,
}
_OPS: Final[dict[type[Any], str]] = {kind: op for op, kind in (*_SUPERVISOR_PACKETS.items(), *_REQUESTS.items())}
_HINTS: Final[dict[type[Any], dict[str, Any]]] = {
    kind: get_type_hints(kind) for kind in (*_OPS, LimitFiles, SlotPaths, SlotView, Stalls)
}


def encode(packet: SupervisorPacket | Request) -> tuple[bytes, ...]:
    """The packets to be sent for it, in their order: one, unless it is larger than MAX_PACKET_BYTES. Explanatory texts
    are cut. Raises ConfigError when it is larger than MAX_TEXT_BYTES."""
    if isinstance(packet, SlotFailed | SlotRefused | NotFrozen | Connected | Exported | SlotLost):
        packet = dataclasses.replace(packet, reason=packet.reason[:_MAX_REASON_CHARS])
    elif isinstance(packet, Pong):  # the end of a stack is the current location
        stalls = dataclasses.replace(packet.stalls, stack=packet.stalls.stack[-_MAX_STACK_CHARS:])
        packet = Pong(stalls)
    op = _OPS[type(packet)]
    text = json.dumps({"op": op, **dataclasses.asdict(packet)}).encode()
    if len(text) <= MAX_PACKET_BYTES:
        return (text,)
    if len(text) > MAX_TEXT_BYTES:
        field_name = "env" if isinstance(packet, Hello) else "root" if isinstance(packet, SlotReady | Reroot) else op
        raise ConfigError(field_name, f"{op} takes {len(text)} bytes; at most {MAX_TEXT_BYTES} can be handed on")
    room = MAX_PACKET_BYTES - 1
    pieces = [text[at : at + room] for at in range(0, len(text), room)]
    return (*(_MORE + piece for piece in pieces[:-1]), _LAST + pieces[-1])


class Joined:
    """The packets of one direction, joined to the JSON objects that :func:`encode` has divided."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def add(self, packet: bytes) -> bytes | None:
        """Take the next packet; returns a whole object, None while there is more of it to come. Raises ProtocolError
        when it is larger than MAX_TEXT_BYTES, or a piece belongs to none."""
        kind = packet[:1]
        if kind == _MORE and len(self._pieces) <= MAX_TEXT_BYTES // MAX_PACKET_BYTES:
            self._pieces.append(packet[1:])
            return None
        pieces, self._pieces = self._pieces, []
        if kind == _MORE:
            raise ProtocolError(f"a packet has more than {MAX_TEXT_BYTES} bytes")
        if (kind == _LAST) is not bool(pieces):
            raise ProtocolError(f"a part of a packet is missing at {packet[:200]!r}")
        return b"".join((*pieces, packet[1:])) if pieces else packet


def parse_supervisor_packet(packet: bytes) -> SupervisorPacket:
    """Parse a packet from the supervisor. Raises ProtocolError for anything malformed."""
    parsed = _decoded(packet, _SUPERVISOR_PACKETS, "the supervisor")
    if isinstance(parsed, Hello) and not parsed.token:
        raise ProtocolError("the supervisor sent an empty token")
    return parsed


def parse_request(packet: bytes, slots: int) -> Request:
    """Parse a packet from the server. Raises ProtocolError for anything but a well-formed request, about an existing
    slot if it names one."""
    request = _decoded(packet, _REQUESTS, "the server")
    if isinstance(request, Serving | Ping | Unattended):
        return request
    if isinstance(request, Freeze | Drop | Export) and not _CHECKPOINT.fullmatch(request.checkpoint):
        raise ProtocolError(f"the server named a checkpoint {request.checkpoint[:200]!r}")
    if isinstance(request, Drop | Export):
        return request
    if isinstance(request, Fence):
        if not 0 <= request.generation <= MAX_GENERATION:
            raise ProtocolError(f"the server named generation {str(request.generation)[:200]}")
        return request
    if not 0 <= request.slot < slots or request.epoch < 0:
        raise ProtocolError(f"the server named slot {request.slot} of {slots}, epoch {request.epoch}")
    try:
        if isinstance(request, Reroot):
            RootSpec.parse(request.root)
        if isinstance(request, Connect):
            NetworkPolicy.parse(request.network)
    except ConfigError as error:
        raise ProtocolError(f"invalid request from the server: {error}") from error
    if isinstance(request, Remember) and len(json.dumps(request.lease)) > MAX_LEASE_BYTES:
        raise ProtocolError(f"a lease must be an object of at most {MAX_LEASE_BYTES} bytes")
    return request


def _decoded(packet: bytes, kinds: dict[str, type[_Packet]], sender: str) -> _Packet:
    try:
        raw = json.loads(packet)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{sender} sent no JSON: {error}") from error
    kind = kinds.get(str(raw.pop("op", None))) if isinstance(raw, dict) else None
    if kind is None:
        raise ProtocolError(f"{sender} sent an unknown packet: {packet[:200]!r}")
    try:
        return _built(kind, raw)
    except TypeError as error:
        raise ProtocolError(f"{sender} sent a malformed {_OPS[kind]}: {error}") from error


def _built(kind: type[_Packet], raw: object) -> _Packet:
    """Raises TypeError unless ``raw`` has exactly the fields of ``kind``, each of its type."""
    hints = _HINTS[kind]
    if not isinstance(raw, dict) or raw.keys() != hints.keys():
        raise TypeError(f"fields {str(raw)[:200]}, not {', '.join(hints)}")
    return kind(**{name: _value(name, hint, raw[name]) for name, hint in hints.items()})


def _value(name: str, hint: Any, value: Any) -> Any:
    if hint in _HINTS:
        return _built(hint, value)
    if get_origin(hint) is dict and isinstance(value, dict) and (of := get_args(hint)[1]) in _HINTS:
        return {key: _built(of, each) for key, each in value.items()}
    if isinstance(hint, UnionType) and (nested := [kind for kind in get_args(hint) if kind in _HINTS]):
        return None if value is None else _built(nested[0], value)
    kinds = [get_origin(kind) or kind for kind in (get_args(hint) if isinstance(hint, UnionType) else (hint,))]
    if kinds == [float] and type(value) is int:
        return float(value)
    if issubclass(kinds[0], Enum) and value in tuple(kinds[0]):
        return kinds[0](value)
    if type(value) not in kinds:  # bool is not accepted as int
        raise TypeError(f"{name} is {str(value)[:200]!r}")
    return value
