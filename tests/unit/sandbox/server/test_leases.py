"""Leases, and the moves of a slot."""

from __future__ import annotations

import json

import pytest

from agentenv.errors import ProtocolError
from agentenv.sandbox.server.leases import Lease
from agentenv.wire.leases import LeaseKey, LeaseRequest

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
