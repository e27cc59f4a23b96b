"""Whatever a slot does to its proxy, its neighbour's network goes on (promises 2 and 3): a row for each attempt.

A row is a flood of :mod:`tests.security.proxy_floods`. The bounds are loose, because the machine is busy with the flood
and with other tests; ``python -m benchmarks.proxy`` measures.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator

import pytest

from tests.integration.slot_networks import Networks
from tests.security.proxy_floods import FLOODS
from tests.security.proxy_neighbours import FLOODER, NEIGHBOUR, change_s, farm, fetches_s, flooded

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="image slots are root's")

FETCHES = 15
ATTEMPTS = 3
"""Another load of the machine may come and go; what a flood does is there each time."""
SLOWER, OWN_S = 10.0, 0.25
"""How many times as long as in quiet, and how much longer besides, half of the fetches may take."""
CHANGE_S = 1.0
"""The same for a change of a network."""


@pytest.fixture(scope="module")
def world() -> Iterator[Networks]:
    with farm() as opened:
        yield opened


@pytest.mark.parametrize("kind", FLOODS)
def test_a_neighbour_fetches_and_changes_its_network_beside(world: Networks, kind: str) -> None:
    before = world.counts(NEIGHBOUR)
    late = ""
    for _ in range(ATTEMPTS):
        late = lateness(world, kind)
        if not late:
            break
    after = world.counts(NEIGHBOUR)
    assert (after["pid"], after["failed"], after["refused"]) == (before["pid"], before["failed"], before["refused"])
    assert not late, late


def lateness(world: Networks, kind: str) -> str:
    """What took too long beside the flood; empty if nothing did."""
    quiet_s = statistics.median(fetches_s(world, FETCHES))
    quiet_change_s = change_s(world, NEIGHBOUR, "web.test")
    with flooded(world, kind):
        beside_s = statistics.median(fetches_s(world, FETCHES))
        changes_s = min(change_s(world, NEIGHBOUR, "web.test") for _ in range(3))
        own_s = min(change_s(world, FLOODER, "other.test", "*.flood.test") for _ in range(3))
    if beside_s >= SLOWER * quiet_s + OWN_S:
        return f"a fetch: {beside_s:.3f} s instead of {quiet_s:.3f}"
    if max(changes_s, own_s) >= SLOWER * quiet_change_s + CHANGE_S:
        return f"a change: {changes_s:.3f} s, the flooder's own {own_s:.3f}, instead of {quiet_change_s:.3f}"
    return ""
