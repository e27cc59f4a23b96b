"""A flood of one slot's proxy, and how the fetches of another slot do beside it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.integration.slot_networks import OTHER, Networks, Slot, inside, networks, process
from tests.security import proxy_floods

SOURCE = Path(proxy_floods.__file__)
FLOODER, NEIGHBOUR = 0, 1


@contextmanager
def farm() -> Iterator[Networks]:
    """Two slots, each with an allow list, and hosts for both, whose processes are not the same."""
    with networks() as world:
        sink = inside(world.internet, sys.executable, "-B", str(SOURCE), "sink", OTHER)
        with process(sink, stdout=subprocess.PIPE) as serving:
            assert serving.stdout is not None
            assert serving.stdout.readline() == "serving\n"
            world.apply(FLOODER, "allow", "other.test", "*.flood.test")
            world.apply(NEIGHBOUR, "allow", "web.test")
            yield world


@contextmanager
def flooded(world: Networks, kind: str) -> Iterator[None]:
    """The flood is at work."""
    slot = world.slots[FLOODER]
    run = ["bash", "-c", 'ulimit -n 4096; exec python3 -c "$0" "$@"', SOURCE.read_text()]
    flooding = slot.start(*run, "flood", kind, proxy_port(slot))
    assert flooding.stdout is not None
    try:
        assert flooding.stdout.readline() == b"at work\n"
        yield
    finally:
        flooding.kill()
        flooding.communicate()


def fetches_s(world: Networks, count: int) -> list[float]:
    """Seconds of the neighbour's fetches, one after the other."""
    slot = world.slots[NEIGHBOUR]
    done = slot.run("python3", "-c", SOURCE.read_text(), "fetch", proxy_port(slot), str(count), timeout_s=300)
    assert done.returncode == 0, done.stderr
    took_s: list[float] = json.loads(done.stdout)
    return took_s


def change_s(world: Networks, slot: int, *hosts: str) -> float:
    """Seconds that a change of the slot's policy to these hosts takes."""
    began_s = time.monotonic()
    world.apply(slot, "allow", *hosts)
    return time.monotonic() - began_s


def proxy_port(slot: Slot) -> str:
    return str(urlsplit(slot.env["http_proxy"]).port)
