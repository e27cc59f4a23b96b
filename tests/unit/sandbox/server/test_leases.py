"""Leases, and the moves of a slot."""

from __future__ import annotations

import json

import pytest

from agentenv.errors import ProtocolError
from agentenv.sandbox.control_protocol import Remember, encode, parse_request
from agentenv.sandbox.server.leases import Lease
from agentenv.wire.leases import LeaseKey, LeaseRequest, Tags

TAGS = Tags(run="exp7", environment="repair", kind="eval", group="g", item="1")
REQUEST = LeaseRequest(slot=3, trajectory="t", ttl_s=60, request_id="r" * 16, tags=TAGS)


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
    assert again.tags == TAGS
    assert Lease.from_memory(3, again.to_memory(), 0.0).era == 2
    assert not again.sealed
    again.sealed = True
    assert Lease.from_memory(3, again.to_memory(), 0.0).sealed, (
        "a crash of the server makes no sealed slot the policy's"
    )


def test_a_memory_of_a_server_that_knew_no_tags_has_none() -> None:
    kept = Lease.grant(REQUEST, 5, now_s=0.0).to_memory()
    del kept["tags"]
    assert Lease.from_memory(3, kept, 0.0).tags == Tags()


def test_the_longest_lease_fits_into_the_supervisors_memory() -> None:
    wide = "\N{GRINNING FACE}"
    tags = Tags(run=wide * 128, environment=wide * 128, kind="interactive", group=wide * 128, item=wide * 128)
    request = LeaseRequest(slot=3, trajectory=wide * 256, ttl_s=86_400, request_id=wide * 128, tags=tags)
    kept = Remember(3, 2**31, Lease.grant(request, 2**31, now_s=0.0).to_memory())
    (packet,) = encode(kept)
    assert parse_request(packet, slots=4) == kept


@pytest.mark.parametrize("spoiled", ["epoch", "secret", "ttl_s", "era", "tags"])
def test_a_malformed_memory_is_refused(spoiled: str) -> None:
    kept = Lease.grant(REQUEST, 5, now_s=0.0).to_memory()
    with pytest.raises(ProtocolError):
        Lease.from_memory(3, {**kept, spoiled: "short"}, 0.0)


@pytest.mark.parametrize("missing", ["epoch", "secret", "trajectory", "ttl_s", "request_id", "era"])
def test_an_incomplete_memory_is_refused(missing: str) -> None:
    kept = Lease.grant(REQUEST, 5, now_s=0.0).to_memory()
    del kept[missing]
    with pytest.raises(ProtocolError):
        Lease.from_memory(3, kept, 0.0)
