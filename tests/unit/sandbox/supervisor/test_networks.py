"""What a slot with network may not reach in a container that has a host."""

from __future__ import annotations

from ipaddress import IPv4Network
from pathlib import Path

import pytest

from agentenv.errors import ConfigError
from agentenv.sandbox.closed_networks import attached_networks
from agentenv.sandbox.supervisor.network import closed_networks
from agentenv.wire.spec import SandboxSpec

ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010011AC\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
eth1\t0000000A\t010011AC\t0003\t0\t0\t0\t000000FF\t0\t0\t0
lo\t0000007F\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0
"""


def spec(*closed: str) -> SandboxSpec:
    return SandboxSpec(container="c", token_file="t", data_dir="d", allow_network=True, closed_networks=closed)


def test_attached_networks_are_those_without_a_gateway() -> None:
    assert attached_networks(ROUTES) == [IPv4Network("172.17.0.0/16")]


def test_named_networks_are_closed_once_and_loopback_always_as_a_whole() -> None:
    found = closed_networks(spec("10.0.0.0/8", "127.0.0.1/32", "169.254.0.0/16"))

    assert IPv4Network("10.0.0.0/8") in found
    assert len(found) == len(set(found))
    assert [network for network in found if network.is_loopback] == [IPv4Network("127.0.0.0/8")]


def test_attached_closes_what_this_machine_is_on() -> None:
    closed = set(closed_networks(spec("attached"))) - set(closed_networks(spec()))

    assert closed <= set(attached_networks(Path("/proc/net/route").read_text()))


@pytest.mark.parametrize("name", ["10.0.0.1/8", "example.org", "fd00::/8", ""])
def test_what_is_no_network_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="closed_networks"):
        spec(name)
