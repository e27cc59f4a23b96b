"""The packets between supervisor and server, both directions."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from agentenv.errors import ConfigError, ProtocolError
from agentenv.sandbox.control_protocol import (
    MAX_GENERATION,
    MAX_LEASE_BYTES,
    MAX_PACKET_BYTES,
    MAX_TEXT_BYTES,
    Connect,
    Connected,
    Fence,
    Hello,
    Joined,
    Ping,
    Pong,
    Remember,
    Request,
    Reroot,
    Reset,
    Seal,
    Serving,
    SlotFailed,
    SlotLost,
    SlotReady,
    SupervisorPacket,
    Unattended,
    encode,
    parse_request,
    parse_supervisor_packet,
)
from agentenv.sandbox.limit_watch import LimitFiles
from agentenv.sandbox.loop_watch import Stalls
from agentenv.sandbox.slot_loss import LossReason
from agentenv.sandbox.slot_paths import SlotPaths

HELLO = {
    "op": "hello", "spec": {}, "token": "t", "isolation": "full", "weaker": ["w"], "proofs": [], "shell": "",
    "generation": 0,
}  # fmt: skip
READY = {
    "op": "slot_ready", "slot": 1, "epoch": 2, "lease": None, "kept": False,
    "limits": {"version": 2, "memory": "/x", "pids": None},
    "paths": {"workspace": "/w", "files": "/f", "tmux_socket": "/t"},
}  # fmt: skip
LOST = {"op": "slot_lost", "slot": 0, "loss": LossReason.memory_above, "reason": "r"}


def text_of(said: SupervisorPacket | Request) -> bytes:
    """What its receiver joins its packets to."""
    joined = Joined()
    *before, last = map(joined.add, encode(said))
    assert before == [None] * len(before)
    assert last is not None
    return last


def packet(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    "said",
    [
        Hello({"slots": 2}, "token", "user", ["w"], [{"name": "x"}], "/run/bash", 7),
        SlotReady(1, 2, {"a": 1}, kept=True, limits=LimitFiles(1, "/m", None)),
        SlotReady(0, 0, None, kept=False, limits=LimitFiles()),
        SlotReady(0, 0, None, kept=False, limits=LimitFiles(), paths=SlotPaths("/w", "/f", "/t")),
        SlotFailed(0, 3, "r"),
        *(SlotLost(0, loss, "r") for loss in LossReason),
        Pong(Stalls(3, 0.5, 1, "stack")),
    ],
)
def test_what_the_supervisor_tells_is_read_as_it_was_said(said: SupervisorPacket) -> None:
    assert parse_supervisor_packet(text_of(said)) == said


@pytest.mark.parametrize(
    "asked",
    [
        Serving(),
        Ping(),
        Unattended(),
        Reset(1, 4),
        Seal(0, 0),
        Remember(1, 2, {"a": 1}),
        Remember(1, 2, None),
        Fence(0),
        Fence(MAX_GENERATION),
    ],
)
def test_what_the_server_asks_is_read_as_it_was_said(asked: Request) -> None:
    assert parse_request(text_of(asked), 2) == asked


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b'"reset"',
        packet(op="reset"),
        packet(op="reset", slot=0),
        packet(op="reset", slot=2, epoch=0),
        packet(op="reset", slot=-1, epoch=0),
        packet(op="reset", slot=True, epoch=0),
        packet(op="reset", slot="0", epoch=0),
        packet(op="reset", slot=0, epoch=0, extra=1),
        packet(op="serving", slot=0),
        packet(op="serving", epoch=0),
        packet(op=["reset"], slot=0, epoch=0),
        packet(op="seal", slot=0, epoch=-1),
        packet(op="seal", slot=0, epoch=1.5),
        packet(op="seal", slot=0, epoch=None),
        packet(op="remember", slot=0, epoch=0),
        packet(op="remember", slot=0, epoch=0, lease=[1]),
        packet(op="remember", slot=0, epoch=0, lease={"x": "y" * MAX_LEASE_BYTES}),
        packet(op="fence"),
        packet(op="fence", generation=-1),
        packet(op="fence", generation=2**63),
        packet(op="fence", generation=True),
        packet(op="fence", generation="1"),
        packet(op="fence", generation=1, slot=0),
        packet(op="mount", slot=0, epoch=0),
        text_of(SlotFailed(0, 0, "what only the supervisor says")),
    ],
)
def test_anything_else_of_the_server_s_breaks_the_contract(raw: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"the server|a lease"):
        parse_request(raw, 2)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        packet(op="nonsense"),
        packet(op=["hello"]),
        packet(**{**LOST, "slot": "0"}),
        packet(**{**LOST, "slot": True}),
        packet(**{**LOST, "loss": "nonsense"}),
        packet(**{**LOST, "loss": ["nonsense"]}),
        packet(op="slot_lost", slot=0, reason="r"),
        packet(**{**HELLO, "token": ""}),
        packet(**{**HELLO, "weaker": None}),
        packet(**{**HELLO, "generation": "1"}),
        packet(**{name: value for name, value in HELLO.items() if name != "generation"}),
        packet(**{**READY, "kept": 1}),
        packet(**{**READY, "limits": []}),
        packet(**{**READY, "paths": {"workspace": "/w", "files": "/f"}}),
        packet(**{**READY, "paths": {"workspace": "/w", "files": "/f", "tmux_socket": 1}}),
        packet(**{**READY, "limits": {"version": 2}}),
        packet(op="pong", stalls={"count": 1, "longest_s": "1", "recent_s": 0, "stack": ""}),
        text_of(Reset(0, 0)),
    ],
)
def test_anything_else_of_the_supervisor_s_breaks_the_contract(raw: bytes) -> None:
    with pytest.raises(ProtocolError, match="the supervisor"):
        parse_supervisor_packet(raw)


def test_random_packets_never_raise_anything_else() -> None:
    rng = random.Random(7)
    values: list[Any] = [None, True, 0, 1, 5, -1, 1.5, "", "reset", [], {}, {"a": {}}]
    kinds = {"seal": Seal, "remember": Remember, "serving": Serving, "reset": Reset, "fence": Fence}
    understood = 0
    for _ in range(5_000):
        names = rng.sample(["op", "slot", "lease", "epoch", "generation", "x"], rng.randint(0, 5))
        raw = {name: rng.choice([*values, *kinds]) for name in names}
        try:
            request = parse_request(json.dumps(raw).encode(), 2)
        except ProtocolError:
            continue
        understood += 1
        assert isinstance(request, kinds[str(raw["op"])])
    assert understood


@pytest.mark.parametrize(
    "size",
    [1, MAX_PACKET_BYTES - 100, MAX_PACKET_BYTES, MAX_PACKET_BYTES + 1, 10 * MAX_PACKET_BYTES, MAX_LEASE_BYTES - 100],
)
def test_an_object_is_read_as_it_was_said_in_however_many_packets(size: int) -> None:
    said = Remember(1, 2, {"a": "é" * 10 + "+={" + "x" * (size - 1)})
    packets = encode(said)
    assert all(len(one) <= MAX_PACKET_BYTES for one in packets)
    assert parse_request(text_of(said), 2) == said


@pytest.mark.parametrize("packets", [[b"=x"], [b"+x", b"{}"], [b"+x"] * (MAX_TEXT_BYTES // MAX_PACKET_BYTES + 2)])
def test_parts_that_make_no_whole_break_the_contract(packets: list[bytes]) -> None:
    joined = Joined()
    with pytest.raises(ProtocolError):
        list(map(joined.add, packets))
    assert joined.add(b"{}") == b"{}"


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (Hello({"env": {"A": "x" * MAX_TEXT_BYTES}}, "token", "full", [], []), "env"),
        (Reroot(0, 0, {"env": {"A": "x" * MAX_TEXT_BYTES}}), "root"),
        (SlotReady(0, 0, {"a": "x" * MAX_TEXT_BYTES}, kept=False, limits=LimitFiles()), "root"),
        (Connect(0, 0, {"hosts": "x" * MAX_TEXT_BYTES}), "connect"),
        (Connected(0, 0, {"A": "x" * MAX_TEXT_BYTES}, ""), "connected"),
    ],
)
def test_what_is_too_large_is_refused_where_it_is_made(said: SupervisorPacket | Request, named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}: "):
        encode(said)


def test_texts_that_explain_are_cut_to_what_a_packet_holds() -> None:
    long = "x" * MAX_PACKET_BYTES
    for said in (
        SlotFailed(0, 0, long),
        SlotLost(0, LossReason.ended, long),
        Pong(Stalls(1, 1.0, 1.0, f"{long}the end")),
    ):
        assert len(encode(said)) == 1
    assert encode(Pong(Stalls(1, 1.0, 1.0, f"{long}the end")))[0].endswith(b'the end"}}')
