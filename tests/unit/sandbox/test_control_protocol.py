"""The packets between supervisor and server, both directions."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from agentenv.errors import ConfigError, ProtocolError
from agentenv.sandbox.control_protocol import (
    MAX_GENERATION,
    MAX_PACKET_BYTES,
    Fence,
    Hello,
    Ping,
    Pong,
    Remember,
    Request,
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
from agentenv.sandbox.culprits import Loss
from agentenv.sandbox.limit_watch import LimitFiles
from agentenv.sandbox.loop_watch import Stalls
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
LOST = {"op": "slot_lost", "slot": 0, "loss": Loss.memory_above, "reason": "r"}


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
        *(SlotLost(0, loss, "r") for loss in Loss),
        Pong(Stalls(3, 0.5, 1, "stack")),
    ],
)
def test_what_the_supervisor_tells_is_read_as_it_was_said(said: SupervisorPacket) -> None:
    assert parse_supervisor_packet(encode(said)) == said


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
    assert parse_request(encode(asked), 2) == asked


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
        packet(op="remember", slot=0, epoch=0, lease={"x": "y" * 20_000}),
        packet(op="fence"),
        packet(op="fence", generation=-1),
        packet(op="fence", generation=2**63),
        packet(op="fence", generation=True),
        packet(op="fence", generation="1"),
        packet(op="fence", generation=1, slot=0),
        packet(op="mount", slot=0, epoch=0),
        encode(SlotFailed(0, 0, "what only the supervisor says")),
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
        encode(Reset(0, 0)),
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


def test_a_spec_too_large_for_a_packet_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="env"):
        encode(Hello({"env": {"A": "x" * 70_000}}, "token", "full", [], []))


def test_texts_that_explain_are_cut_to_what_a_packet_holds() -> None:
    long = "x" * MAX_PACKET_BYTES
    for said in (SlotFailed(0, 0, long), SlotLost(0, Loss.ended, long), Pong(Stalls(1, 1.0, 1.0, f"{long}the end"))):
        assert len(encode(said)) < MAX_PACKET_BYTES
    assert encode(Pong(Stalls(1, 1.0, 1.0, f"{long}the end"))).endswith(b'the end"}}')
