"""No slot holds memory that its limit does not count: every family of sockets, type and protocol, and their buffers."""

from __future__ import annotations

import json
import os
import resource
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from agentenv.executor.session import ToolSession
from tests.security import socket_walk
from tests.security.conftest import sh
from tests.security.image_slots import LIMITS, ImageSlots, container, make_images

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can give image slots their ids"),
]

_IPV4, _IPV6, _STREAM, _DATAGRAM, _RAW = map(
    int, (socket.AF_INET, socket.AF_INET6, socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW)
)
_ICMP, _TCP, _UDP, _ICMPV6 = 1, 6, 17, 58
LISTED: Final = {
    *((family, _STREAM, protocol) for family in (_IPV4, _IPV6) for protocol in (0, _TCP)),
    *((family, _DATAGRAM, protocol) for family in (_IPV4, _IPV6) for protocol in (0, _UDP)),
    *((int(socket.AF_UNIX), kind, protocol) for kind in (1, 2, 3, 5) for protocol in (0, 1)),
    *((int(socket.AF_NETLINK), kind, 0) for kind in (_DATAGRAM, _RAW)),
}
OF_ROOT: Final = {(_IPV4, _RAW, _ICMP), (_IPV6, _RAW, _ICMPV6)}
"""Which Debian's ping needs."""
WHO: Final = {
    "plain": ("", LISTED),
    "image": ("", LISTED | OF_ROOT),
    "user of an image": ("setpriv --reuid 1000 --clear-groups ", LISTED),
}
ERRORS: Final = {
    _IPV4: {"EPROTONOSUPPORT", "EPERM", "EACCES"},
    _IPV6: {"EPROTONOSUPPORT", "EPERM", "EACCES"},
    int(socket.AF_NETLINK): {"EPROTONOSUPPORT", "ESOCKTNOSUPPORT"},
    int(socket.AF_UNIX): {"EPROTONOSUPPORT", "ESOCKTNOSUPPORT"},
}
MOST_GROWN: Final = LIMITS.memory_bytes * 1.1
TRIES: Final = 3
"""Counted is all of the machine: what others take meanwhile comes and goes, what a slot takes is there each time."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def container_of_images(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ImageSlots]:
    async with container(make_images(tmp_path_factory.mktemp("images"))) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def slots(container_of_images: ImageSlots) -> AsyncIterator[ImageSlots]:
    yield container_of_images
    await container_of_images.release_all()


async def _open(slots: ImageSlots, who: str) -> ToolSession:
    session = await (slots.open_plain() if who == "plain" else slots.open())
    text = Path(socket_walk.__file__).read_text()
    await session.call("write_file", {"path": "/tmp/walk.py", "text": text})
    await sh(session, "chmod 644 /tmp/walk.py")
    return session


@pytest.mark.parametrize("who", WHO)
async def test_sockets_are_those_of_the_list(slots: ImageSlots, who: str) -> None:
    session = await _open(slots, who)
    before, listed = WHO[who]
    result = await session.call("bash", {"command": f"{before}python3 /tmp/walk.py walk"}, timeout_s=120)
    told = json.loads(result.stdout)
    assert {tuple(each) for each in told["made"]} == listed
    odd = [each for each in told["refused"] if each[2] not in ERRORS.get(each[0], {"EAFNOSUPPORT"})]
    assert odd == [], "programs fall back on these errors"


def _uncounted_bytes() -> int:
    """What the machine has in slabs and mappings of the kernel, and in the buffers of TCP and UDP."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    kib = sum(int(lines[name].split()[0]) for name in ("SUnreclaim", "VmallocUsed"))
    words = Path("/proc/net/sockstat").read_text().split()
    pages = sum(int(words[at + 1]) for at, word in enumerate(words) if word == "mem")
    return kib * 1024 + pages * resource.getpagesize()


@pytest.mark.parametrize("attempt", socket_walk.ATTEMPTS)
@pytest.mark.parametrize("who", WHO)
async def test_buffers_stay_within_the_slots_memory(slots: ImageSlots, who: str, attempt: str) -> None:
    command = f"{WHO[who][0]}python3 /tmp/walk.py hold {attempt} > /tmp/held 2>&1 & p=$!; " + (
        "until [ -s /tmp/held ] || ! kill -0 $p 2>/dev/null; do sleep 0.05; done; cat /tmp/held"
    )
    grown: list[int] = []
    told = ""
    while len(grown) < TRIES and not any(each < MOST_GROWN for each in grown):
        session = await _open(slots, who)
        idle = _uncounted_bytes()
        told = await sh(session, command, timeout_s=60)
        grown.append(_uncounted_bytes() - idle)
        await slots.release_all()
    assert min(grown) < MOST_GROWN, f"{min(grown) >> 20} MiB beside the {LIMITS.memory_bytes >> 20} of the slot: {told}"
