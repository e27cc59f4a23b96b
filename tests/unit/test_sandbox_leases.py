"""Leases, and the moves of a slot."""

from __future__ import annotations

import json

import pytest

from agentenv.errors import InvalidArgumentsError, ProtocolError, UnknownToolError
from agentenv.sandbox.server.leases import MOVES, IllegalMoveError, Lease, move
from agentenv.sandbox.server.tools.registry import parse_arguments
from agentenv.wire.leases import LeaseKey, LeaseRequest, SlotState

REQUEST = LeaseRequest(slot=3, trajectory="t", ttl_s=60, request_id="r" * 16)


def test_a_lease_admits_its_own_key_only() -> None:
    lease = Lease.grant(REQUEST, 5, now_s=100.0)
    key = lease.key
    assert lease.admits(key)
    assert lease.expires_at_s == 160.0
    assert not lease.admits(key.model_copy(update={"epoch": 4}))
    assert not lease.admits(key.model_copy(update={"slot": 2}))
    assert not lease.admits(LeaseKey(slot=3, epoch=5, secret="x" * 32))
    assert not lease.admits(LeaseKey(slot=3, epoch=5, secret="é" * 32))
    assert Lease.grant(REQUEST, 5, 0.0).key.secret != key.secret


def test_a_lease_survives_in_the_supervisors_memory() -> None:
    lease = Lease.grant(REQUEST, 5, now_s=100.0)
    kept = json.loads(json.dumps(lease.to_memory()))
    again = Lease.from_memory(3, kept, now_s=7.0)
    assert again.admits(lease.key)
    assert again.as_grant() == lease.as_grant()
    assert (again.request_id, again.expires_at_s, again.era) == (REQUEST.request_id, 67.0, 1)
    assert Lease.from_memory(3, again.to_memory(), 0.0).era == 2
    assert not again.sealed
    again.sealed = True
    assert Lease.from_memory(3, again.to_memory(), 0.0).sealed, (
        "a crash of the server makes no sealed slot the policy's"
    )


@pytest.mark.parametrize("spoiled", ["epoch", "secret", "ttl_s", "era"])
def test_a_malformed_memory_is_refused(spoiled: str) -> None:
    kept = Lease.grant(REQUEST, 5, now_s=0.0).to_memory()
    with pytest.raises(ProtocolError):
        Lease.from_memory(3, {**kept, spoiled: "short"}, 0.0)
    del kept[spoiled]
    with pytest.raises(ProtocolError):
        Lease.from_memory(3, kept, 0.0)


def test_moves_are_those_of_the_table_and_no_others() -> None:
    for state in SlotState:
        for to in SlotState:
            if to in MOVES[state]:
                assert move(state, to) is to
            else:
                with pytest.raises(IllegalMoveError, match=f"from {state} to {to}"):
                    move(state, to)
    assert MOVES[SlotState.gone] == frozenset()
    assert SlotState.free not in MOVES[SlotState.quarantined]


def test_wrong_arguments_are_explained_to_a_model() -> None:
    with pytest.raises(InvalidArgumentsError, match=r"bash: command: Field required"):
        parse_arguments("bash", {})
    with pytest.raises(InvalidArgumentsError, match=r"cmd: Extra inputs are not permitted \(got 'ls'\)"):
        parse_arguments("bash", {"command": "ls", "cmd": "ls"})
    with pytest.raises(InvalidArgumentsError, match="NUL"):
        parse_arguments("bash", {"command": "a\0b"})
    with pytest.raises(UnknownToolError, match="use one of: bash"):
        parse_arguments("bsh", {})
    many = {str(number): number for number in range(50)}
    with pytest.raises(InvalidArgumentsError) as caught:
        parse_arguments("bash", many)
    assert len(caught.value.message) < 500
