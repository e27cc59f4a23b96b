"""Host names and IP addresses as programs write them. Pure, standard library only."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from agentenv.errors import InvalidArgumentsError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MOST_NAME_CHARS: Final = 253
"""RFC 1035, 2.3.4, without the final dot."""
_LABEL: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER: Final = re.compile(r"\d+|0x[0-9a-f]*", re.IGNORECASE)
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL_IPV6: Final = ipaddress.ip_network("2000::/3")
"""IANA assigns no other for the Internet; what is outside of it is private, link- or site-local, or unassigned."""
_SPECIAL: Final = tuple(
    ipaddress.ip_network(network)
    for network in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16"),
        *("192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        *("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20"),
    )
)
"""The special-purpose registries of IANA and multicast: also the anycast addresses that may be reached globally, each
of which is a service of whichever network is nearest. Python's ``is_global`` misses what was added after its release,
and counts site-local addresses."""
_TRANSLATED_TWO_WAYS: Final = "ßς\u200c\u200d"


def as_address(host: str) -> Address | None:
    """The IP address a host is written as; None for a name."""
    try:
        return ipaddress.ip_address(host.rstrip(".").strip("[]").partition("%")[0])
    except ValueError:
        return None


def ends_in_a_number(host: str) -> bool:
    """Whether some software would read it as an IPv4 address (``2130706433``, ``127.1``, ``0x7f.1``) although
    :func:`as_address` does not: the last part of a name is never a number."""
    return as_address(host) is None and _NUMBER.fullmatch(host.rpartition(".")[2]) is not None


def unwrapped(address: Address) -> Address:
    """The IPv4 address inside an IPv6 one, if that is the address reached."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if address.sixtofour is not None:
            return address.sixtofour
    return address


def is_public(address: Address) -> bool:
    """Whether it is an address of the Internet: neither private, nor this machine's, nor reserved, nor for many."""
    real = unwrapped(address)
    if real.version == 6 and real not in _GLOBAL_IPV6:
        return False
    return not any(real in network for network in _SPECIAL)


def host_name(text: str) -> str:
    """A host name in its one form: ASCII, lower case, no final dot.

    Names in other scripts are translated (IDNA 2003). Raises InvalidArgumentsError for what is not a host name, for
    numbers that some software reads as an address, and for a name whose translation differs between IDNA 2003 and
    2008 (``ß``), which would name another host.
    """
    if any(letter in text for letter in _TRANSLATED_TWO_WAYS):
        raise InvalidArgumentsError(f"{text[:300]!r} is translated in two ways; write its xn-- form")
    name = text.removesuffix(".").lower()
    if not name.isascii():
        try:
            name = name.encode("idna").decode("ascii").lower()
        except UnicodeError as error:
            raise InvalidArgumentsError(f"{text[:300]!r} is not a host name: {error}") from error
    if len(name) > MOST_NAME_CHARS or not all(map(_LABEL.fullmatch, name.split("."))):
        raise InvalidArgumentsError(f"{text[:300]!r} is not a host name")
    if ends_in_a_number(name):
        raise InvalidArgumentsError(
            f"{text[:300]!r} is neither a host name nor an IP address",
            next_step="write an address as 192.0.2.1 or [2001:db8::1]",
        )
    return name


def host(text: str) -> str | Address:
    """A host as :func:`host_name` or as the address it is written as: ``192.0.2.1``, ``2001:db8::1`` or that in
    brackets. Raises InvalidArgumentsError for anything else, also for octal, hexadecimal or shortened IPv4
    addresses and for an address with a zone."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text.removesuffix(".")
    try:
        return unwrapped(ipaddress.ip_address(bare)) if "%" not in bare else host_name(text)
    except ValueError:
        return host_name(text)
