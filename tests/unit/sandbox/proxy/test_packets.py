"""Packets between supervisor and proxy: exactly as they should be, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import ProtocolError
from agentenv.sandbox.proxy.packets import (
    MAX_PACKET_BYTES,
    Answer,
    Counts,
    Request,
    encode_answer,
    encode_request,
    parse_answer,
    parse_request,
)
from agentenv.wire.network import MOST_HOSTS, NetworkPolicy

POLICY = NetworkPolicy("allow", ("example.org",))


@pytest.mark.parametrize(
    "request_",
    [
        Request(1, "add", POLICY),
        Request(2, "change", NetworkPolicy()),
        Request(4, "count"),
    ],
)
def test_a_request_arrives_as_it_was_sent(request_: Request) -> None:
    assert parse_request(encode_request(request_)) == request_


def test_an_answer_arrives_as_it_was_sent_but_for_a_long_error() -> None:
    answer = Answer(7, Counts(1, 2, 3, 4, 5, 6, 7, 8), "no")
    assert parse_answer(encode_answer(answer)) == answer
    assert len(parse_answer(encode_answer(Answer(7, error="x" * 100_000))).error) == 1000


def test_the_largest_policy_fits() -> None:
    host = ".".join(["a" * 63] * 3 + ["b" * 59])
    assert len(encode_request(Request(2**63 - 1, "add", NetworkPolicy("allow", (host,) * MOST_HOSTS)))) < (
        MAX_PACKET_BYTES
    )


GOOD: dict[str, Any] = {"serial": 1, "operation": "change", "policy": {"kind": "none"}}


@pytest.mark.parametrize(
    "changed",
    [
        {"serial": -1},
        {"serial": True},
        {"serial": "1"},
        {"serial": 2**63},
        {"serial": 1.0},
        {"serial": None},
        {"operation": "stop"},
        {"operation": ["add"]},
        {"operation": "count"},  # a policy with it
        {"policy": None},
        {"policy": {"kind": "all"}},
        {"policy": {"kind": "allow", "hosts": ["a b"]}},
        {"more": 1},
    ],
)
def test_a_request_that_is_not_exactly_one_is_refused(changed: dict[str, Any]) -> None:
    assert parse_request(json.dumps(GOOD).encode()).operation == "change"
    with pytest.raises(ProtocolError):
        parse_request(json.dumps(GOOD | changed).encode())


@pytest.mark.parametrize("missing", GOOD)
def test_a_request_without_one_of_its_fields_is_refused(missing: str) -> None:
    with pytest.raises(ProtocolError):
        parse_request(json.dumps({name: value for name, value in GOOD.items() if name != missing}).encode())


@given(
    st.one_of(st.binary(max_size=100), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
)
def test_any_bytes_are_no_answer(packet: bytes | str) -> None:
    raw = packet if isinstance(packet, bytes) else packet.encode()
    for parse in (parse_answer, parse_request):
        with pytest.raises(ProtocolError):
            parse(raw)
