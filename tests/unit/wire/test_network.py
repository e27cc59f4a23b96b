"""Network policies: how they are written, and what they let a slot connect to."""

from __future__ import annotations

import ipaddress
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import ConfigError, InvalidArgumentsError, PolicyRefusalError
from agentenv.wire.addresses import host, host_name
from agentenv.wire.network import MOST_HOSTS, NetworkPolicy, allows, judge_address, judge_host

PUBLIC = ipaddress.ip_address("93.184.216.34")


def allowing(*hosts: str) -> NetworkPolicy:
    return NetworkPolicy("allow", hosts)


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("Example.ORG.", "example.org"),
        ("*.Example.org:443", "*.example.org:443"),
        ("*", "*"),
        ("*:443", "*:443"),
        ("münchen.de", "xn--mnchen-3ya.de"),
        ("日本語。jp", "xn--wgv71a119e.jp"),
        ("192.0.2.1:22", "192.0.2.1:22"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("10.0.0.0/8:80", "10.0.0.0/8:80"),
        ("2001:DB8::1", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("[2001:db8::1]:443", "[2001:db8::1]:443"),
        ("[2001:db8::]/32:443", "[2001:db8::]/32:443"),
        ("_service.example.org", "_service.example.org"),
    ],
)
def test_a_host_is_kept_in_its_one_form(written: str, kept: str) -> None:
    assert allowing(written).hosts == (kept,)
    assert allowing(kept).hosts == (kept,)


@pytest.mark.parametrize(
    "written",
    ["", " ", "a b", "a..b", ".a", "-a.org", "a-.org", "*.", "*.*.org", "a*.org", "a.*", "http://a.org", "a.org/x",
     "a.org:0", "a.org:65536", "a.org:x", "a:b:c", "10.0.0.1/8", "10.0.0.0/33", "127.1", "2130706433", "0x7f.0.0.1",
     "010.0.0.1", "1.2.3.4.5", "fe80::1%eth0", "[fe80::1%eth0]:80", "64:ff9b::/96", "::ffff:0:0/96", "straße.de",
     "a" * 64 + ".org", "a." * 127 + "org", "a\0.org", "a.org\n", "[::1", "user@a.org"],
)  # fmt: skip
def test_what_is_no_host_is_refused_and_named(written: str) -> None:
    with pytest.raises(ConfigError) as refused:
        allowing("example.org", written)
    assert refused.value.field == "network.hosts[1]"
    assert refused.value.next_step


def test_what_is_denied_is_closed_in_every_notation() -> None:
    policy = NetworkPolicy("public", denied=("10.0.0.0/8", "93.184.216.34", "2001:db8::/32"))
    assert NetworkPolicy.parse(json.loads(json.dumps(policy.to_json()))) == policy
    assert policy.to_json()["denied"] == ["10.0.0.0/8", "93.184.216.34/32", "2001:db8::/32"]
    for closed in ("10.1.2.3", "93.184.216.34", "::ffff:10.1.2.3", "2001:db8::1"):
        assert not allows(policy, closed, 443), closed
    assert allows(policy, "93.184.216.35", 443)
    assert allows(policy, "example.org", 443, ipaddress.ip_address("93.184.216.35"))
    assert not allows(policy, "example.org", 443, PUBLIC), "whatever name leads there"
    assert "except 10.0.0.0/8" in policy.described()
    assert NetworkPolicy("public").to_json() == {"kind": "public", "hosts": []}, "as it was before there were denials"


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ("none", "lease.network"),
        ({}, "lease.network"),
        ({"kind": "none", "more": 1}, "lease.network"),
        ({"kind": "some"}, "lease.network.kind"),
        ({"kind": None}, "lease.network.kind"),
        ({"kind": ["allow"]}, "lease.network.kind"),
        ({"kind": "public", "hosts": ["example.org"]}, "lease.network.hosts"),
        ({"kind": "allow", "hosts": ["example.org"], "denied": ["10.0.0.0/8"]}, "lease.network.denied"),
        ({"kind": "none", "denied": ["10.0.0.0/8"]}, "lease.network.denied"),
        ({"kind": "public", "denied": "10.0.0.0/8"}, "lease.network.denied"),
        ({"kind": "public", "denied": ["10.0.0.0/8", "example.org"]}, "lease.network.denied[1]"),
        ({"kind": "public", "denied": ["*"]}, "lease.network.denied[0]"),
        ({"kind": "public", "denied": ["10.0.0.1:443"]}, "lease.network.denied[0]"),
        ({"kind": "public", "denied": ["0.0.0.0/0"]}, "lease.network.denied[0]"),
        ({"kind": "public", "denied": [1]}, "lease.network.denied[0]"),
        ({"kind": "public", "denied": ["10.0.0.1"] * (MOST_HOSTS + 1)}, "lease.network.denied"),
        ({"kind": "allow"}, "lease.network.hosts"),
        ({"kind": "allow", "hosts": "example.org"}, "lease.network.hosts"),
        ({"kind": "allow", "hosts": [1]}, "lease.network.hosts[0]"),
        ({"kind": "allow", "hosts": ["example.org", "a b"]}, "lease.network.hosts[1]"),
        ({"kind": "allow", "hosts": ["a.org"] * (MOST_HOSTS + 1)}, "lease.network.hosts"),
    ],
)
def test_a_malformed_policy_names_its_field(raw: Any, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        NetworkPolicy.parse(raw, "lease.network")
    assert refused.value.field == field


@pytest.mark.parametrize(
    "policy",
    [NetworkPolicy(), NetworkPolicy("public"), allowing("example.org", "*.index.example.org:443", "[2001:db8::]/32:1")],
)
def test_a_policy_is_what_its_json_says(policy: NetworkPolicy) -> None:
    assert NetworkPolicy.parse(json.loads(json.dumps(policy.to_json()))) == policy


def test_the_largest_policy_fits_a_packet() -> None:
    longest = ".".join(["a" * 63] * 3 + ["a" * 57]) + "." + "b"
    policy = allowing(*[f"*.{longest[2:]}:65535"] * MOST_HOSTS)
    assert len(json.dumps(policy.to_json())) < 60 * 1024


@pytest.mark.parametrize(
    ("hosts", "wanted", "port", "address"),
    [
        (["example.org"], "example.org", 443, "93.184.216.34"),
        (["example.org"], "EXAMPLE.org.", 8080, "93.184.216.34"),
        (["example.org"], "example.org", 443, "2606:4700::1"),
        (["*.example.org"], "a.b.example.org", 443, "93.184.216.34"),
        (["example.org:443"], "example.org", 443, "93.184.216.34"),
        (["a.org:80", "a.org:443"], "a.org", 443, "93.184.216.34"),
        (["münchen.de"], "xn--mnchen-3ya.de", 443, "93.184.216.34"),
        (["db.internal", "10.0.0.0/8"], "db.internal", 5432, "10.1.2.3"),
        (["*"], "any.example", 1, "93.184.216.34"),
        (["*"], "93.184.216.34", 1, None),
        (["10.0.0.0/8"], "10.1.2.3", 5432, None),
        (["93.184.216.34"], "[::ffff:93.184.216.34]", 80, None),
        (["2001:db8::/32"], "2001:db8::1", 80, None),
        (["2001:db8::/32"], "[2001:0DB8::1]", 80, None),
    ],
)
def test_what_is_on_the_list_is_allowed(hosts: list[str], wanted: str, port: int, address: str | None) -> None:
    assert allows(allowing(*hosts), wanted, port, ipaddress.ip_address(address) if address else None)


@pytest.mark.parametrize(
    ("hosts", "wanted", "port", "address"),
    [
        (["example.org"], "example.com", 443, "93.184.216.34"),
        (["example.org"], "a.example.org", 443, "93.184.216.34"),
        (["example.org"], "example.org.evil.com", 443, "93.184.216.34"),
        (["*.example.org"], "example.org", 443, "93.184.216.34"),
        (["*.example.org"], "evilexample.org", 443, "93.184.216.34"),
        (["example.org:443"], "example.org", 80, "93.184.216.34"),
        (["example.org"], "93.184.216.34", 443, None),
        (["10.0.0.0/8"], "db.internal", 443, "10.1.2.3"),  # networks are for addresses written as such
        (["example.org"], "example.org", 443, "10.1.2.3"),
        (["example.org", "10.0.0.0/8:80"], "example.org", 443, "10.1.2.3"),
        (["example.org"], "example.org", 443, "127.0.0.1"),
        (["example.org"], "example.org", 443, "::ffff:127.0.0.1"),
        (["example.org"], "example.org", 443, "64:ff9b::7f00:1"),
        (["example.org"], "example.org", 443, "2002:7f00:1::"),
        (["example.org"], "example.org", 443, "fe80::1"),
        (["example.org"], "example.org", 443, "fd00::1"),
        (["example.org"], "example.org", 443, "100.64.0.1"),
        (["*"], "169.254.169.254", 80, None),
        (["*"], "10.0.0.1", 80, None),
        (["*"], "a b", 80, "93.184.216.34"),
        (["*"], "127.1", 80, "93.184.216.34"),
        (["*"], "0177.0.0.1", 80, "93.184.216.34"),
        (["*"], "fe80::1%eth0", 80, None),
        (["*"], "", 80, "93.184.216.34"),
    ],
)
def test_what_is_not_is_refused(hosts: list[str], wanted: str, port: int, address: str | None) -> None:
    assert not allows(allowing(*hosts), wanted, port, ipaddress.ip_address(address) if address else None)


NEVER = ["127.0.0.1", "127.9.9.9", "0.0.0.0", "169.254.169.254", "224.0.0.1", "255.255.255.255", "::", "::1",
         "fe80::1", "ff02::1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe",
         "64:ff9b:1::a9fe:a9fe"]  # fmt: skip


@pytest.mark.parametrize("address", NEVER)
@pytest.mark.parametrize(
    "policy", [NetworkPolicy("public"), allowing("*"), allowing("0.0.0.0/0", "::/0", "*", "127.0.0.1")]
)
def test_this_machine_and_link_local_are_closed_whatever_the_policy_says(policy: NetworkPolicy, address: str) -> None:
    assert not allows(policy, "example.org", 80, ipaddress.ip_address(address))
    assert not allows(policy, address, 80)


def test_closed_networks_win_over_the_policy() -> None:
    closed = [ipaddress.ip_network("93.184.216.0/24"), ipaddress.ip_network("2606:4700::1/128")]
    for policy in (NetworkPolicy("public"), allowing("example.org", "93.184.216.34", "::/0")):
        assert allows(policy, "example.org", 80, PUBLIC)
        for address in ("93.184.216.34", "::ffff:93.184.216.34", "2606:4700::1"):
            assert not allows(policy, "example.org", 80, ipaddress.ip_address(address), closed)


def test_none_lets_nothing_out_and_public_reaches_private_networks() -> None:
    assert not allows(NetworkPolicy(), "example.org", 80, PUBLIC)
    assert not allows(NetworkPolicy(), "93.184.216.34", 80)
    assert allows(NetworkPolicy("public"), "db.internal", 80, ipaddress.ip_address("10.1.2.3"))


def test_a_refusal_says_what_is_allowed_in_words_for_a_model() -> None:
    policy = allowing("index.example.org:443", "*.example.net")
    with pytest.raises(
        PolicyRefusalError, match=r"example\.com is not an allowed host\. .*index\.example\.org:443, \*\.example\.net"
    ):
        judge_host(policy, "example.com", 443)
    with pytest.raises(PolicyRefusalError, match=r"Port 80 of index\.example\.org is not allowed, only 443"):
        judge_host(policy, "index.example.org", 80)
    with pytest.raises(PolicyRefusalError, match=r"10\.0\.0\.1 is not a public address"):
        judge_address(policy, ipaddress.ip_address("10.0.0.1"), 443)
    with pytest.raises(PolicyRefusalError, match="has no network access"):
        judge_host(NetworkPolicy(), "example.com", 443)
    many = allowing(*(f"h{number}.org" for number in range(30)))
    assert many.described().endswith("h19.org and 10 more.")


LABEL = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
NAME = st.lists(LABEL, min_size=1, max_size=4).map(lambda labels: ".".join([*labels, "test"]))


@given(NAME, NAME)
def test_only_the_name_itself_matches_a_name(one: str, other: str) -> None:
    assert allows(allowing(one), one.upper() + ".", 80, PUBLIC)
    assert allows(allowing(one), other, 80, PUBLIC) == (one == other)


@given(NAME, NAME)
def test_a_wildcard_matches_what_is_below_and_nothing_else(one: str, other: str) -> None:
    policy = allowing(f"*.{one}")
    assert allows(policy, f"{other}.{one}", 80, PUBLIC)
    assert not allows(policy, one, 80, PUBLIC)
    assert allows(policy, other, 80, PUBLIC) == other.endswith(f".{one}")
    assert not allows(policy, f"{other}x{one}", 80, PUBLIC) or f"{other}x{one}".endswith(f".{one}")


@given(st.ip_addresses(v=4), st.integers(0, 32))
def test_an_ipv4_address_is_the_same_in_all_its_wrappings(address: ipaddress.IPv4Address, bits: int) -> None:
    network = ipaddress.ip_network((int(address) >> (32 - bits) << (32 - bits), bits))
    policy = allowing(str(network))
    wrapped = [f"[::ffff:{address}]", str(ipaddress.IPv6Address((0x64FF9B << 96) | int(address)))]
    assert {allows(policy, each, 80) for each in (str(address), *wrapped)} == {allows(policy, str(address), 80)}


@given(st.ip_addresses(), st.ip_addresses())
def test_an_address_allows_no_other(one: Any, other: Any) -> None:
    same = host(str(one)) == host(str(other))
    assert not allows(allowing(str(one)), str(other), 80) or same


@given(st.text(max_size=80))
def test_any_text_is_a_host_in_its_one_form_or_refused(text: str) -> None:
    try:
        name = host_name(text)
    except InvalidArgumentsError:
        return
    assert name == host_name(name)
    assert name.isascii()
    assert name == name.lower()
    assert not set(name) & set(" /:@%[]?#\\\r\n\0")


@given(st.text(alphabet="0123456789abcdefx.:[]%*/-_", max_size=40))
def test_any_rule_means_what_its_kept_form_means(text: str) -> None:
    try:
        policy = allowing(text)
    except ConfigError:
        return
    assert allowing(*policy.hosts) == policy
