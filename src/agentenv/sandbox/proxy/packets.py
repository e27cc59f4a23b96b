"""The packets between supervisor and a slot's proxy, with strict parsing. Pure, standard library only.

One JSON object in one packet of a SOCK_SEQPACKET socket. A proxy begins with an :class:`Answer` to request 0, which
carries a pidfd of its process. Each request has a serial number, and is answered by one :class:`Answer` with that
number, once it is done: after ``change`` no connection is left that the slot's policy does not allow.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from agentenv.errors import ConfigError, ProtocolError
from agentenv.wire.network import NetworkPolicy

MAX_PACKET_BYTES: Final = 64 * 1024
_MOST: Final = 2**63 - 1  # JSON numbers of any size are parsed; none of ours is larger

Operation = Literal["add", "change", "count"]


@dataclass
class Counts:
    """What the proxy did for its slot since it was started. ``open``: connections at present."""

    connections: int = 0
    open: int = 0
    refused: int = 0
    """Requests the policy did not allow, and connections that a change of the policy closed."""
    malformed: int = 0
    failed: int = 0
    """Hosts that could not be resolved or connected to."""
    sent_bytes: int = 0
    received_bytes: int = 0
    stalls: int = 0
    """How often the proxy's event loop was held (:mod:`agentenv.sandbox.loop_watch`)."""


@dataclass(frozen=True)
class Request:
    """From the supervisor. ``add`` carries the slot's listening socket and its policy, ``change`` a new policy;
    ``count`` only queries. ``policy`` None: as it is."""

    serial: int
    operation: Operation
    policy: NetworkPolicy | None = None


@dataclass(frozen=True)
class Answer:
    """From the proxy: request ``serial`` is done, or was impossible because of ``error``."""

    serial: int
    counts: Counts = field(default_factory=Counts)
    error: str = ""


def encode_request(request: Request) -> bytes:
    """The packet's bytes."""
    raw: dict[str, Any] = {"serial": request.serial, "operation": request.operation}
    if request.policy is not None:
        raw["policy"] = request.policy.to_json()
    return json.dumps(raw).encode()


def encode_answer(answer: Answer) -> bytes:
    """The packet's bytes; a long error is cut."""
    return json.dumps(dataclasses.asdict(dataclasses.replace(answer, error=answer.error[:1000]))).encode()


def parse_request(packet: bytes) -> Request:
    """Raises ProtocolError for anything but a well-formed request."""
    raw = _decoded(packet)
    operation = raw.pop("operation", None)
    if operation not in get_args(Operation):
        raise ProtocolError(f"the proxy received an unknown operation {str(operation)[:100]!r}")
    policy = None
    if operation in ("add", "change"):
        try:
            policy = NetworkPolicy.parse(raw.pop("policy", None))
        except ConfigError as error:
            raise ProtocolError(f"the proxy received a malformed policy: {error}") from error
    return Request(operation=operation, policy=policy, **_numbers(raw, ("serial",)))


def parse_answer(packet: bytes) -> Answer:
    """Raises ProtocolError for anything but a well-formed answer."""
    raw = _decoded(packet)
    error, counts = raw.pop("error", None), raw.pop("counts", None)
    if not isinstance(error, str) or not isinstance(counts, dict):
        raise ProtocolError(f"the proxy sent no answer: {packet[:200]!r}")
    names = tuple(each.name for each in dataclasses.fields(Counts))
    return Answer(counts=Counts(**_numbers(counts, names)), error=error, **_numbers(raw, ("serial",)))


def _decoded(packet: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(packet)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ProtocolError(f"not an object: {packet[:200]!r}")
    return raw


def _numbers(raw: dict[str, Any], names: tuple[str, ...]) -> dict[str, int]:
    """Exactly these fields, each a number that is not a bool and not negative."""
    if raw.keys() != set(names):
        raise ProtocolError(f"fields {', '.join(sorted(map(str, raw)))[:200]}, not {', '.join(names)}")
    if not all(type(value) is int and 0 <= value <= _MOST for value in raw.values()):
        raise ProtocolError(f"a number is missing in {str(raw)[:200]}")
    return raw
