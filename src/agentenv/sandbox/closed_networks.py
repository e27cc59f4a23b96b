"""Addresses that no slot with network may reach: this machine's own, and those its settings close."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterable
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path

from agentenv.wire.addresses import Network
from agentenv.wire.spec import ATTACHED

_FRESH_S = 5.0


def machine_addresses(fib_trie: str) -> list[IPv4Network]:
    """The machine's own IPv4 addresses, from the text of ``/proc/net/fib_trie``; no loopback."""
    found: set[IPv4Network] = set()
    address = ""
    for line in fib_trie.splitlines():
        words = line.split()
        if words[:1] == ["|--"]:
            address = words[1]
        elif words[:3] == ["/32", "host", "LOCAL"]:
            found.add(IPv4Network(address))
    return sorted(network for network in found if not network.is_loopback)


def machine_ipv6_addresses(if_inet6: str) -> list[IPv6Network]:
    """The machine's own IPv6 addresses, from the text of ``/proc/net/if_inet6``."""
    return sorted({IPv6Network(bytes.fromhex(line.split()[0])) for line in if_inet6.splitlines()})


def attached_networks(routes: str) -> list[IPv4Network]:
    """The networks this machine is directly attached to, from the text of ``/proc/net/route``; no loopback."""
    found: set[IPv4Network] = set()
    for line in routes.splitlines()[1:]:
        device, destination, gateway, *_, mask = line.split()[:8]
        if device != "lo" and int(gateway, 16) == 0 and int(mask, 16) != 0:
            address, bits = (int(word, 16).to_bytes(4, sys.byteorder) for word in (destination, mask))
            found.add(IPv4Network((address, int.from_bytes(bits).bit_count())))
    return sorted(found)


def attached_ipv6_networks(ipv6_route: str) -> list[IPv6Network]:
    """The IPv6 networks this machine is directly attached to, from the text of ``/proc/net/ipv6_route``."""
    found: set[IPv6Network] = set()
    for line in ipv6_route.splitlines():
        destination, bits, _, _, gateway, *_, device = line.split()
        if device != "lo" and int(gateway, 16) == 0 and int(bits, 16) != 0:
            found.add(IPv6Network((bytes.fromhex(destination), int(bits, 16))))
    return sorted(found)


def closed_now(names: Iterable[str], proc: Path = Path("/proc/net")) -> list[Network]:
    """What is closed at present: the machine's own addresses and ``names``, the setting ``closed_networks``."""
    named = set(names)
    closed: set[Network] = {IPv4Network(name) for name in named - {ATTACHED}}
    if ATTACHED in named:
        closed.update(attached_networks((proc / "route").read_text()))
    closed.update(machine_addresses((proc / "fib_trie").read_text()))
    if socket.has_ipv6 and (proc / "if_inet6").exists():
        closed.update(machine_ipv6_addresses((proc / "if_inet6").read_text()))
        if ATTACHED in named:
            closed.update(attached_ipv6_networks((proc / "ipv6_route").read_text()))
    return sorted(closed, key=lambda network: (network.version, network))


class ClosedNetworks:
    """:func:`closed_now`, read again when it is older than 5 s."""

    def __init__(self, names: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._names = tuple(names)
        self._clock = clock
        self._read_at_s = -_FRESH_S
        self._found: list[Network] = []

    def __call__(self) -> list[Network]:
        """The networks. Raises OSError when the kernel's tables cannot be read."""
        if self._clock() - self._read_at_s >= _FRESH_S:
            self._found = closed_now(self._names)
            self._read_at_s = self._clock()
        return self._found
