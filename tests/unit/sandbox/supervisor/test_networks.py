"""What a slot with network may not reach in a container that has a host."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network
from pathlib import Path

import pytest

from agentenv.errors import ConfigError
from agentenv.sandbox.closed_networks import (
    ClosedNetworks,
    attached_ipv6_networks,
    attached_networks,
    closed_now,
    machine_ipv6_addresses,
)
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


IPV6_ROUTES = """\
fd000000000000000000000000000000 40 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000001 00000000 00000001     eth0
00000000000000000000000000000000 00 00000000000000000000000000000000 00 fd000000000000000000000000000001 00000400 00000001 00000000 00000003     eth0
fd010000000000000000000000000000 40 00000000000000000000000000000000 00 fd000000000000000000000000000001 00000400 00000001 00000000 00000003     eth0
00000000000000000000000000000001 80 00000000000000000000000000000000 00 00000000000000000000000000000000 00000000 00000002 00000000 80200001       lo
"""  # noqa: E501 - as the kernel writes it
IPV6_ADDRESSES = """\
00000000000000000000000000000001 01 80 10 80       lo
fd000000000000000000000000000009 02 40 20 80     eth0
"""


def test_ipv6_addresses_and_networks_of_the_machine_are_found() -> None:
    assert machine_ipv6_addresses(IPV6_ADDRESSES) == [IPv6Network("::1"), IPv6Network("fd00::9")]
    assert attached_ipv6_networks(IPV6_ROUTES) == [IPv6Network("fd00::/64")]


def test_what_is_closed_is_read_again_when_it_is_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fib_trie").write_text("     |-- 192.0.2.2\n        /32 host LOCAL\n")
    (tmp_path / "if_inet6").write_text(IPV6_ADDRESSES)
    (tmp_path / "ipv6_route").write_text(IPV6_ROUTES)
    (tmp_path / "route").write_text(ROUTES)
    own = [IPv4Network("192.0.2.2"), IPv6Network("::1"), IPv6Network("fd00::9")]
    attached = [IPv4Network("172.17.0.0/16"), IPv6Network("fd00::/64")]
    assert closed_now((), tmp_path) == own
    assert set(closed_now(("attached", "10.0.0.0/8"), tmp_path)) == {*own, *attached, IPv4Network("10.0.0.0/8")}
    now_s = 100.0
    monkeypatch.setattr("agentenv.sandbox.closed_networks.closed_now", lambda names: [*names, now_s])
    closed = ClosedNetworks(("a",), lambda: now_s)
    assert closed() == ["a", 100.0]
    now_s = 104.9
    assert closed() == ["a", 100.0]
    now_s = 105.0
    assert closed() == ["a", 105.0]
