"""Which addresses are public: IANA's special-purpose registries, written down here, decide."""

from __future__ import annotations

import ipaddress

import pytest

from agentenv.wire.addresses import is_public

# https://www.iana.org/assignments/iana-ipv4-special-registry and iana-ipv6-special-registry, every row (2025), and what
# RFC 4291 and the IPv6 address space registry set apart.
SPECIAL_RANGES = """
0.0.0.0/8 0.0.0.0/32 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.0.0/29
192.0.0.8/32 192.0.0.9/32 192.0.0.10/32 192.0.0.170/32 192.0.0.171/32 192.0.2.0/24 192.31.196.0/24 192.52.193.0/24
192.88.99.0/24 192.168.0.0/16 192.175.48.0/24 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 240.0.0.0/4
255.255.255.255/32 224.0.0.0/4
::1/128 ::/128 64:ff9b:1::/48 100::/64 100:0:0:1::/64 2001::/23 2001::/32 2001:1::1/128 2001:1::2/128 2001:1::3/128
2001:2::/48 2001:3::/32 2001:4:112::/48 2001:10::/28 2001:20::/28 2001:30::/28 2001:db8::/32 2620:4f:8000::/48
3fff::/20 5f00::/16 fc00::/7 fe80::/10
fec0::/10 ff00::/8 ::/96 200::/7 400::/6 800::/5 1000::/4 4000::/3 6000::/3 8000::/3 a000::/3 c000::/3 e000::/4
"""
PUBLIC_ADDRESSES = """
1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.0 169.253.255.255
172.15.255.255 172.32.0.0 191.255.255.255 192.0.1.0 192.0.3.0 192.167.255.255 192.169.0.0 198.17.255.255 198.20.0.0
223.255.255.255 2000:: 2001:200:: 2001:4860:4860::8888 2001:db7:: 2001:db9:: 2003:: 2606:4700::1111 3ffe:: 3fff:1000::
"""
WRAPPED_IN = ("::ffff:{0}", "64:ff9b::{0}")


@pytest.mark.parametrize("network", SPECIAL_RANGES.split())
def test_no_address_of_a_special_range_is_public(network: str) -> None:
    of = ipaddress.ip_network(network)
    for address in (of[0], of[-1], of[of.num_addresses // 2]):
        assert not is_public(address), address
        if address.version == 4:
            wrapped = [form.format(address) for form in WRAPPED_IN] + [
                f"2002:{int(address) >> 16:x}:{int(address) & 0xFFFF:x}::"
            ]
            assert not any(is_public(ipaddress.ip_address(text)) for text in wrapped), address


@pytest.mark.parametrize("text", PUBLIC_ADDRESSES.split())
def test_what_is_beside_them_is_public(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))
    if ":" not in text:
        assert all(is_public(ipaddress.ip_address(form.format(text))) for form in WRAPPED_IN)
