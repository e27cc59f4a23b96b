"""What a request's options mean, and what is refused by name."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest

from agentenv.e2b.replies import (
    RefusalError,
    check_supported,
    moment,
    network_of,
    sandbox_and_port,
    signed_for,
    unix_s,
    wanted_metadata,
)
from agentenv.wire.network import NetworkPolicy


@pytest.mark.parametrize(
    ("asked", "network"),
    [
        ({}, "public"),
        ({"allow_internet_access": True}, "public"),
        ({"allow_internet_access": False}, "none"),
        ({"network": {"denyOut": ["0.0.0.0/0"]}}, "none"),
        (
            {"network": {"denyOut": ["0.0.0.0/0"], "allowOut": ["1.1.1.1", "*.example.org"]}},
            ["1.1.1.1", "*.example.org"],
        ),
        ({"allow_internet_access": False, "network": {"allowOut": ["example.org"]}}, ["example.org"]),
        ({"network": {"denyOut": ["10.0.0.0/8"], "allowOut": ["0.0.0.0/0"]}}, "public"),
        ({"network": {"allowOut": ["example.org"]}}, "public"),
        ({"denyOut": ["0.0.0.0/0"], "allowOut": ["example.org"]}, ["example.org"]),
        (
            {"network": {"denyOut": ["8.8.8.8", "10.0.0.0/8"]}},
            NetworkPolicy("public", denied=("10.0.0.0/8", "8.8.8.8")),
        ),
    ],
)
def test_what_a_sandbox_may_reach(asked: dict[str, Any], network: object) -> None:
    assert network_of(asked) == network


@pytest.mark.parametrize(
    ("network", "said"),
    [
        ({"denyOut": ["8.8.8.8"], "allowOut": ["a.org"]}, "single denied networks (8.8.8.8)"),
        ({"rules": {"example.org": []}, "dnsServers": ["8.8.8.8"]}, "network.dnsServers"),
        ({"egressProxy": {"url": "socks5://x"}}, "network.egressProxy"),
        ({"rules": {"example.org": [{"transform": {}}]}}, "network.rules"),
    ],
)
def test_what_no_slot_has_is_refused_by_name(network: dict[str, Any], said: str) -> None:
    with pytest.raises(RefusalError) as refused:
        network_of({"network": network})
    assert refused.value.status == 501
    assert said in refused.value.message


def test_volumes_are_refused_by_name() -> None:
    with pytest.raises(RefusalError, match="volumeMounts: this farm has no volumes"):
        check_supported({"volumeMounts": [{"name": "x", "path": "/x"}]})
    check_supported({"volumeMounts": [], "iam": None, "metadata": {"a": "b"}})


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("8080-0a1b2c.example.org", ("0a1b2c", 8080)),
        ("49983-0a1b2c.example.org:3000", ("0a1b2c", 49983)),
        ("127.0.0.1:3000", None),
        ("api.example.org", None),
        ("x-0a1b2c.example.org", None),
    ],
)
def test_a_host_name_is_for_a_port_of_a_sandbox(host: str, found: tuple[str, int] | None) -> None:
    assert sandbox_and_port(host) == found


@pytest.mark.parametrize("expires", [None, "1700000000"])
def test_a_link_is_the_sandboxs_whose_token_signed_it(expires: str | None) -> None:
    text = "/home/user/a b:read:user:secret" + (f":{expires}" if expires else "")
    made = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
    query = {"path": "/home/user/a b", "username": "user", "signature": f"v1_{made}"}
    query |= {"signature_expiration": expires} if expires else {}
    assert signed_for(query, "secret")
    assert not signed_for(query, "another")
    assert not signed_for({**query, "path": "/etc/passwd"}, "secret")


def test_times_and_filters() -> None:
    assert moment(0.5) == "1970-01-01T00:00:00.500000Z"
    assert unix_s("1970-01-01T00:01:00Z") == unix_s("60") == 60.0
    assert wanted_metadata("a%2520b=c%2526d&e=f") == {"a b": "c&d", "e": "f"}
